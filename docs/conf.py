"""Sphinx settings of the documentation. Build with `make docs`; every warning, broken links included, is an error."""

import tomllib
from pathlib import Path

META = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]

project = "coterie"
copyright = "the coterie authors"
release = META["version"]
extensions = ["myst_parser"]
exclude_patterns = ["_build", "results/*/*.md"]  # tables beside raw records are linked, not rendered
html_theme = "furo"
html_title = f"coterie {release}"
html_theme_options = {"sidebar_hide_name": False}
html_static_path: list[str] = []
html_show_sourcelink = False
myst_heading_anchors = 3  # links to headings down to the third level are checked
myst_links_external_new_tab = False
suppress_warnings = ["misc.highlighting_failure"]  # code blocks without a language are shown as they are
highlight_language = "none"
