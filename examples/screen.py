"""What the examples with a progress bar share."""

import os
import sys
from pathlib import Path


def on_screen():
    """Return True if the output is a terminal. mpirun gives each rank one, so its own output is examined too."""
    try:
        return sys.stdout.isatty() and Path(f"/proc/{os.getppid()}/fd/1").is_char_device()
    except OSError:
        return False
