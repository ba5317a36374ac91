"""The communicators of a rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from support.garbage import collect_during

from mpicoll.engine.core.registry import Options, Registry


class Communicator:
    """What the registry needs of a communicator. Only a garbage collection drops it."""

    requested = checks = Options()
    freed = False

    def __init__(self) -> None:
        self.transport, self.queue = None, SimpleNamespace()
        self.me = self


def test_a_collection_may_drop_communicators_while_they_are_listed() -> None:
    """It removes them from the registry, maybe within the function of Python that copies the list of them."""

    def no_observer(*_: Any) -> Any:
        raise AssertionError

    registry = Registry(no_observer)
    kept: list[Any] = []

    def prepare() -> None:
        # The last one is not dropped: a copy that reads past the end of the list gets it twice, not freed memory.
        registry.add(Communicator())  # type: ignore[arg-type]
        kept[:] = [Communicator()]
        registry.add(kept[0])

    def check() -> None:
        found = registry.members()
        assert len({id(one) for one in found}) == len(found)
        assert found[-1] is kept[0]

    collect_during(check, prepare)
