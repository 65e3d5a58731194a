"""The package's messages. They go where the program sends its log; where it has set up none, to standard error.

Importing the package installs no handler.
"""

import logging
import sys

logger = logging.getLogger("mambacl")
if logger.level == logging.NOTSET:
    logger.setLevel(logging.INFO)


def _shown(record: logging.LogRecord) -> bool:
    """Whether a handler will show the record; if not, it is printed here."""
    if logger.hasHandlers():
        return True
    print(logging.Formatter("%(message)s").format(record), file=sys.stderr)
    return False


logger.addFilter(_shown)
