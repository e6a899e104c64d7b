"""Errors a user can act on. The CLI prints their text as one line and exits with their code; no traceback."""

from __future__ import annotations


class CoterieError(Exception):
    """Something failed while running: exit code 1."""

    exit_code = 1


class UserError(CoterieError):
    """The request itself cannot be carried out as written (config, arguments, files named by the user): exit code 2."""

    exit_code = 2
