"""The package's logger. Messages go to the program's log handlers, or to standard error if it has none.

Importing the package installs no handler.
"""

import logging
import sys

from mambacl.status import erase

logger = logging.getLogger("mambacl")
if logger.level == logging.NOTSET:
    logger.setLevel(logging.INFO)


def _shown(record: logging.LogRecord) -> bool:
    """Whether a handler shows the record; if not, prints it."""
    if logger.hasHandlers():
        return True
    erase()
    print(logging.Formatter("%(message)s").format(record), file=sys.stderr)
    return False


logger.addFilter(_shown)
