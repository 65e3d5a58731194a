"""Errors that are the user's to mend: one sentence that names the mistake and the remedy."""


class UserError(ValueError):
    """A wrong word, file or value. The command line prints it without a traceback and exits with 2."""
