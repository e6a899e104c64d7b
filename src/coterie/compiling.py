"""How numba compiles functions here, the same way for all of them.

In a file of its own, as importing numba takes longer than many commands: only files of kernels import this one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit

# Sums may be regrouped (the same way each time), so that loops use vectors; NaN and infinity keep their meaning.
_FAST = {"reassoc", "contract", "nsz"}


def compiled(function: Callable[..., Any], depends: str = "") -> Any:
    """Compiled at the first call and kept on the disk until the function's file changes, or the file ``depends``."""
    try:
        made = njit(nogil=True, error_model="numpy", cache=True, fastmath=_FAST)(function)
    except RuntimeError:  # neither the package's folder nor the user's cache can be written: compiled in every process
        return njit(nogil=True, error_model="numpy", fastmath=_FAST)(function)
    if depends:
        stored, other = made._cache._cache_file, Path(depends).stat()
        stored._source_stamp = (stored._source_stamp, other.st_mtime, other.st_size)
    return made


def part(function: Callable[..., Any]) -> Any:
    """Compiled as part of what calls it, constants included."""
    return njit(nogil=True, error_model="numpy", inline="always", fastmath=_FAST)(function)
