"""Base class of errors that a user can fix. The command line prints their message without a traceback."""


class UserError(Exception):
    """Wrong input or a missing requirement. The message names it and says what to do."""
