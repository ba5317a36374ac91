"""The fixture that lets collectives of small tensors run in the background."""

from __future__ import annotations

from support.parallel_layers import background

__all__ = ["background"]
