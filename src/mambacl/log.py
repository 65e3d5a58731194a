"""The package's logger. Messages for the reader go to standard error as plain lines, unless the program set up its
own."""

import logging

logger = logging.getLogger("mambacl")
if not logger.handlers:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
