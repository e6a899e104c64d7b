"""The ``code`` verifier: unit tests of generated Python, with the tests out of the answer's reach.

Two sealed processes. The *answer* process runs the generated code and then answers calls. The *test* process runs the tests;
each function of the answer is there as a stand-in that sends its arguments over and gets back plain data: numbers, texts,
bytes, None, lists, tuples, sets, dicts of these. So comparisons happen where the answer's code never runs: it cannot end
the tests early, patch an assertion, return an object that equals everything, or write the verdict. The price: functions
whose results (or arguments) are other objects cannot be tested. Lists, dicts and sets changed in place are changed in the
test as well.
"""

from __future__ import annotations

import ast
import builtins
import json
import math
import os
import sys
from typing import Any, NoReturn

from coterie.sandbox import frames, replies

_MAX_MESSAGE = 4 * 2**20
_MODULES = (
    "bisect collections datetime decimal fractions functools heapq itertools math operator random re statistics "
    "string typing"
)


class Misbehaved(BaseException):
    """The answer process broke the protocol or died; not an Exception, so that tests cannot catch it by accident."""


def prepare() -> None:
    """Import the modules that generated code commonly uses, before folders are closed."""
    for name in _MODULES.split():
        __import__(name)


def run_tests(code: str, tests: str, *, memory_mb: int, timeout_s: float) -> dict[str, Any]:
    """1 if ``tests`` run without an exception against ``code``, else 0 with the reason."""
    from coterie.sandbox import worker

    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        _test_process(write, code, tests, memory_mb, timeout_s)
    os.close(write)
    try:
        return replies.check_reply(frames.receive(read, frames.MAX_REPLY, timeout_s))
    except frames.TooLate:
        return replies.breach("timeout", f"not finished within {timeout_s:g} s")
    except frames.TooLong:
        return replies.breach("reply", "reply too long")
    except frames.Closed:
        return replies.breach(*worker.died(pid))
    finally:
        os.close(read)
        worker.kill_and_reap(pid)
        worker.reap_orphans()


def spell(value: Any) -> str:
    """``value`` as a Python literal. Raises TypeError for anything but plain data."""
    kind = type(value)
    if value is None or kind in (bool, int, str, bytes):
        return repr(value)
    if kind is float:
        if math.isnan(value):
            raise TypeError("NaN cannot be passed to or from a tested function")
        return repr(value) if math.isfinite(value) else ("1e999" if value > 0 else "-1e999")
    if kind in (list, tuple, set):
        inside = "".join(f"{spell(v)}," for v in value)
        return (
            f"[{inside}]"
            if kind is list
            else f"({inside})"
            if kind is tuple
            else f"{{{inside}}}"
            if inside
            else "set()"
        )
    if kind is dict:
        return "{" + "".join(f"{spell(k)}:{spell(v)}," for k, v in value.items()) + "}"
    raise TypeError(f"only plain data can be passed to or from a tested function, not {kind.__name__}")


def _test_process(verdict: int, code: str, tests: str, memory_mb: int, timeout_s: float) -> NoReturn:
    from coterie.sandbox import worker

    try:
        call_read, call_write = os.pipe()
        back_read, back_write = os.pipe()
        answer_pid = os.fork()
        if answer_pid == 0:
            _answer_process(call_read, back_write, code, memory_mb, timeout_s)
        os.close(call_read)
        os.close(back_write)
        worker.seal((verdict, call_write, back_read), memory_mb, timeout_s)
        frames.send(verdict, json.dumps(_verdict(call_write, back_read, answer_pid, tests)).encode())
    finally:
        os._exit(0)


