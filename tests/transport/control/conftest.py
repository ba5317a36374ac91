"""Ranks of control networks, for the tests of this folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
from support.star import SOON, Make, Star


@pytest.fixture
def star() -> Iterator[Make]:
    """Makes stars of ranks in this process, and ends them."""
    made: list[Star] = []

    def make(
        size: int,
        tokens: dict[int, bytes] | None = None,
        clock: Callable[[], float] = time.monotonic,
        shape: str = "star",
    ) -> Star:
        made.append(Star(size, tokens or {}, clock, shape))
        return made[-1]

    yield make
    for one in made:
        for rank in range(len(one.lines)):
            one.end(rank)
        for thread in one.threads:
            if thread.ident is not None:
                thread.join(SOON)
                assert not thread.is_alive()
