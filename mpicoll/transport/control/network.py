"""The control network: connections between the ranks of a job that are independent of MPI.

Messages and reports of deaths are delivered also while MPI is blocked. The topology is a star. The hub is the lowest
living rank; all others are connected to it, and it forwards their messages. When the hub dies, all connect to the next
lowest rank: every rank listens from the start, so that this needs no MPI. Each rank's watch thread drives its end by
:meth:`ControlNetwork.poll`; the class starts no thread.

In large jobs the topology is a tree: the lowest living rank of each host is the hub of the other ranks of the host, and
has itself the lowest living rank of all, the root, as its hub. docs/scale.md says more.

Deaths are detected by the kernel, never inferred from a process that is silent: a connection ends at once with its
process. A host whose kernel does not answer is lost, but only after the OUTAGE seconds that an interruption of the
network may last: it is detected within 12 s (20 s on Linux before 6.15). A process that is stopped, is in a debugger or
holds the GIL for minutes does not read, but its kernel answers for it. For the same reason no more bytes are in flight
on a connection than the receiver's kernel accepts without help of the process (``WINDOW``): TCP can't distinguish a
full buffer from a lost host.

Modules, lowest first: :mod:`~mpicoll.transport.control.timing` and :mod:`~mpicoll.transport.control.events`;
:mod:`~mpicoll.transport.control.frame_tags` and :mod:`~mpicoll.transport.control.connection` (framing and flow
control), :mod:`~mpicoll.transport.control.sockets`, :mod:`~mpicoll.transport.control.interfaces`;
the parts of the state, each by itself: :mod:`~mpicoll.transport.control.addresses`,
:mod:`~mpicoll.transport.control.address_choice` (before the start),
:mod:`~mpicoll.transport.control.deadlines`,
:mod:`~mpicoll.transport.control.attempts` and :mod:`~mpicoll.transport.control.dialer` (connecting),
:mod:`~mpicoll.transport.control.crash_descriptor`, :mod:`~mpicoll.transport.control.farewells`,
:mod:`~mpicoll.transport.control.handshake`, :mod:`~mpicoll.transport.control.links` (connections),
:mod:`~mpicoll.transport.control.listener`, :mod:`~mpicoll.transport.control.membership` (exits, election of the hub),
:mod:`~mpicoll.transport.control.shape` (star or tree); on connections and members
:mod:`~mpicoll.transport.control.routing` and :mod:`~mpicoll.transport.control.completeness`;
:mod:`~mpicoll.transport.control.endpoint` (the protocol); and this one, which other threads may use.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from mpicoll.transport.control import timing
from mpicoll.transport.control.addresses import describe_address
from mpicoll.transport.control.connection import ALL, FAREWELL, MESSAGE, Packet, encode
from mpicoll.transport.control.crash_descriptor import CrashDescriptor
from mpicoll.transport.control.endpoint import Endpoint
from mpicoll.transport.control.events import Event, PeerExit
from mpicoll.transport.control.shape import choose_shape, group_ranks

_WAKE_ONCE = object()
"""Marks descriptors that the selector has for :meth:`ControlNetwork.wake_once`."""


class ControlNetwork:
    """This rank's connections to the other ranks of its job.

    `token` is the job's secret, the same on all ranks. Connections that do not prove that they have it are
    rejected, such as those of a port scanner, a rank of another job or another user of the machine. Every frame has a
    tag under a key of its connection, so that no process between two ranks can forge, change, repeat or reorder
    messages. Only crash output has no tag, and is nothing but text. Messages are not encrypted.

    A frame with a wrong tag may be one that crash output has cut. So from then on only crash output is read, and if the
    process does not end soon, the connection is closed: for the other ranks its end is the death of that rank.

    Every living rank gets exactly one event for each rank that is gone, after all messages of that rank that
    arrived. Messages of one rank arrive in the order in which they were sent. Those in transit through a hub that
    dies may be lost; those that had not left this process are sent through the next hub.

    A rank that has never connected to the hub is dead if it is on the same host and its socket no longer listens, even
    if another process has its port; otherwise its absence is only logged. The next hub, to which all have had time to
    connect, also takes a rank on another host for dead if no port there answers, or what has its port is no rank: only
    a rank with the token can answer.

    A rank that leaves may end once its farewell is with a rank that can't end before it has forwarded it: a rank
    that stays and has forwarded all farewells, or one with a higher number that has connected to it. The order of
    the numbers keeps two ranks that leave at once from each relying on the other. So a rank that can't be found may
    have left, and only some ranks may have its farewell. The hub decides whether such a rank has died when all others
    have connected and reported the exits that they have seen.

    `outage` are the seconds for which the network may be down while no rank counts as dead; rank 0's counts for
    all. `listen_at` are the IP addresses at which this rank listens, by default all of its host;
    :mod:`~mpicoll.transport.control.address_choice` chooses one. 127.0.0.1 must be
    among them, because ranks with the same :func:`~mpicoll.transport.control.addresses.place` use it. `shape` is that
    of the setting MPICOLL_CONTROL_NETWORK; rank 0's counts for all.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        token: bytes,
        outage: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        listen_at: Sequence[str] = (),
        shape: str = "auto",
    ) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} is not one of {size}")
        self.rank = rank
        self.size = size
        self._lock = threading.Lock()  # guards the endpoint; never held during a blocking call
        self._driver = threading.Lock()  # held by the thread in select
        self._over = False
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._wakeup_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        crash_descriptor = CrashDescriptor() if size > 1 else None
        self._crash_fd = None if crash_descriptor is None else crash_descriptor.fd
        # Other threads may write to these at any time, so their numbers must not be reused for other files.
        self._kept = [fd for fd in (self._wakeup_fd, self._crash_fd) if fd is not None]
        weakref.finalize(self, _close, self._kept).atexit = False
        self._selector.register(self._wakeup_fd, selectors.EVENT_READ)
        outage = timing.OUTAGE if outage is None else outage
        self._listen_at = listen_at
        self._shape = choose_shape(shape, size)
        self._endpoint = Endpoint(rank, size, token, outage, self._selector, crash_descriptor, clock, listen_at)
        self._fork_lock = False
        _all.add(self)

    # --- for any thread

    @property
    def address(self) -> dict[str, Any]:
        """The address at which this rank listens, for JSON, to be passed to all other ranks' :meth:`connect`."""
        listener = self._endpoint.listener
        return describe_address(listener.port, self._listen_at) | {
            "inodes": listener.inodes,
            "outage": self._endpoint.outage,
            "shape": self._shape,
        }

    def connect(self, addresses: Sequence[dict[str, Any]]) -> None:
        """Set every rank's :attr:`address`, by rank. The connections are made within :meth:`poll`."""
        if len(addresses) != self.size:
            raise ValueError(f"{len(addresses)} addresses for {self.size} ranks")
        groups = group_ranks(addresses[0]["shape"], [one["place"] for one in addresses])
        with self._lock:
            self._endpoint.connect(addresses, groups)
        self.wake()

    @property
    def hub(self) -> int:
        """The rank that forwards messages between the others, -1 before :meth:`connect`.

        It is this rank, or the one to which this rank is or will be connected.
        """
        return self._endpoint.members.hub

    @property
    def exits(self) -> dict[int, PeerExit]:
        """The exits of other ranks, by rank."""
        return dict(self._endpoint.members.exits)

    @property
    def crash_fd(self) -> int | None:
        """The descriptor to which a dying process may write text from a signal handler; None for a world of one.

        It is for ``faulthandler.enable(file=...)``; the others receive the text as :attr:`PeerExit.crash_output`. Its
        number never changes. It refers to a connection, or to stderr while there is none and in forked
        children.
        """
        return self._crash_fd

    def wake(self) -> None:
        """Make :meth:`poll` return."""
        if self._wakeup_fd in self._kept:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_write(self._wakeup_fd, 1)

    def wake_once(self, descriptor: int) -> None:
        """Make :meth:`poll` return once, as soon as `descriptor` can be read. For the thread that polls."""
        with self._lock:
            if not self._over and descriptor not in self._selector.get_map():
                self._selector.register(descriptor, selectors.EVENT_READ, _WAKE_ONCE)

    def send(self, body: dict[str, Any], to: int | None = None) -> None:
        """Send `body` to rank `to`, or to all others.

        Returns at once. Messages to a rank that is gone are dropped. Cost: one message to the hub, and one from
        there to each receiver. At most 16 MiB of JSON.
        """
        if to is not None and (not 0 <= to < self.size or to == self.rank):
            raise ValueError(f"rank {self.rank} of {self.size} can't send to rank {to}")
        self._post((MESSAGE, self.rank, ALL if to is None else to, encode(body)))

    def leave(self, body: dict[str, Any], timeout: float = 2.0) -> None:
        """Leave the job: the other ranks receive `body` as a message, then the exit of this rank.

        From then on this rank receives nothing, sends nothing, and gets no events of exits. Waits at most
        `timeout` seconds until the delivery to the others is certain, so that this process may end: longer than
        a moment only if a rank is stopped, or has never been connected. Other messages to a rank that has never
        been connected may be lost.
        """
        if self._endpoint.farewells.own is None:
            farewell = (FAREWELL, self.rank, ALL, encode(body))
            self._endpoint.farewells.own = farewell
            self._endpoint.outbox.append(farewell)
        self.flush(timeout)

    def flush(self, timeout: float) -> bool:
        """Wait until the sent messages are in the kernels of the next hops, so that this process may die.

        Waits at most `timeout` seconds. Returns True if all messages are there.
        """
        deadline = time.monotonic() + timeout
        woken = False
        while True:
            left = deadline - time.monotonic()
            if self._lock.acquire(timeout=max(left, 0)):
                try:
                    self._endpoint.transmit()
                    done = self._endpoint.is_delivered()
                finally:
                    self._lock.release()
                if done or self._over or self.size == 1:
                    return done
            if left <= 0:
                return False
            # The acknowledgements have to be read. Usually another thread does so in poll.
            if self._driver.acquire(blocking=False):
                try:
                    if not self._over:
                        self._turn(min(left, 0.01))
                finally:
                    self._driver.release()
            else:
                if not woken:
                    self.wake()  # the polling thread must send what this thread could not
                    woken = True
                time.sleep(0.002)

    def close(self) -> None:
        """Close all connections. For the other ranks this rank has died, unless it has left."""
        self._over = True
        self.wake()
        with self._driver, self._lock:
            self._close_all()

    def forget(self) -> None:
        """Close all descriptors of a forked child without a message.

        Otherwise the child's copies would hide its parent's death from the other ranks. It is called
        automatically in children made by ``os.fork``.
        """
        self._over = True
        self._lock, self._driver = threading.Lock(), threading.Lock()
        self._close_all()
        if self._wakeup_fd in self._kept:
            self._kept.remove(self._wakeup_fd)
            os.close(self._wakeup_fd)

    # --- the watch thread

    def poll(self, timeout: float) -> list[Event]:
        """Do all the work for at most `timeout` seconds, and return the events received by then.

        Returns as soon as there is an event, sometimes earlier, and at once after :meth:`close`. For one
        thread, in a loop.
        """
        if self._over or not self._driver.acquire(timeout=timeout):
            return []
        try:
            if not self._over:
                self._turn(0 if self._endpoint.events else timeout)
        finally:
            self._driver.release()
        events: list[Event] = []
        while self._endpoint.events:
            events.append(self._endpoint.events.popleft())
        return events

    def _turn(self, timeout: float) -> None:
        with self._lock:
            self._endpoint.transmit()
            timeout = max(0.0, min(timeout, self._endpoint.prepare_wait() - self._clock()))
        ready = self._selector.select(timeout)
        with self._lock:
            for key, mask in ready:
                if key.fd == self._wakeup_fd:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._wakeup_fd)
                elif key.data is _WAKE_ONCE:
                    self._selector.unregister(key.fd)
                else:
                    self._endpoint.serve(key, mask)
            self._endpoint.act_on_time()
            self._endpoint.transmit()

    # --- with the lock

    def _post(self, packet: Packet) -> None:
        if self._endpoint.farewells.own is not None or self._over or self.size == 1:
            return
        self._endpoint.outbox.append(packet)
        # Waiting for the lock could deadlock: this may be a signal handler on the thread that holds it.
        if not self._lock.acquire(blocking=False):
            self.wake()
            return
        try:
            self._endpoint.transmit()
            busy = self._endpoint.needs_turn()
        finally:
            self._lock.release()
        if busy:
            self.wake()

    def _close_all(self) -> None:
        self._endpoint.close()
        self._selector.close()

    def _before_fork(self) -> None:
        # No thread may be between the creation of a descriptor and its registration.
        self._fork_lock = self._lock.acquire(timeout=1.0)

    def _after_fork(self) -> None:
        if self._fork_lock:
            self._fork_lock = False
            self._lock.release()


_all: weakref.WeakSet[ControlNetwork] = weakref.WeakSet()


def _each(what: Callable[[ControlNetwork], None]) -> Callable[[], None]:
    def call() -> None:
        for network in list(_all):
            what(network)

    return call


os.register_at_fork(
    before=_each(ControlNetwork._before_fork),  # noqa: SLF001  they belong to the class
    after_in_parent=_each(ControlNetwork._after_fork),  # noqa: SLF001
    after_in_child=_each(ControlNetwork.forget),
)


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
