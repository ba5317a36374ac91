#!/usr/bin/env python3
"""Show that an installation has the extension, and works: mpirun -np 2 python ci/smoke.py"""

from __future__ import annotations

import numpy as np

import mpicoll
from mpicoll import extension

missing = extension.find_missing_reason()
assert missing is None, missing
world = mpicoll.world()
total = mpicoll.allreduce(np.full(1000, world.rank, np.float64))
assert (total == world.size * (world.size - 1) / 2).all()
print(f"rank {world.rank} of {world.size}: {mpicoll.__file__}")
