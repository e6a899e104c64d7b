"""Functions named in a config: ``module:function`` or ``path/file.py:function``."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from coterie.errors import UserError


def load_function(name: str) -> Callable[..., Any]:
    """Import the function a user named.

    Raises:
        UserError: not of the form, no such module or file, or no such function in it.
    """
    where, colon, what = name.rpartition(":")
    if not colon or not where or not what:
        raise UserError(f"{name!r}: name a function as module:function or path/file.py:function")
    try:
        module = _from_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except (ImportError, OSError) as e:
        raise UserError(f"{name!r}: cannot import {where} ({e})") from e
    except Exception as e:  # the edge to a user's code
        raise UserError(f"{name!r}: cannot import {where} ({type(e).__name__}: {e})") from e
    function = getattr(module, what, None)
    if not callable(function):
        raise UserError(f"{name!r}: {where} has no function {what}")
    return function  # type: ignore[no-any-return]


def _from_file(path: Path) -> Any:
    if not path.is_file():
        raise OSError(f"no such file: {path.absolute()}")
    return _executed(path.absolute(), path.read_bytes())


@cache  # checked before a run and used in it: executed once, as modules are
def _executed(path: Path, text: bytes) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise OSError(f"not a Python file: {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
