"""Write docs/config.md, the reference of all settings, from the types in ``coterie.config``.

python scripts/config_reference.py            # writes
python scripts/config_reference.py --check    # exit code 1 if the page is out of step
"""

from __future__ import annotations

import sys
import types
import typing
from pathlib import Path
from typing import Any

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from coterie.config import Config, Section

PAGE = Path(__file__).parents[1] / "docs" / "config.md"
INTRO = """# Config reference

*Written by `scripts/config_reference.py` from the types in `src/coterie/config.py`; a test keeps it in step.*

A run is one TOML file. Defaults come first, then the file, then flags of the command line:

```
coterie train configs/tiny.toml --optim.lr 5e-5 --rollout.group_size 16 --run_dir runs/other
coterie train configs/tiny.toml --dry-run
```

A flag is the section, a dot and the key; values are TOML (`--swarm.connect '["tcp/HOST:7447"]'`). An unknown key is an error that
names the nearest known one. `--dry-run` checks settings and tasks and prints everything resolved, and a run keeps that text as
`config.toml`. Numbers must be finite.
"""


def reference() -> str:
    """The page."""
    parts = [INTRO, "## Top level\n", _table({n: f for n, f in Config.model_fields.items() if not _section(f)})]
    for name, field in Config.model_fields.items():
        if (section := _section(field)) is not None:
            mapping = typing.get_origin(field.annotation) is dict
            parts += _chapter(f"{name}.NAME" if mapping else name, section)
    return "\n".join(parts)


def _chapter(name: str, section: type[Section]) -> list[str]:
    out = [f"## `[{name}]`\n"]
    if section.__doc__ and section.__doc__ != Section.__doc__:
        out.append(" ".join(section.__doc__.split()) + "\n")
    out.append(_table({n: f for n, f in section.model_fields.items() if not _section(f)}))
    for key, field in section.model_fields.items():
        if (inner := _section(field)) is not None:
            out += _chapter(f"{name}.{key}.NAME", inner)
    return out


def _section(field: FieldInfo) -> type[Section] | None:
    """The section a field holds, directly or as the values of a table; None for a plain setting."""
    kinds = [field.annotation, *typing.get_args(field.annotation)]
    found = [k for k in kinds if isinstance(k, type) and issubclass(k, Section)]
    return found[0] if found else None


def _table(fields: dict[str, FieldInfo]) -> str:
    rows = ["| key | values | default | meaning |", "|---|---|---|---|"]
    for name, field in fields.items():
        meaning = _cell(" ".join((field.description or "").split()))
        rows.append(f"| `{name}` | {_cell(_values(field))} | `{_toml(_default(field))}` | {meaning} |")
    return "\n".join(rows) + "\n"


def _values(field: FieldInfo) -> str:
    kind, limits = _kind(field.annotation), []
    for m in field.metadata:
        limits += [f"≥ {m.ge}"] if isinstance(m, Ge) else [f"> {m.gt}"] if isinstance(m, Gt) else []
        limits += [f"≤ {m.le}"] if isinstance(m, Le) else [f"< {m.lt}"] if isinstance(m, Lt) else []
    return " ".join([kind, ", ".join(limits)]).strip()


def _kind(annotation: Any) -> str:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return ", ".join(f"`{a}`" for a in args)
    if origin is tuple:
        return f"list of {_kind(args[0])}"
    if origin is dict:
        return f"table of {_kind(args[1])}"
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_kind(a) for a in args)
    names = {int: "whole number", float: "number", bool: "true, false", str: "text", Any: "any value"}
    return names[annotation]


def _default(field: FieldInfo) -> Any:
    return field.get_default(call_default_factory=True)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    return str(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(0 if PAGE.read_text(encoding="utf-8") == reference() else f"{PAGE} is out of step; run {sys.argv[0]}")
    PAGE.write_text(reference(), encoding="utf-8")
