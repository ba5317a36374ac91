"""The public context manager that traces a block of a program."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mpicoll.engine.tracing.session import TraceSession
from mpicoll.engine.world import CommLike, resolve


@contextmanager
def trace(folder: str | Path, *, comm: CommLike = None) -> Iterator[Path]:
    """Trace the operations of the ranks of `comm` in a ``with`` block.

    Collective: all ranks enter and exit it alike. Each operation takes about 1 µs longer, and 53 bytes in the part, 300
    in the file. If the block raises, this rank stops recording and leaves its part, because the other ranks may not
    exit the block: ``mpicoll trace merge`` makes a file of the existing parts.

    Args:
        folder: Folder to which each rank writes its part, and rank 0 the file. It is created if it does not exist.
        comm: The ranks. None: the world.

    Yields:
        The path of the file that exists after the block: one trace in the Chrome format for all ranks, which
        https://ui.perfetto.dev displays and ``mpicoll trace summary`` summarises.

    Raises:
        SetupError: This rank can't write to `folder`.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with mpicoll.trace(folder) as path:
        ...         mpicoll.barrier()
        ...     path.exists()
        True
    """
    communicator = resolve(comm)
    session = TraceSession(Path(folder), communicator.transport, communicator.timeout)
    try:
        yield session.path
    except BaseException:
        session.stop()
        raise
    communicator.queue.drain(communicator.timeout)
    session.finish()
    session.free()
