"""What c10d knows while it makes a process group, and tells nobody."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from torch.distributed import distributed_c10d as c10d


def c10d_variables(function: str) -> dict[str, Any]:
    """The variables of the function of c10d of that name that is being executed; empty if none is."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and (frame.f_code.co_name != function or frame.f_globals is not vars(c10d)):
        frame = frame.f_back
    return {} if frame is None else dict(frame.f_locals)
