"""``python -m mpicoll`` is the command ``mpicoll``."""

import sys

from mpicoll.cli import main

if __name__ == "__main__":
    sys.exit(main())
