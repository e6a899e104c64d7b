"""``python -m coterie``: the same as the ``coterie`` command."""

from coterie.cli import main

main()
