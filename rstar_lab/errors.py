"""Errors a user can mend: the command line prints their message without a traceback."""


class UserError(Exception):
    """Something the user gave or the machine lacks; the message names it and the way out."""
