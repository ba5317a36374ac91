"""Objects that are bound to one process, because they refer to state of that process and of its MPI library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from mpicoll.errors import CommunicatorError


def refuse_pickling(kind: str, remedy: str) -> Callable[[Any, Any], NoReturn]:
    """Return a ``__reduce_ex__`` for a class of such objects: pickling, ``copy.copy`` and ``copy.deepcopy`` raise
    TypeError, which names the `kind` of object and the `remedy`."""

    def __reduce_ex__(self: Any, protocol: Any) -> NoReturn:  # noqa: N807
        raise TypeError(
            f"a {kind} can't be pickled or copied, as it stands for state of this process and its MPI library; {remedy}"
        )

    return __reduce_ex__


class ForkedLock:
    """Replacement for the locks of a communicator's queue in a forked process, which must not communicate."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _raise(self, *args: Any, **kwargs: Any) -> Any:
        raise CommunicatorError(
            f"communicator {self._name}: this process was forked from an MPI rank, and can't communicate; only the rank"
            " itself can"
        )

    __enter__ = acquire = locked = _raise
    active = call = property(_raise)

    def __exit__(self, *args: object) -> None:
        """Satisfy the context manager protocol; never reached."""
