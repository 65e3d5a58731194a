"""The package's logger. Where the program has set up logging of its own, messages go there; else to standard error."""

import logging

logger = logging.getLogger("mambacl")
if not logger.handlers and not logging.getLogger().handlers:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    logger.propagate = False
if logger.level == logging.NOTSET:
    logger.setLevel(logging.INFO)
