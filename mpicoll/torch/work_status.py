"""Status of works that c10d passes on.

c10d puts the Work of a backend in Python into a holder, which forwards ``wait`` and ``get_future`` only, the latter
without the methods that Python adds to a future. Its other methods are those of a Work that never completes: a program
that polls ``is_completed`` would wait forever, and ``recv`` from any source would raise. :func:`forward` makes these
methods of ``torch.distributed.Work`` find the Work of mpicoll in the holder; they do for other works what they did
before.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

_FORWARDED = (
    "is_completed",
    "is_success",
    "exception",
    "result",
    "source_rank",
    "_source_rank",
    "synchronize",
    "block_current_stream",
    "get_future",
)


class _Search(threading.local):
    active = False
    found: Any = None


_search = _Search()
_get_future = dist.Work.get_future
_lock = threading.Lock()


def answer(work: Any) -> bool:
    """Return True if a search asks for this `work`, which then must not create a future."""
    if _search.active:
        _search.found = work
    return _search.active


def find_work(holder: dist.Work) -> Any:
    """Return the Work of mpicoll that `holder` holds; None if it holds none."""
    _search.active, _search.found = True, None
    try:
        _get_future(holder)
    except RuntimeError:  # a Work without futures
        return None
    finally:
        _search.active = False
    found, _search.found = _search.found, None
    return found


def forward() -> None:
    """Make the methods in ``_FORWARDED`` find works of mpicoll."""
    with _lock:
        if dist.Work.get_future is _get_future:
            for name in _FORWARDED:
                setattr(dist.Work, name, _forward(name, getattr(dist.Work, name)))


def _forward(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: dist.Work) -> Any:
        # The type of a holder, and of other works of C++.
        work = find_work(self) if type(self) is dist.Work else None
        return original(self) if work is None else getattr(work, name)()

    return method
