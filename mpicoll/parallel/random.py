"""Random numbers under tensor parallelism.

The ranks of a tensor parallel group hold some activations replicated and others sharded. Dropout must draw the same
mask for the first, and independent masks for the second. So there are two streams of random numbers: torch's default
generators, with the same seed on all ranks of the group, and the stream of an :class:`RNGStatesTracker`, with a
different seed on each. :func:`model_parallel_manual_seed` seeds both::

    model_parallel_manual_seed(1234)
    x = F.dropout(x, 0.1)  # x is the same on all ranks
    with get_rng_tracker().fork():
        y = F.dropout(y, 0.1)  # y is this rank's part

:class:`ParallelDropout` is a module that does either, and :func:`checkpoint` recomputes activations with the random
numbers of both streams.

torch's default generators belong to a process. So do these two streams, whichever thread draws from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional

from mpicoll.errors import ArgumentError
from mpicoll.parallel.groups import communicator

__all__ = [
    "MODEL_PARALLEL",
    "ParallelDropout",
    "RNGStatesTracker",
    "checkpoint",
    "get_rng_tracker",
    "model_parallel_manual_seed",
    "use_rng_tracker",
]

MODEL_PARALLEL = "model-parallel-rng"
"""Name of the stream for activations that are sharded over a tensor parallel group."""

_State: TypeAlias = dict[str, Any]
"""``cpu``: state of the default generator; ``cuda``: of the current device, once CUDA is initialized; ``seed``."""


@dataclass
class _Streams:
    """``states`` of all streams by name, the name of the ``current`` one (None: torch's), and torch's ``own`` state.

    The state of the current stream is in the generators; the one stored here is out of date.
    """

    states: dict[str, _State] = field(default_factory=dict)
    current: str | None = None
    own: _State = field(default_factory=dict)


class RNGStatesTracker:
    """Named streams of random numbers beside torch's default one, all drawn from torch's default generators.

    A stream is the state of the CPU's default generator and, where CUDA is initialized, of the current device's. Not
    thread-safe, like torch's default generators.

    Example:
        ::

            tracker = RNGStatesTracker()
            tracker.add("noise", seed=7)
            with tracker.fork("noise"):
                noise = torch.rand(3)
    """

    def __init__(self) -> None:
        self.streams = _Streams()

    def add(self, name: str, seed: int) -> None:
        """Add a stream.

        Args:
            name: its name.
            seed: its seed.

        Raises:
            ArgumentError: a stream has this name or seed already.
        """
        if name in self.streams.states:
            raise ArgumentError(f"RNGStatesTracker: a stream {name!r} exists already; reset() removes all streams")
        same = [other for other, state in self.streams.states.items() if state["seed"] == seed]
        if same:
            raise ArgumentError(
                f"RNGStatesTracker: stream {same[0]!r} has the seed {seed} already; choose another seed for {name!r}"
            )
        self.streams.states[name] = {"seed": seed, "cpu": torch.Generator().manual_seed(seed).get_state()}

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """Draw random numbers from stream `name` inside the ``with`` block.

        The stream continues where it stopped the last time. Afterwards the previous stream continues where it was
        before the block, also after an exception. May be nested, also with the same name.

        Raises:
            ArgumentError: there is no such stream, or CUDA was first initialized inside the block.
        """
        if name not in self.streams.states:
            raise ArgumentError(
                f"RNGStatesTracker: unknown stream {name!r}, the streams are {sorted(self.streams.states)}; call"
                " model_parallel_manual_seed(seed) or add(name, seed) first, in the same thread or with tracker="
            )
        before, cuda = self.streams.current, torch.cuda.is_initialized()
        self._switch(name)
        try:
            yield
        finally:
            self._switch(before)
        if torch.cuda.is_initialized() and not cuda:
            raise ArgumentError(
                f"RNGStatesTracker: CUDA was first used inside of fork({name!r}), so its random numbers did not come"
                " from a stream; initialize CUDA before, for example by torch.cuda.init()"
            )

    def get_states(self) -> dict[str, dict[str, Any]]:
        """Return the state of every stream, as tensors and numbers, for a checkpoint by ``torch.save``.

        The state of torch's own stream, ``torch.get_rng_state()``, must be saved separately.
        """
        self._save_current()
        return {name: _clone(state) for name, state in self.streams.states.items()}

    def set_states(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Restore the streams that :meth:`get_states` returned, and remove all others.

        Raises:
            ArgumentError: called inside :meth:`fork`.
        """
        self._require_no_fork("set_states")
        self.streams.states = {name: _clone(state) for name, state in states.items()}

    def reset(self) -> None:
        """Remove all streams.

        Raises:
            ArgumentError: called inside :meth:`fork`.
        """
        self._require_no_fork("reset")
        self.streams.states = {}

    def recomputation(self) -> AbstractContextManager[None]:
        """Return a context in which all streams are as they are now; leaving it restores the streams of before.

        It can be entered any number of times. The caller must restore torch's default generators itself, as
        torch.utils.checkpoint does.
        """
        self._save_current()
        return _Recomputation(self)

    def _switch(self, name: str | None) -> None:
        if name == self.streams.current:
            return
        self._save_current()
        self.streams.current = name
        state = self.streams.own if name is None else self.streams.states[name]
        torch.set_rng_state(state["cpu"])
        if torch.cuda.is_initialized():
            if "cuda" in state:
                torch.cuda.set_rng_state(state["cuda"])
            elif name is not None:
                torch.cuda.manual_seed(state["seed"])

    def _save_current(self) -> None:
        """Store the state of the generators as that of the current stream."""
        live: _State = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_initialized():
            live["cuda"] = torch.cuda.get_rng_state()
        if self.streams.current is None:
            self.streams.own = live
        else:
            self.streams.states[self.streams.current] = {**self.streams.states[self.streams.current], **live}

    def _require_no_fork(self, what: str) -> None:
        if self.streams.current is not None:
            raise ArgumentError(
                f"RNGStatesTracker: {what}() was called inside of fork({self.streams.current!r}); call it after the"
                " block"
            )


class _Recomputation(AbstractContextManager[None]):
    # The caller owns the generators themselves: this neither reads nor writes their state.

    def __init__(self, tracker: RNGStatesTracker) -> None:
        self._tracker = tracker
        self._saved = _copy(tracker.streams)
        self._before: list[_Streams] = []

    def __enter__(self) -> None:
        self._before.append(self._tracker.streams)
        self._tracker.streams = _copy(self._saved)

    def __exit__(self, *error: object) -> None:
        self._tracker.streams = self._before.pop()


_tracker: ContextVar[RNGStatesTracker | None] = ContextVar("mpicoll_parallel_rng", default=None)


def get_rng_tracker() -> RNGStatesTracker:
    """Return the tracker in use in the caller's context.

    It is that of :func:`use_rng_tracker`, or a new one that stays in use in this thread.

    Example:
        ::

            states = get_rng_tracker().get_states()  # for a checkpoint
    """
    tracker = _tracker.get()
    if tracker is None:
        tracker = RNGStatesTracker()
        _tracker.set(tracker)
    return tracker


@contextmanager
def use_rng_tracker(tracker: RNGStatesTracker) -> Iterator[RNGStatesTracker]:
    """Make `tracker` the default of this module's functions inside the ``with`` block, in this thread."""
    token = _tracker.set(tracker)
    try:
        yield tracker
    finally:
        _tracker.reset(token)


def model_parallel_manual_seed(seed: int, group: Any = None, *, tracker: RNGStatesTracker | None = None) -> None:
    """Seed torch's default generators and the tracker's stream ``model-parallel-rng``.

    The default generators get `seed`; the stream gets a different seed on each rank of the tensor parallel group. Other
    streams of the tracker are removed. No message is sent.

    Args:
        seed: the same on all ranks of the group; data parallel replicas and pipeline stages, which should draw other
            masks, pass others.
        group: the tensor parallel group, by default the axis "model" of the grid in use.
        tracker: by default the one in use.

    Example:
        ::

            model_parallel_manual_seed(1234)
            with get_rng_tracker().fork():
                mask = torch.rand(4)  # different on each rank
    """
    comm = communicator(group)
    tracker = tracker or get_rng_tracker()
    tracker.reset()
    torch.manual_seed(seed)
    # A hash, so that neighbouring seeds don't give overlapping ranges; CPU generators use 32 bits only.
    base = int(np.random.SeedSequence(seed % 2**64).generate_state(1)[0])
    tracker.add(MODEL_PARALLEL, (base + comm.rank) % 2**32)


class ParallelDropout(nn.Module):
    """Dropout of activations that are sharded or replicated over the tensor parallel group.

    Under sequence parallelism the activations between the layers are sharded, too.

    Args:
        p: the probability that an element becomes zero.
        sharded: each rank holds a part of the activations, and draws its own mask; otherwise all ranks draw the same.
        tracker: the tracker for sharded activations, by default the one in use at each call.

    Raises:
        ArgumentError: `p` is not in [0, 1].

    Example:
        ::

            model_parallel_manual_seed(1234)
            ParallelDropout(0.1, sharded=True)(torch.ones(4, 8))  # a different mask on each rank
    """

    def __init__(self, p: float = 0.5, *, sharded: bool, tracker: RNGStatesTracker | None = None) -> None:
        super().__init__()
        if not 0.0 <= p <= 1.0:
            raise ArgumentError(f"ParallelDropout: p must be in [0, 1], got {p}")
        self.p = p
        self.sharded = sharded
        self.tracker = tracker

    def forward(self, x: Tensor) -> Tensor:
        """Apply dropout to `x`; return `x` itself in evaluation mode."""
        if not self.training or self.p == 0.0:
            return x
        with (self.tracker or get_rng_tracker()).fork() if self.sharded else nullcontext():
            return functional.dropout(x, self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}, sharded={self.sharded}"


def checkpoint(function: Callable[..., Any], *args: Any, tracker: RNGStatesTracker | None = None, **kwargs: Any) -> Any:
    """Call `function`, keeping only its arguments for the backward, which calls it again.

    The same as :func:`torch.utils.checkpoint.checkpoint` with ``use_reentrant=False``, which restores torch's default
    generators; this restores the streams of `tracker` as well. The recomputation sees the caller's context variables
    (the grid in use among them) on whichever thread autograd runs it. Collectives in `function` run again, on all ranks
    if all ranks make the same calls.

    Args:
        function: called with `args` and `kwargs`.
        tracker: by default, and inside `function`, the one in use.
    """
    used = tracker or get_rng_tracker()
    with use_rng_tracker(used):
        context = copy_context()

    def call_in_context(*args: Any, **kwargs: Any) -> Any:
        return context.copy().run(function, *args, **kwargs)

    def make_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), used.recomputation()

    return torch.utils.checkpoint.checkpoint(
        call_in_context, *args, use_reentrant=False, context_fn=make_contexts, **kwargs
    )


def _copy(streams: _Streams) -> _Streams:
    # States themselves are never changed, only replaced.
    return replace(streams, states=dict(streams.states))


def _clone(state: Mapping[str, Any]) -> _State:
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}
