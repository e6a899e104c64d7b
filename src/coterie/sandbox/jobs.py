"""What a runner does with an answer: the scorers of reasoning-gym tasks and math-verify."""

from __future__ import annotations

import logging
import pickle
from typing import Any

from coterie.sandbox import gate
from coterie.sandbox.corrections import ALSO
from coterie.tasks import reasoning_gym
from coterie.tasks.verifiers import BadReference, normalise

Reply = dict[str, Any]


def prepare() -> None:
    """Import everything and run each library once, before the walls go up and before anything hostile is near."""
    from coterie.sandbox import code, mathematics

    logging.disable(logging.CRITICAL)
    reasoning_gym.names()
    mathematics.same("\\frac{1}{2}", "1/2 + x")
    code.prepare()


def score(op: str, blob: bytes) -> Reply:
    """Score one answer. Whatever a scorer raises is an outcome with its name, never a silent zero."""
    try:
        if op == "math":
            from coterie.sandbox import mathematics

            answer, reference = pickle.loads(blob)
            return _ok(mathematics.same(reference, answer))
        return _task(**pickle.loads(blob))
    except gate.Forbidden as e:
        return {"reward": 0.0, "outcome": "breach", "detail": f"forbidden: {e}"}
    except gate.NotAnExpression as e:
        return {"reward": 0.0, "outcome": "ok", "detail": str(e)}
    except BadReference as e:
        return {"reward": None, "outcome": "bad_reference", "detail": str(e)}
    except MemoryError:
        return {"reward": 0.0, "outcome": "breach", "detail": "memory: the limit was reached"}
    except Exception as e:  # a scorer choked on the text: named and counted by the trainer
        return {"reward": 0.0, "outcome": "error", "detail": f"{type(e).__name__}: {e}"[:300]}


def _task(name: str, params: dict[str, Any], entry: bytes, answer: str, partial: bool) -> Reply:
    source = reasoning_gym.dataset(name, params)
    best = 0.0
    for text in dict.fromkeys((answer, normalise(answer))):
        gate.check(name, text)
        reward = float(source.score_answer(text, pickle.loads(entry)))  # unpickled anew: some scorers change it
        if reward == 1.0 and name in ALSO and not ALSO[name](text, pickle.loads(entry)):
            reward = 0.0
        best = max(best, reward)
    return _ok(best if partial else float(best == 1.0))


def _ok(reward: float) -> Reply:
    return {"reward": reward, "outcome": "ok", "detail": ""}
