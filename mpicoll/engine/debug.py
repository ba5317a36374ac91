"""The public context manager that checks the calls of a block of a program."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from mpicoll.engine.world import resolve

if TYPE_CHECKING:
    from typing_extensions import Self


class debug:  # noqa: N801  it is used like a function
    """Check the calls of the ranks, from now on or in a ``with`` block.

    ``mpicoll.debug()`` does what ``MPICOLL_CHECK=1`` does for the whole program. Collective: all ranks (of the job, or
    of :func:`mpicoll.run_local`) enter and leave it in the same order among their collectives; pending operations are
    completed first. It applies to all communicators, including those that are created meanwhile.

    Before each collective the ranks compare its number, operation, dtype, shape, counts, op, root, algorithm and
    communicator. A message of :func:`mpicoll.send` or a similar function contains its dtype and shape. It must be
    received under the same checks as it was sent.

    Each collective costs one exchange of 16 bytes, and a second one after reductions with `numerics` and after those
    that `checksum` compares. A message is copied once on each side, and is 512 bytes longer.

    Args:
        check: True for the checks above, False to check nothing. None leaves it unchanged, as for the other arguments.
        numerics: Check the input of collectives for NaN and infinity, and the result of a reduction of finite operands
            for infinity.
        checksum: Compare the results of allreduce, bcast and allgather, which must have the same bits on all ranks.

    Raises:
        MismatchError: From a collective, on all ranks, if their calls or the compared results differ, with each rank's
            call and call site. From a receive, if the message has another dtype or shape.
        TruncationError: From a receive, if the message has another size.
        NumericsError: From a collective, on all ranks, if `numerics` found a value.

    Example:
        >>> with mpicoll.debug(numerics=True):
        ...     mpicoll.allreduce(np.array([1.0, np.nan]))
        Traceback (most recent call last):
            ...
        mpicoll.errors.NumericsError: ...
    """

    def __init__(
        self, *, check: bool | None = True, numerics: bool | None = None, checksum: bool | None = None
    ) -> None:
        self._registry = resolve(None).registry
        self._change = self._registry.change(check, numerics, checksum)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # After an error on this rank alone, pending operations may wait for ranks that never enter them.
        self._registry.undo(self._change, wait=kind is None)
