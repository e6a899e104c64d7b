"""``python -m coterie``: the same as the ``coterie`` command."""

from coterie.cli import main

if __name__ == "__main__":
    main()
