"""The compiled decoder's cache of machine code."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.engines import emit, kernels


def test_stored_machine_code_is_not_used_after_a_change_of_the_emitted_instructions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "copied"
    package.mkdir()
    (package / "__init__.py").touch()
    for module in (emit, kernels):
        source = Path(str(module.__file__)).read_text(encoding="utf-8").replace("coterie.engines", "copied")
        (package / Path(str(module.__file__)).name).write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))

    def loaded_from_store() -> bool:
        for name in [n for n in sys.modules if n.split(".")[0] == "copied"]:
            del sys.modules[name]
        fresh: Any = importlib.import_module("copied.kernels")
        x = np.ones((1, 2), np.float32)
        fresh._add(x, 1, x.copy())
        assert x.tolist() == [[2.0, 2.0]]
        return bool(fresh._add.stats.cache_hits)

    assert [loaded_from_store(), loaded_from_store()] == [False, True]
    os.utime(package / "emit.py", (1, 1))
    assert not loaded_from_store()
