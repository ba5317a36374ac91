"""The communicators of one rank, and the checks of calls that are enabled on them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias
from weakref import ref

from mpicoll.buffers.device import Device
from mpicoll.config import UNCHECKED
from mpicoll.engine.core.observer import Observer
from mpicoll.engine.core.queue import OperationQueue
from mpicoll.named_tuple import NamedTuple
from mpicoll.transport.base import Transport


class Options(NamedTuple):
    """Enabled checks: `calls` before each collective (and messages), `numerics`: NaN and infinity in inputs and
    outputs, `checksum`: equality of the results that must be equal on all ranks. Without `calls`, `batched` still
    compares the first collectives, and later ones in batches, of ranks that share no memory."""

    calls: bool = False
    numerics: bool = False
    checksum: bool = False
    batched: bool = True

    @classmethod
    def parse(cls, words: Sequence[str]) -> Options:
        """Return the options that `words` name."""
        named = set(words) - {UNCHECKED}
        return cls(bool(named), "numerics" in named, "checksum" in named, UNCHECKED not in words)

    def apply(self, change: Change) -> Options:
        """Return the options with `change` applied."""
        check, numerics, checksum = change
        if check is False:
            return Options(batched=self.batched)
        numerics = self.numerics if numerics is None else numerics
        checksum = self.checksum if checksum is None else checksum
        return Options(check or self.calls or numerics or checksum, numerics, checksum, self.batched)


Change: TypeAlias = "tuple[bool | None, bool | None, bool | None]"
"""New values of `calls`, `numerics` and `checksum`; None leaves a value unchanged."""


class Member(Protocol):
    """A communicator, as the registry needs it: `requested` are the checks that the environment requests, `checks` are
    the checks in effect."""

    transport: Transport
    queue: OperationQueue
    requested: Options
    checks: Options
    freed: bool

    @property
    def name(self) -> str:
        """Name of the communicator in messages."""

    def discard_calls(self) -> None:
        """Prepare all calls again."""

    def complete_on_device(self) -> None:
        """Wait until the device of this rank has completed all collectives, or the communicator has failed."""


class MessageChannel(Protocol):
    """A way of messages of device memory between some ranks; see :mod:`mpicoll.engine.executors.peer_messages`. `key`
    identifies it in messages."""

    key: bytes

    def reaches(self, device: Device, member: int) -> bool:
        """Return True if messages from `device` to that rank of the job pass here."""


class Registry:
    """Communicators of one rank, what their messages pass through, and the changes that :func:`mpicoll.debug` has made
    to their checks.

    `make_observer` returns the observer that performs the checks of a communicator.
    """

    def __init__(self, make_observer: Callable[[Transport, OperationQueue, Options], Observer]) -> None:
        self._make_observer = make_observer
        self._lock = threading.Lock()
        self._members: list[ref[Member]] = []
        self._changes: list[Change] = []
        # What messages of device memory pass through, of all communicators.
        self.peer_messages: tuple[MessageChannel, ...] = ()

    def add_peer_messages(self, messages: MessageChannel) -> None:
        """Have messages of all communicators pass through `messages`, and receives that were cached prepared again."""
        with self._lock:
            self.peer_messages = (*self.peer_messages, messages)
        for comm in self.members():
            comm.discard_calls()

    def add(self, comm: Member) -> None:
        """Register a new communicator."""
        with self._lock:
            self._members.append(ref(comm, self._members.remove))
        self._update(comm)

    def members(self) -> list[Member]:
        """Return the communicators that are alive and not freed, in the order of creation."""
        with self._lock:
            # Not list.copy(): it may start a garbage collection, which drops communicators, and then read past the end.
            known = [one() for one in list(self._members)]
        return [comm for comm in known if comm is not None and not comm.freed]

    def compare_unseen_calls(self) -> None:
        """Compare the calls that this rank has ended ahead of other ranks, at the end of its program. Raises
        MismatchError if they differ."""
        for comm in self.members():
            comm.queue.compare_unseen_calls()

    def change(self, check: bool | None, numerics: bool | None, checksum: bool | None) -> Change:
        """Change the checks from now on."""
        change = (check, numerics, checksum)
        self._changes.append(change)
        self._update_all(wait=True)
        return change

    def undo(self, change: Change, *, wait: bool) -> None:
        """Undo the `change` that :meth:`change` has returned."""
        for index in reversed(range(len(self._changes))):
            if self._changes[index] is change:
                del self._changes[index]
                break
        self._update_all(wait=wait)

    def _update_all(self, *, wait: bool) -> None:
        # In the same order on all ranks, since earlier operations are completed first, and may need the other ranks.
        for comm in self.members():
            if wait:
                with comm.queue.lock:
                    comm.queue.run_pending()
                    self._update(comm)
            else:
                self._update(comm)

    def _update(self, comm: Member) -> None:
        options = comm.requested
        for change in self._changes:
            options = options.apply(change)
        comm.checks = options
        comm.queue.observer = self._make_observer(comm.transport, comm.queue, options) if options.calls else None
