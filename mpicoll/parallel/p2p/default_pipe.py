"""The default pipe of a context, and functions that use it."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from mpicoll.engine.core.request import Request
from mpicoll.errors import CommunicatorError
from mpicoll.parallel.p2p.pipe import PipeP2P

_default: ContextVar[PipeP2P | None] = ContextVar("mpicoll_parallel_p2p", default=None)


def init_process_groups(
    grid: Any = None, *, send_recv: bool = True, timeout: float | None = None, background: bool = False
) -> PipeP2P:
    """Make the :class:`PipeP2P` of `grid`, and let the functions of :mod:`mpicoll.parallel.p2p` use it. Collective.

    Arguments are those of :class:`PipeP2P`. It is the default in the current context; a thread that starts later has
    its own.

    Example:
        >>> def program():
        ...     pipe = mpicoll.parallel.p2p
        ...     pipe.init_process_groups(mpicoll.world())
        ...     if mpicoll.world().rank == 0:
        ...         return pipe.send(torch.ones(2), 1)
        ...     return pipe.recv(0)
        >>> mpicoll.run_local(program, 2)
        [None, tensor([1., 1.])]
    """
    p2p = PipeP2P(grid, timeout=timeout, send_recv=send_recv, background=background)
    _default.set(p2p)
    return p2p


def _current_pipe(name: str) -> PipeP2P:
    p2p = _default.get()
    if p2p is None:
        raise CommunicatorError(f"{name}: call mpicoll.parallel.p2p.init_process_groups(grid) first, in this thread")
    return p2p


def can_send_recv() -> bool:
    """Call :meth:`PipeP2P.can_send_recv`.

    Example:
        >>> def program():
        ...     pipe = mpicoll.parallel.p2p
        ...     pipe.init_process_groups(mpicoll.world())
        ...     return pipe.can_send_recv()
        >>> mpicoll.run_local(program, 2)
        [True, True]
    """
    return _current_pipe("can_send_recv").can_send_recv()


def send(value: Any, stage: int, **options: Any) -> None:
    """Call :meth:`PipeP2P.send`.

    Example:
        >>> def program():
        ...     pipe = mpicoll.parallel.p2p
        ...     pipe.init_process_groups(mpicoll.world())
        ...     if mpicoll.world().rank == 0:
        ...         return pipe.send(torch.ones(2), 1)
        ...     return pipe.recv(0)
        >>> mpicoll.run_local(program, 2)
        [None, tensor([1., 1.])]
    """
    _current_pipe("send").send(value, stage, **options)


def isend(value: Any, stage: int, **options: Any) -> Request:
    """Call :meth:`PipeP2P.isend`.

    Example:
        >>> def program():
        ...     pipe = mpicoll.parallel.p2p
        ...     pipe.init_process_groups(mpicoll.world())
        ...     if mpicoll.world().rank == 0:
        ...         return pipe.isend(torch.ones(2), 1).wait()
        ...     return pipe.recv(0)
        >>> mpicoll.run_local(program, 2)
        [None, tensor([1., 1.])]
    """
    return _current_pipe("isend").isend(value, stage, **options)


def recv(tensor: Any = None, stage: int | None = None, **options: Any) -> Any:
    """Call :meth:`PipeP2P.recv`: ``recv(stage)`` or ``recv(tensor, stage)``.

    Example:
        >>> def program():
        ...     pipe = mpicoll.parallel.p2p
        ...     pipe.init_process_groups(mpicoll.world())
        ...     if mpicoll.world().rank == 0:
        ...         return pipe.send(torch.ones(2), 1)
        ...     return pipe.recv(torch.empty(2), 0)
        >>> mpicoll.run_local(program, 2)
        [None, tensor([1., 1.])]
    """
    return _current_pipe("recv").recv(tensor, stage, **options)


def irecv(tensor: Any = None, stage: int | None = None, **options: Any) -> Request:
    """Call :meth:`PipeP2P.irecv`: ``irecv(stage)`` or ``irecv(tensor, stage)``.

    Example:
        >>> def program():
        ...     pipe = mpicoll.parallel.p2p
        ...     pipe.init_process_groups(mpicoll.world())
        ...     if mpicoll.world().rank == 0:
        ...         return pipe.send(torch.ones(2), 1)
        ...     return pipe.irecv(0).wait()
        >>> mpicoll.run_local(program, 2)
        [None, tensor([1., 1.])]
    """
    return _current_pipe("irecv").irecv(tensor, stage, **options)


def send_obj(obj: Any, stage: int, **options: Any) -> None:
    """Call :meth:`PipeP2P.send_obj`.

    Example:
        >>> def program():
        ...     pipe = mpicoll.parallel.p2p
        ...     pipe.init_process_groups(mpicoll.world())
        ...     if mpicoll.world().rank == 0:
        ...         return pipe.send_obj({"step": 1}, 1)
        ...     return pipe.recv_obj(0)
        >>> mpicoll.run_local(program, 2)
        [None, {'step': 1}]
    """
    _current_pipe("send_obj").send_obj(obj, stage, **options)


def recv_obj(stage: int, **options: Any) -> Any:
    """Call :meth:`PipeP2P.recv_obj`.

    Example:
        >>> def program():
        ...     pipe = mpicoll.parallel.p2p
        ...     pipe.init_process_groups(mpicoll.world())
        ...     if mpicoll.world().rank == 0:
        ...         return pipe.send_obj({"step": 1}, 1)
        ...     return pipe.recv_obj(0)
        >>> mpicoll.run_local(program, 2)
        [None, {'step': 1}]
    """
    return _current_pipe("recv_obj").recv_obj(stage, **options)


def wait(timeout: float | None = None) -> None:
    """Call :meth:`PipeP2P.wait`.

    Example:
        >>> def program():
        ...     pipe = mpicoll.parallel.p2p
        ...     pipe.init_process_groups(mpicoll.world())
        ...     value = pipe.send_obj("a", 1) if mpicoll.world().rank == 0 else pipe.recv_obj(0)
        ...     pipe.wait()
        ...     return value
        >>> mpicoll.run_local(program, 2)
        [None, 'a']
    """
    _current_pipe("wait").wait(timeout)
