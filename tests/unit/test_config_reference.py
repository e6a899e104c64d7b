"""docs/config.md says what the types say."""

import importlib.util
import subprocess
import sys
from pathlib import Path

from coterie.config import Config

SCRIPT = Path(__file__).parents[2] / "scripts" / "config_reference.py"


def load():
    spec = importlib.util.spec_from_file_location("config_reference", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_in_step_with_the_types() -> None:
    assert subprocess.run([sys.executable, SCRIPT, "--check"]).returncode == 0, f"run python {SCRIPT}"


def test_every_setting_is_on_the_page_and_explained() -> None:
    page = load().reference()

    def keys(section) -> list[tuple[str, str]]:
        found = []
        for name, field in section.model_fields.items():
            inner = load_section(field)
            found += keys(inner) if inner else [(name, field.description or "")]
        return found

    load_section = load()._section
    for name, description in keys(Config):
        assert description, f"{name} has no docstring in config.py"
        assert f"| `{name}` |" in page


def test_defaults_and_limits_are_written_as_toml() -> None:
    page = load().reference()
    assert "| `lr` | number > 0 | `0.0003` |" in page
    assert "| `connect` | list of text | `[]` |" in page
    assert '| `device` | text | `"auto"` |' in page
