"""``report.html``: one self-contained page for one or several runs, readable without a network."""

from coterie.report.page import write_report

__all__ = ["write_report"]
