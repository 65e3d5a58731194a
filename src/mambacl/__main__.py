import sys

from mambacl.cli import main

sys.exit(main())
