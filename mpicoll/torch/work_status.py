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

from mpicoll.autoload import replace_once

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
        for name in _FORWARDED:
            replace_once(dist.Work, name, functools.partial(_call, name))


def _call(name: str, original: Callable[..., Any], work: dist.Work) -> Any:
    # The type of a holder, and of other works of C++.
    found = find_work(work) if type(work) is dist.Work else None
    return original(work) if found is None else getattr(found, name)()
