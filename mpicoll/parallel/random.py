"""Random numbers under tensor parallelism.

The ranks of a tensor parallel group hold some activations alike, and of others each its part. Dropout must draw the
same mask for the first, and masks that have nothing to do with each other for the second. So there are two streams of
random numbers: torch's default generators, seeded alike on all ranks of the group, and that of an
:class:`RNGStatesTracker`, seeded differently on each. :func:`model_parallel_manual_seed` seeds both::

    model_parallel_manual_seed(1234)
    x = F.dropout(x, 0.1)  # x is the same on all ranks
    with get_rng_tracker().fork():
        y = F.dropout(y, 0.1)  # y is this rank's part

:class:`ParallelDropout` is a module that does either, and :func:`checkpoint` recomputes activations with the random
numbers of both streams.

torch's default generators belong to a process. So do these two streams, whatever thread draws from them.
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
"""The stream of what differs among the ranks of a tensor parallel group."""

_State: TypeAlias = dict[str, Any]
"""``cpu``: the state of the default generator; ``cuda``: that of the current device, once CUDA is in use; ``seed``."""


@dataclass
class _Streams:
    """``states`` of all streams by name, which is the ``current`` one (None is torch's own), and torch's ``own`` state.

    The state of the current stream is in the generators; what is kept of it here is old.
    """

    states: dict[str, _State] = field(default_factory=dict)
    current: str | None = None
    own: _State = field(default_factory=dict)


class RNGStatesTracker:
    """Streams of random numbers by name, beside torch's default one, all drawn from torch's default generators.

    A stream is the state of the CPU's default generator and, where CUDA is in use, of the current device's. Not for
    several threads at once, as torch's default generators are not either.
    """

    def __init__(self) -> None:
        self.streams = _Streams()

    def add(self, name: str, seed: int) -> None:
        """A new stream `name` that begins at `seed`. Raises ArgumentError if there is one of that name or seed."""
        if name in self.streams.states:
            raise ArgumentError(f"RNGStatesTracker: there is a stream {name!r} already; reset() forgets all")
        same = [other for other, state in self.streams.states.items() if state["seed"] == seed]
        if same:
            raise ArgumentError(
                f"RNGStatesTracker: stream {same[0]!r} has the seed {seed} already; {name!r} needs another"
            )
        self.streams.states[name] = {"seed": seed, "cpu": torch.Generator().manual_seed(seed).get_state()}

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """Inside, random numbers come from stream `name`, where it was left the last time; afterwards from the stream
        before, as if nothing had been drawn meanwhile, also if the block raised.

        May be nested, also in itself, where it goes on. Raises ArgumentError if there is no such stream.
        """
        if name not in self.streams.states:
            raise ArgumentError(
                f"RNGStatesTracker: there is no stream {name!r}, only {sorted(self.streams.states)}; call"
                " model_parallel_manual_seed(seed) or add(name, seed) first, in the thread that draws or with tracker="
            )
        before, cuda = self.streams.current, torch.cuda.is_initialized()
        self._switch(name)
        try:
            yield
        finally:
            self._switch(before)
        if torch.cuda.is_initialized() and not cuda:
            raise ArgumentError(
                f"RNGStatesTracker: CUDA was first used inside of fork({name!r}), so its random numbers came from no"
                " stream; use it before, such as by torch.cuda.init()"
            )

    def get_states(self) -> dict[str, dict[str, Any]]:
        """The state of every stream, as tensors and numbers, to be saved with a checkpoint by ``torch.save``; of
        torch's own stream, ``torch.get_rng_state()`` is to be saved besides."""
        self._save_current()
        return {name: _clone(state) for name, state in self.streams.states.items()}

    def set_states(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Go on where :meth:`get_states` was called. Streams that `states` does not name are forgotten.

        Raises ArgumentError inside of a :meth:`fork`."""
        self._require_no_fork("set_states")
        self.streams.states = {name: _clone(state) for name, state in states.items()}

    def reset(self) -> None:
        """Forget all streams. Raises ArgumentError inside of a :meth:`fork`."""
        self._require_no_fork("reset")
        self.streams.states = {}

    def recomputation(self) -> AbstractContextManager[None]:
        """A context in which all streams are as they are now; at its end they are what they were before it. It can be
        entered any number of times.

        For whoever sets torch's default generators back as well, as torch.utils.checkpoint does."""
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
        """Take the state of the generators to where that of the current stream belongs."""
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
                f"RNGStatesTracker: {what}() was called inside of fork({self.streams.current!r}); leave it first"
            )


class _Recomputation(AbstractContextManager[None]):
    # The generators themselves belong to whoever enters: no state is read from them or written to them.

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
    """The tracker that is in use in the caller's context: that of :func:`use_rng_tracker`, or one that is made here and
    stays in use in this thread."""
    tracker = _tracker.get()
    if tracker is None:
        tracker = RNGStatesTracker()
        _tracker.set(tracker)
    return tracker


@contextmanager
def use_rng_tracker(tracker: RNGStatesTracker) -> Iterator[RNGStatesTracker]:
    """``with use_rng_tracker(tracker):`` makes it the default of this module's functions, in this thread."""
    token = _tracker.set(tracker)
    try:
        yield tracker
    finally:
        _tracker.reset(token)


def model_parallel_manual_seed(seed: int, group: Any = None, *, tracker: RNGStatesTracker | None = None) -> None:
    """Seed torch's default generators with `seed`, and the tracker's stream ``model-parallel-rng`` with a seed of its
    own on each rank of the tensor parallel `group`.

    All ranks of the group pass the same `seed`; data parallel replicas and pipeline stages, which should draw other
    masks, pass others. Other streams of the tracker are forgotten. No message is sent.
    """
    comm = communicator(group)
    tracker = tracker or get_rng_tracker()
    tracker.reset()
    torch.manual_seed(seed)
    # Far from `seed`, and from what the next seeds give; and CPU generators look at 32 bits only.
    base = int(np.random.SeedSequence(seed % 2**64).generate_state(1)[0])
    tracker.add(MODEL_PARALLEL, (base + comm.rank) % 2**32)


class ParallelDropout(nn.Module):
    """Dropout with probability `p` of activations that each rank holds a part of (`sharded`), or that all ranks of the
    tensor parallel group hold alike.

    Under sequence parallelism what lies between the layers is sharded, too. `tracker` is by default that in use at each
    call, and needed for sharded activations only.
    """

    def __init__(self, p: float = 0.5, *, sharded: bool, tracker: RNGStatesTracker | None = None) -> None:
        super().__init__()
        if not 0.0 <= p <= 1.0:
            raise ArgumentError(f"ParallelDropout: p must be in [0, 1], got {p}")
        self.p = p
        self.sharded = sharded
        self.tracker = tracker

    def forward(self, x: Tensor) -> Tensor:
        """Of `x`'s shape and dtype; `x` itself in evaluation."""
        if not self.training or self.p == 0.0:
            return x
        with (self.tracker or get_rng_tracker()).fork() if self.sharded else nullcontext():
            return functional.dropout(x, self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}, sharded={self.sharded}"


def checkpoint(function: Callable[..., Any], *args: Any, tracker: RNGStatesTracker | None = None, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)``, of which only the arguments are kept for the backward, where it is computed again.

    As :func:`torch.utils.checkpoint.checkpoint` without reentrance, which sets back torch's default generators; here
    the streams of `tracker` as well, which is by default, and in `function`, that in use. The recomputation sees the
    caller's context variables (the grid in use among them) on whatever thread autograd runs it. Collectives in
    `function` run again: on all ranks alike, if all call the same.
    """
    chosen = tracker or get_rng_tracker()
    with use_rng_tracker(chosen):
        context = copy_context()

    def in_context(*args: Any, **kwargs: Any) -> Any:
        return context.copy().run(function, *args, **kwargs)

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), chosen.recomputation()

    return torch.utils.checkpoint.checkpoint(in_context, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _copy(streams: _Streams) -> _Streams:
    # States themselves are never changed, only replaced.
    return replace(streams, states=dict(streams.states))


def _clone(state: Mapping[str, Any]) -> _State:
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}
