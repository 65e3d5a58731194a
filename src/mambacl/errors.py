"""Errors that the user can fix: one sentence with the mistake and the remedy."""


class UserError(ValueError):
    """A mistake in the user's input. The command line prints it without a traceback and exits with 2."""
