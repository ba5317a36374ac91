"""Checks on demand."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from mpicoll.engine.world import world

if TYPE_CHECKING:
    from typing_extensions import Self


class debug:  # noqa: N801  it is used like a function
    """Check what the ranks call, from now on or in a ``with`` block: ``mpicoll.debug()`` does what ``MPICOLL_CHECK=1``
    does for the whole program.

    Collective: all ranks (of the job, or of :func:`mpicoll.run_local`) enter it alike, in the same order among their
    collectives, and leave it alike; what was started before is completed first. It counts for all communicators, also
    for those that are made meanwhile.

    Before each collective the ranks compare its number, operation, dtype, shape, counts, op, root, algorithm and
    communicator; where they differ, all of them raise :class:`~mpicoll.errors.MismatchError` with each rank's call and
    where it was made. Messages of :func:`mpicoll.send` and its kin say what they are, so that a receive of another size
    raises :class:`~mpicoll.errors.TruncationError`, and one of another dtype or shape MismatchError; they must be
    received under the same checks as they were sent.

    `numerics` looks for NaN and infinity in what goes into a collective, and for infinity in what comes out of a
    reduction of finite operands, and raises :class:`~mpicoll.errors.NumericsError` on all ranks. `checksum` compares
    the results of allreduce, bcast and allgather, which must have the same bits on all ranks, and raises MismatchError.
    None leaves these as they are. ``check=False`` checks nothing.

    One exchange of 16 bytes for each collective; a second one after reductions with `numerics`, and where there is
    something to compare with `checksum`. A message is copied once on each side, and gets 512 bytes longer.
    """

    def __init__(
        self, *, check: bool | None = True, numerics: bool | None = None, checksum: bool | None = None
    ) -> None:
        self._family = world().family
        self._change = self._family.change(check, numerics, checksum)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # After an error on this rank alone, what is pending may wait for ranks that don't come.
        self._family.restore(self._change, wait=kind is None)
