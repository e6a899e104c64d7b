"""A few worked answers that teach SmolLM2 to ask, with numbers drawn at random: they say how to ask and what to do with a reply,
and nothing about sums."""

from __future__ import annotations

import random
import re
from typing import Any


def cold_start(problem: Any, seed: int) -> str:
    rng = random.Random(seed)
    found = re.search(r"-?\d+(?: [+-] \d+)+", problem.prompt)
    asked = found.group() if found else problem.prompt
    said = rng.randint(-9, 18)
    return f"<knowledge>{asked}</knowledge>\n<feedback>\n{asked} = {said}\n</feedback>\nThe answer is {said}."