def _verdict(to: int, back: int, answer_pid: int, tests: str) -> dict[str, Any]:
    from coterie.sandbox import worker

    try:
        outcome = _reply(back)
        if outcome[0] == "raise":
            if outcome[1] == "MemoryError":
                return replies.breach("memory", "the limit was reached")
            return _wrong(f"the code raises {outcome[1]}: {outcome[2]}")
        space: dict[str, Any] = {"__name__": "tests"}
        for name in outcome[1]:
            if name.isidentifier() and not name.startswith("_") and not hasattr(builtins, name):
                space[name] = _stand_in(name, to, back)
        exec(compile(tests, "<tests>", "exec"), space)
    except (Misbehaved, frames.Closed) as e:
        if isinstance(e.__cause__, frames.TooLong):
            return replies.breach("reply", "reply too long")
        os.close(to)
        os.close(back)  # whatever the answer process still writes fails now, and it ends
        return replies.breach(*worker.name_of_end(os.waitpid(answer_pid, 0)[1]))
    except (frames.TooLong, SyntaxError, ValueError, RecursionError) as e:
        return _wrong(f"{type(e).__name__}: {e}")
    except BaseException as e:  # a failed test, by whatever exception
        if isinstance(e, MemoryError):
            return replies.breach("memory", "the limit was reached")
        return _wrong(f"{type(e).__name__}: {e}")
    return {"reward": 1.0, "outcome": "ok", "detail": ""}


def _wrong(why: str) -> dict[str, Any]:
    return {"reward": 0.0, "outcome": "ok", "detail": why[:300]}


def _stand_in(name: str, to: int, back: int) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            frames.send(to, spell((name, list(args), kwargs)).encode("utf-8", "surrogatepass"))
            outcome = _reply(back)
        except (frames.Closed, frames.TooLong) as e:
            raise Misbehaved from e
        if outcome[0] == "raise":
            kind = getattr(builtins, outcome[1], None)
            known = isinstance(kind, type) and issubclass(kind, Exception)
            raise (kind if known else RuntimeError)(outcome[2])  # type: ignore[misc]
        for mine, theirs in zip(args, outcome[2], strict=False):
            _copy_into(mine, theirs)
        return outcome[1]

    call.__name__ = name
    return call


def _copy_into(mine: Any, theirs: Any) -> None:
    """Carry a change in place over to the caller's object."""
    if type(mine) is not type(theirs) or mine == theirs:
        return
    if isinstance(mine, list):
        mine[:] = theirs
    elif isinstance(mine, dict | set):
        mine.clear()
        mine.update(theirs)


def _reply(back: int) -> tuple[Any, ...]:
    """One message of the answer process, read as hostile: a literal or nothing."""
    data = ast.literal_eval(frames.receive(back, _MAX_MESSAGE).decode("utf-8", "surrogatepass"))
    shapes = {"names": (list,), "value": (object, list), "raise": (str, str)}
    good = isinstance(data, tuple) and data and data[0] in shapes and len(data) == 1 + len(shapes[data[0]])
    if not good or not all(isinstance(v, t) for v, t in zip(data[1:], shapes[data[0]], strict=True)):
        raise ValueError("malformed reply of the answer process")
    return tuple(data)


def _answer_process(calls: int, back: int, code: str, memory_mb: int, timeout_s: float) -> NoReturn:
    from coterie.sandbox import worker

    try:
        worker.seal((calls, back), memory_mb, timeout_s)
        sys.stdout = sys.stderr = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
        space: dict[str, Any] = {"__name__": "answer"}
        _tell(back, _attempt(lambda: exec(compile(code, "<answer>", "exec"), space), lambda _: _names(space)))
        while True:
            request = frames.receive(calls, frames.MAX_REQUEST).decode("utf-8", "surrogatepass")
            _tell(back, _answer_call(space, *ast.literal_eval(request)))
    finally:
        os._exit(3)


def _answer_call(space: dict[str, Any], name: str, args: list[Any], kwargs: dict[str, Any]) -> str:
    return _attempt(lambda: space[name](*args, **kwargs), lambda value: f"('value',{spell(value)},{_after(args)})")


def _attempt(action: Any, spelled: Any) -> str:
    try:
        return str(spelled(action()))
    except MemoryError:
        return "('raise','MemoryError','memory limit')"
    except BaseException as e:
        return f"('raise',{type(e).__name__!r},{str(e)[:200]!r})"


def _names(space: dict[str, Any]) -> str:
    return f"('names',{[name for name, value in space.items() if callable(value)]!r})"


def _after(args: list[Any]) -> str:
    """The arguments after the call; one that is no longer plain data is sent as None, which changes nothing."""
    out = []
    for value in args:
        try:
            out.append(spell(value))
        except TypeError:
            out.append("None")
    return f"[{','.join(out)}]"


def _tell(back: int, text: str) -> None:
    frames.send(back, text.encode("utf-8", "surrogatepass"))
