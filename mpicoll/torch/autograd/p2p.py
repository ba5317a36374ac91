"""Differentiable point-to-point operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from mpicoll.collectives import p2p
from mpicoll.engine.core.communicator import Communicator
from mpicoll.torch.autograd.arguments import check_tensor, resolve_peer
from mpicoll.torch.autograd.linear_map import apply_linear, as_tensor
from mpicoll.torch.groups import communicator
from mpicoll.torch.no_compile import disable_compile


@disable_compile
def sendrecv(
    tensor: Tensor,
    dst: int | None,
    src: int | None,
    tag: int = 0,
    group: Any = None,
    *,
    shape: Sequence[int] | None = None,
) -> Tensor:
    """Send `tensor` to rank `dst`, and receive a tensor of the same dtype from rank `src`, without deadlock.

    The gradient of the result is sent to `src`, and that of `tensor` is received from `dst`, with the same `tag`.

    Args:
        tensor: the tensor to send.
        dst: the receiver; None and ``mpicoll.PROC_NULL`` send nothing, for the end of an open chain.
        src: the sender; None and ``mpicoll.PROC_NULL`` receive nothing, and the result is zeros.
        tag: the tag of the messages, also of the gradients.
        group: the ranks (see the module).
        shape: the shape of the result, by default that of `tensor`.

    Returns:
        The received tensor.

    Raises:
        RankError: a rank or `tag` is out of range.

    Example:
        >>> mpicoll.torch.autograd.sendrecv(torch.ones(2), dst=0, src=0)  # on one rank
        tensor([1., 1.])
    """
    comm = communicator(group)
    check_tensor("sendrecv", tensor, comm)
    to = None if dst is None else resolve_peer("sendrecv", "dst", dst, group, comm)
    origin = None if src is None else resolve_peer("sendrecv", "src", src, group, comm)
    return _exchange(tensor, to, origin, tag, tensor.shape if shape is None else shape, comm)


@disable_compile
def send(tensor: Tensor, dst: int, tag: int = 0, group: Any = None) -> Tensor:
    """Send `tensor` to rank `dst`, which calls :func:`recv`.

    The gradient is received from `dst`, with the same `tag`. Forward and backward may wait for the other rank; where
    two ranks send to each other use :func:`sendrecv`.

    Args:
        tensor: the tensor to send.
        dst: the receiver, or ``mpicoll.PROC_NULL``.
        tag: the tag of the messages.
        group: the ranks (see the module).

    Returns:
        A zero, of shape (), which represents the use of `tensor` on rank `dst`: **add it to this rank's loss**, or call
        ``backward()`` on it if there is no other loss.

    Raises:
        RankError: `dst` or `tag` is out of range.

    Example:
        >>> def program():
        ...     world = mpicoll.world()
        ...     if world.rank == 0:
        ...         mpicoll.torch.autograd.send(torch.ones(2), 1, group=world)
        ...         return None
        ...     return mpicoll.torch.autograd.recv(torch.empty(2), 0, group=world).tolist()
        >>> mpicoll.run_local(program, 2)
        [None, [1.0, 1.0]]
    """
    comm = communicator(group)
    check_tensor("send", tensor, comm)
    return _exchange(tensor, resolve_peer("send", "dst", dst, group, comm), None, tag, (), comm)


@disable_compile
def recv(like: Tensor, src: int, tag: int = 0, group: Any = None) -> Tensor:
    """Receive a tensor of the shape and dtype of `like` from rank `src`, which calls :func:`send`.

    The gradient of the result is sent to `src`, with the same `tag`, and `like` gets zeros.

    Args:
        like: a tensor, whose contents don't matter, and which must require grad if the sent tensor does.
        src: the sender, or ``mpicoll.PROC_NULL``, from which zeros are received.
        tag: the tag of the messages.
        group: the ranks (see the module).

    Returns:
        The received tensor.

    Raises:
        RankError: `src` or `tag` is out of range.

    Example:
        >>> def program():
        ...     world = mpicoll.world()
        ...     if world.rank == 0:
        ...         mpicoll.torch.autograd.send(torch.ones(2), 1, group=world)
        ...         return None
        ...     return mpicoll.torch.autograd.recv(torch.empty(2), 0, group=world).tolist()
        >>> mpicoll.run_local(program, 2)
        [None, [1.0, 1.0]]
    """
    comm = communicator(group)
    check_tensor("recv", like, comm)
    return _exchange(like, None, resolve_peer("recv", "src", src, group, comm), tag, like.shape, comm)


def _exchange(
    tensor: Tensor, dst: int | None, src: int | None, tag: int, shape: Sequence[int], comm: Communicator
) -> Tensor:
    def move(x: Tensor, to: int | None, origin: int | None, shape: Sequence[int]) -> Tensor:
        if origin is None:
            if to is not None:
                p2p.send(x, to, tag, comm=comm)
            return x.new_zeros(shape)
        like = x.new_empty(shape)
        if to is None:
            return as_tensor(p2p.recv(like, origin, tag, comm=comm))
        return as_tensor(p2p.sendrecv(x, to, origin, tag, tag, like=like, comm=comm))

    own_shape = tensor.shape
    return apply_linear(tensor, lambda x: move(x, dst, src, shape), lambda grad: move(grad, src, dst, own_shape))
