"""The names of algorithms."""

from __future__ import annotations

import subprocess
import sys

from mpicoll import schedules
from mpicoll.engine.selection import catalogue


def test_the_names_of_schedules_are_known() -> None:
    built_in = {
        collective: tuple(
            name
            for name, one in schedules.algorithms_of(collective).items()
            if one.generate.__module__.startswith("mpicoll.")
        )
        for collective in schedules.collectives()
    }
    assert built_in == catalogue._SCHEDULES


def test_rules_do_not_load_the_schedules() -> None:
    """Those of a tuned table are read at the start of each job."""
    program = (
        "import sys; from mpicoll.engine.selection.rules import parse_rules;"
        " parse_rules('allreduce:0-64k:shm_flat,64m-128m:ring;bcast:binomial');"
        " sys.exit('mpicoll.schedules' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0
