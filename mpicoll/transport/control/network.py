"""The control network: connections between the ranks of a job that are independent of MPI.

Messages and reports of deaths are delivered also while MPI is blocked. The topology is a star. The hub is the lowest
living rank; all others are connected to it, and it forwards their messages. When the hub dies, all connect to the next
lowest rank: every rank listens from the start, so that this needs no MPI. Each rank's watch thread drives its end by
:meth:`ControlNetwork.poll`; the class starts no thread.

Deaths are detected by the kernel, never inferred from a process that is silent: a connection ends at once with its
process. A host whose kernel does not answer is lost, but only after the OUTAGE seconds that an interruption of the
network may last: it is detected within 12 s (20 s on Linux before 6.15). A process that is stopped, is in a debugger or
holds the GIL for minutes does not read, but its kernel answers for it. For the same reason no more bytes are in flight
on a connection than the receiver's kernel accepts without help of the process (``_WINDOW``): TCP can't distinguish a
full buffer from a lost host.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import logging
import os
import selectors
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mpicoll.transport.control.addresses import _addresses, _place
from mpicoll.transport.control.connection import (
    _ALL,
    _CHALLENGE,
    _GONE,
    _HEARD,
    _HELLO,
    _JOINED,
    _LEAVE,
    _MESSAGE,
    _REJECTED,
    _TOLD,
    _WELCOME,
    _Connection,
    _encode,
    _Outgoing,
    _Violation,
)
from mpicoll.transport.control.sockets import (
    _RESERVE,
    _allow_descriptors,
    _is_connected,
    _listen,
    _lost_after,
    _silence,
    _stderr,
    _to_stderr,
    _tune,
    _under_way,
)

_log = logging.getLogger("mpicoll")

OUTAGE = 7.0
"""Seconds for which hosts may be out of each other's reach without counting as lost."""
CONNECT_WITHIN = 2.0
"""Seconds for a connection to be made."""
PROVE_WITHIN = 5.0
"""Seconds within which a new connection must prove that its peer has the token."""
HEAR_WITHIN = 0.5
"""Seconds by which the hub's death is delayed, so that the next hub can add the words that only it has received."""
TELL_WITHIN = 5.0
"""Seconds within which all ranks must connect to a new hub and report the exits that they have seen.

After twice as many seconds the other ranks decide without the hub.
"""
ASK_AFTER = 1.0
"""Seconds until the hub probes the port of a rank that has not connected to it."""
MISSED_AFTER = 60.0
"""Seconds until it is logged that a rank has not connected. The rank is not taken for dead."""
_SETTLE_EVERY = 1.0

_LOST_HOST = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN}


@dataclass(frozen=True, slots=True)
class Message:
    """A message from another rank."""

    source: int
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class PeerExit:
    """A rank that has exited.

    `why` is one of

    - "left": it has announced its exit by :meth:`ControlNetwork.leave`;
    - "closed": its process ended unannounced: its connection ended, or its port is closed and no rank has its farewell;
    - "unreachable": its host does not answer.

    `words` is the text that it wrote to its crash descriptor before it died, if any; `pid` and `host` are from its
    address (0 and "" if unknown).
    """

    rank: int
    why: str
    words: str
    pid: int
    host: str


class ControlNetwork:
    """This rank's connections to the other ranks of its job.

    `token` is the job's secret, the same on all ranks. Connections that do not prove that they have it are
    rejected, such as those of a port scanner, a rank of another job or another user of the machine. Messages are
    neither encrypted nor signed.

    Every living rank gets exactly one event for each rank that is gone, after all messages of that rank that
    arrived. Messages of one rank arrive in the order in which they were sent. Those in transit through a hub that
    dies may be lost; those that had not left this process are sent through the next hub.

    A rank that has never connected to the hub is dead if it is on the same host and its port is no longer open;
    otherwise its absence is only logged.

    A rank that leaves may end once its farewell is with a rank that can't end before it has forwarded it: a rank
    that stays and has forwarded all farewells, or one with a higher number that has connected to it. The order of
    the numbers keeps two ranks that leave at once from each relying on the other. So a rank that can't be found may
    have left, and only some ranks may have its farewell. The hub decides whether such a rank has died when all others
    have connected and reported the exits that they have seen.

    `outage` are the seconds for which the network may be down while no rank is taken for dead; rank 0's counts for
    all.
    """

    def __init__(self, rank: int, size: int, token: bytes, outage: float | None = None) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} is not one of {size}")
        self.rank = rank
        self.size = size
        self._token = token
        self._outage = OUTAGE if outage is None else outage
        self._lock = threading.Lock()  # guards all below; never held during a blocking call
        self._driver = threading.Lock()  # held by the thread in select
        self._outbox: deque[_Outgoing] = deque()
        self._events: deque[Message | PeerExit] = deque()
        self._gone: dict[int, PeerExit] = {}
        self._unsure: dict[int, tuple[PeerExit, float, bool]] = {}  # with the time, and True if it can't have left
        self._peers: Sequence[dict[str, Any]] = ()
        self._clients: dict[int, _Connection] = {}
        self._others: set[_Connection] = set()  # strangers, attempts, probes
        self._hub: _Connection | None = None
        self._target = -1
        self._elected_at = 0.0
        self._retry: dict[str, tuple[float, float]] = {}  # address of the target -> when to try again, pause before
        self._failed: dict[str, str] = {}  # address of the target -> why it could not be reached
        self._ask: dict[int, tuple[float, float]] = {}  # rank that has not come -> when to ask, pause before
        self._asked: dict[int, dict[str, str]] = {}
        self._held: deque[_Outgoing] = deque()  # own messages, until there is a hub
        self._backlog: dict[int, deque[_Outgoing]] = {}  # to ranks that have not come
        self._farewell: _Outgoing | None = None
        self._leaving = False  # the farewell is on its way, behind all other messages
        self._heard = False  # a hub has forwarded it
        self._informed = False  # a client with a higher rank has been sent it
        self._farewells: dict[int, _Outgoing] = {}
        self._hearsay_at = float("-inf")  # when a farewell was received through another rank
        self._leavers: list[tuple[_Connection, _Outgoing]] = []  # whose farewell is to be forwarded
        self._missed_at = float("inf")
        self._settle_at = float("inf")
        self._accept_at = 0.0
        self._over = False
        self._selector = selectors.DefaultSelector()
        self._wakeup_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._crash_fd = _stderr() if size > 1 else None
        self._crash_to: _Connection | None = None
        # Other threads may write to these at any time, so their numbers must not be reused for other files.
        self._kept = [fd for fd in (self._wakeup_fd, self._crash_fd) if fd is not None]
        weakref.finalize(self, _close, self._kept).atexit = False
        self._selector.register(self._wakeup_fd, selectors.EVENT_READ)
        self._listener = _listen(size)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._listening = True
        self._fork_lock = False
        _all.add(self)

    # --- for any thread

    @property
    def address(self) -> dict[str, Any]:
        """The address at which this rank listens, for JSON, to be passed to all other ranks' :meth:`connect`."""
        return {
            "host": socket.gethostname(),
            "place": _place(),
            "pid": os.getpid(),
            "port": self._listener.getsockname()[1],
            "addresses": _addresses(),
            "outage": self._outage,
        }

    def connect(self, addresses: Sequence[dict[str, Any]]) -> None:
        """Set every rank's :attr:`address`, by rank. The connections are made within :meth:`poll`."""
        if len(addresses) != self.size:
            raise ValueError(f"{len(addresses)} addresses for {self.size} ranks")
        with self._lock:
            self._peers = list(addresses)
            self._outage = float(addresses[0]["outage"])
            self._missed_at = time.monotonic() + MISSED_AFTER
            self._elect()
        self.wake()

    @property
    def hub(self) -> int:
        """The rank that forwards messages between the others, -1 before :meth:`connect`.

        It is this rank, or the one to which this rank is or will be connected.
        """
        return self._target

    @property
    def gone(self) -> dict[int, PeerExit]:
        """The ranks that are gone."""
        return self._gone.copy()

    @property
    def crash_fd(self) -> int | None:
        """The descriptor to which a dying process may write text from a signal handler; None for a world of one.

        It is for ``faulthandler.enable(file=...)``; the others receive the text as :attr:`PeerExit.words`. Its
        number never changes. It refers to a connection, or to stderr while there is none and in forked
        children.
        """
        return self._crash_fd

    def wake(self) -> None:
        """Make :meth:`poll` return."""
        if self._wakeup_fd in self._kept:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_write(self._wakeup_fd, 1)

    def send(self, body: dict[str, Any], to: int | None = None) -> None:
        """Send `body` to rank `to`, or to all others.

        Returns at once. Messages to a rank that is gone are dropped. Cost: one message to the hub, and one from
        there to each receiver. At most 16 MiB of JSON.
        """
        if to is not None and (not 0 <= to < self.size or to == self.rank):
            raise ValueError(f"rank {self.rank} of {self.size} can't send to rank {to}")
        self._post((_MESSAGE, self.rank, _ALL if to is None else to, _encode(body)))

    def leave(self, body: dict[str, Any], timeout: float = 2.0) -> None:
        """Leave the job: the other ranks receive `body` as a message, then the exit of this rank.

        From then on this rank receives nothing, sends nothing, and gets no events of exits. Waits at most
        `timeout` seconds until the delivery to the others is certain, so that this process may end: longer than
        a moment only if a rank is stopped, or has never been connected. Other messages to a rank that has never
        been connected may be lost.
        """
        if self._farewell is None:
            farewell = (_LEAVE, self.rank, _ALL, _encode(body))
            self._farewell = farewell
            self._outbox.append(farewell)
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
                    self._pump()
                    done = self._delivered()
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
        """Close all connections. The other ranks take it for death, unless this rank has left."""
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

    def poll(self, timeout: float) -> list[Message | PeerExit]:
        """Do all the work for at most `timeout` seconds, and return the events received by then.

        Returns as soon as there is an event, sometimes earlier, and at once after :meth:`close`. For one
        thread, in a loop.
        """
        if self._over or not self._driver.acquire(timeout=timeout):
            return []
        try:
            if not self._over:
                self._turn(0 if self._events else timeout)
        finally:
            self._driver.release()
        events: list[Message | PeerExit] = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def _turn(self, timeout: float) -> None:
        with self._lock:
            self._pump()
            self._watch_for()
            if self._settle_at == float("inf") and any(one.unsettled for one in self._established()):
                self._settle_at = time.monotonic() + _SETTLE_EVERY
            timeout = max(0.0, min(timeout, self._next_time() - time.monotonic()))
        ready = self._selector.select(timeout)
        with self._lock:
            for key, mask in ready:
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.data, _Connection):
                    self._serve(key.data, mask)
                else:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._wakeup_fd)
            self._on_time(time.monotonic())
            self._pump()

    # --- all methods below: the lock is held

    def _post(self, message: _Outgoing) -> None:
        if self._farewell is not None or self._over or self.size == 1:
            return
        self._outbox.append(message)
        # Waiting for the lock could deadlock: this may be a signal handler on the thread that holds it.
        if not self._lock.acquire(blocking=False):
            self.wake()
            return
        try:
            self._pump()
            busy = self._settle_at == float("inf") or any(one.blocked for one in self._connections())
        finally:
            self._lock.release()
        if busy:
            self.wake()

    def _established(self) -> list[_Connection]:
        return [*self._clients.values(), *([self._hub] if self._hub else ())]

    def _connections(self) -> list[_Connection]:
        return [*self._established(), *self._others]

    def _pump(self) -> None:
        while self._outbox:
            message = self._outbox.popleft()
            if message[0] == _LEAVE:
                self._say_goodbye(message)
            elif self._is_hub():
                self._spread(message)
            else:
                (self._hub.queue if self._hub else self._held).append(message)
        for connection in self._connections():
            connection.write()
        for leaver, message in list(self._leavers):
            if self._is_known(message):
                self._leavers.remove((leaver, message))
                leaver.queue.append((_HEARD, self.rank, leaver.rank, b"{}"))
                leaver.write()

    def _is_known(self, farewell: _Outgoing) -> bool:
        """Return True if all others have the farewell.

        Otherwise, if this process died, the leaving rank would seem to have died as well.
        """
        if (
            self._is_hub()
            and not self._leaving
            and any(rank != self.rank and rank not in self._clients for rank in self._alive())
        ):
            return False  # a rank has not connected yet
        return not any(client.blocked or farewell in client.queue for client in self._clients.values())

    def _say_goodbye(self, farewell: _Outgoing) -> None:
        """Send the farewell to the hub, or as the hub to its clients.

        One receiver is enough: it forwards the farewell to ranks that connect to it, or to the next hub if it
        leaves as well. A hub without clients connects to the next rank, also to a higher one: that one may
        leave as well, and each then sends the other its farewell; the higher one continues.
        """
        self._leaving = True
        for one in self._established():
            one.queue.append(farewell)
        self._informed = any(rank > self.rank and rank not in self._gone for rank in self._clients)
        if self._is_hub() and not self._informed:
            self._elect()

    def _is_hub(self) -> bool:
        return self._target == self.rank

    def _spread(self, message: _Outgoing) -> None:
        """Forward `message` to all its destinations except its source."""
        _, source, dest, _ = message
        for rank in range(self.size) if dest == _ALL else (dest,):
            if rank not in (self.rank, source) and rank not in self._gone:
                client = self._clients.get(rank)
                (client.queue if client else self._backlog.setdefault(rank, deque())).append(message)

    def _delivered(self) -> bool:
        if len(self._gone.keys() | self._unsure.keys()) == self.size - 1:
            return True
        if self._leaving:
            passed_on = self._heard or self._informed
            return passed_on and all(one.idle and not _under_way(one.sock) for one in self._established())
        if self._outbox or self._held or any(self._backlog.values()):
            return False
        return all(connection.idle and not _under_way(connection.sock) for connection in self._connections())

    def _watch_for(self) -> None:
        """Update the events for which the selector waits."""
        if not self._listening and time.monotonic() >= self._accept_at:
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._listening = True
        for one in self._connections():
            events = selectors.EVENT_READ
            if one.connecting or one.blocked:
                events |= selectors.EVENT_WRITE
            if events != one.events:
                change = self._selector.modify if one.events else self._selector.register
                change(one.sock, events, one)
                one.events = events

    def _next_time(self) -> float:
        times = [self._missed_at, self._settle_at, *(self._held_until(*one) for one in self._unsure.values())]
        times += [one.deadline for one in self._others]
        times += [when for when, _ in self._retry.values()]
        times += [when for when, _ in self._ask.values()]
        if not self._listening:
            times.append(self._accept_at)
        return min(times)

    def _on_time(self, now: float) -> None:
        for one in [one for one in self._others if one.deadline <= now]:
            if one.connecting and _is_connected(one.sock):
                self._connected(one)  # in time, but this process was late to handle it
            else:
                one.error = errno.ETIMEDOUT
                self._lost(one)
        for gone, since, certain in list(self._unsure.values()):
            if self._held_until(gone, since, certain) <= now:
                self._declare(gone)
        for where, (when, pause) in list(self._retry.items()):
            if when <= now and where in self._retry:
                self._retry[where] = float("inf"), pause
                self._reach(self._target, where, "attempt")
        self._ask_for_missing(now)
        if self._settle_at <= now:
            self._settle_at = float("inf")
            self._settle()
        if self._missed_at <= now:
            self._missed_at = float("inf")
            self._log_missed()
        self._decide()

    def _ask_for_missing(self, now: float) -> None:
        for rank, (when, pause) in list(self._ask.items()):
            if when <= now and rank in self._ask:
                self._ask[rank] = now + pause, min(pause * 2, 10.0)
                if self._near(rank) or self._is_late():  # otherwise a missing answer would prove nothing
                    self._asked[rank] = {}
                    for where in self._ways(rank):
                        self._reach(rank, where, "probe")

    def _settle(self) -> None:
        """Find hosts that have been silent for too long and owe an acknowledgement.

        TCP restarts its own timeout when data is sent: it sends no more keepalive probes, and measures from
        there.
        """
        for one in self._established():
            if one.unsettled and one.sock.fileno() >= 0:
                one.unsettled = _under_way(one.sock) > 0
                if one.unsettled and _silence(one.sock) >= _lost_after(self._outage):
                    one.error = errno.ETIMEDOUT
                    self._lost(one)

    def _log_missed(self) -> None:
        if self._farewell is not None:
            return
        if self._is_hub():
            missed = sorted(set(self._alive()) - {self.rank} - set(self._clients))
        else:
            missed = [] if self._hub else [self._target]
        if missed:
            _log.info(
                "rank %d has no connection with rank %s yet, whose death would not be noticed at once",
                self.rank,
                ", ".join(map(str, missed)),
            )

    # --- connections

    def _accept(self) -> None:
        for _ in range(64):
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError as error:
                self._rest(f"{error}")
                return
            limit = _allow_descriptors(sock.fileno())
            if sock.fileno() > limit - _RESERVE:
                sock.close()
                self._rest(f"the limit of {limit} descriptors is near")
                return
            try:
                _tune(sock, self._outage)
            except OSError:  # the connection has ended already
                sock.close()
                continue
            stranger = _Connection(sock, "stranger")
            stranger.deadline = time.monotonic() + PROVE_WITHIN
            stranger.queue.append((_CHALLENGE, self.rank, -1, _encode({"nonce": stranger.nonce, "rank": self.rank})))
            self._others.add(stranger)

    def _rest(self, why: str) -> None:
        """Accept no connections for a second."""
        self._selector.unregister(self._listener)
        self._listening = False
        if not self._accept_at:
            _log.info("rank %d can't take all connections of its job: %s; it works without the others", self.rank, why)
        self._accept_at = time.monotonic() + 1.0

    def _ways(self, rank: int) -> list[str]:
        peer = self._peers[rank]
        return ["127.0.0.1"] if self._near(rank) else list(peer["addresses"])

    def _near(self, rank: int) -> bool:
        return bool(self._peers[rank]["place"] == self._peers[self.rank]["place"])

    def _reach(self, rank: int, where: str, role: str) -> None:
        """Begin to connect to a rank's listener."""
        family = socket.AF_INET6 if ":" in where else socket.AF_INET
        try:
            one = _Connection(socket.socket(family, socket.SOCK_STREAM), role, rank, where)
        except OSError as error:
            _log.debug("rank %d has no socket: %s", self.rank, error)
            if role == "attempt":
                self._again(where)
            return
        self._others.add(one)
        try:
            _tune(one.sock, self._outage)
            code = one.sock.connect_ex((where, int(self._peers[rank]["port"])))
        except OSError as error:
            code = error.errno or errno.EHOSTUNREACH
        one.deadline = time.monotonic() + CONNECT_WITHIN
        one.connecting = True
        if code not in (0, errno.EINPROGRESS):
            one.error = code
            self._lost(one)

    def _serve(self, one: _Connection, mask: int) -> None:
        """Read from and write to a connection that is ready."""
        if one.sock.fileno() < 0:
            return  # closed in this turn
        if one.connecting:
            self._connected(one)
            return
        if mask & selectors.EVENT_WRITE:
            one.write()
        try:
            for message in one.read():
                self._take(one, message)
                if one.sock.fileno() < 0:
                    return
        except EOFError:
            self._lost(one)
        except _Violation as violation:
            level = logging.WARNING if one.role in ("client", "hub") else logging.DEBUG
            _log.log(level, "rank %d closes its connection with %s: %s", self.rank, one.name(), violation)
            one.error = errno.EPROTO
            self._lost(one)

    def _connected(self, one: _Connection) -> None:
        code = one.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code == 0:
            try:
                # A connection to a free port of the same host may, by chance, be connected to itself.
                code = errno.ECONNREFUSED if one.sock.getsockname() == one.sock.getpeername() else 0
            except OSError as error:
                code = error.errno or errno.ECONNREFUSED
        if code:
            one.error = code
            self._lost(one)
            return
        one.connecting = False
        one.deadline = float("inf")  # a stopped process may be silent for long
        self._failed.pop(one.where, None)
        if one.role == "probe":
            self._asked.pop(one.rank, None)  # the port is open
            self._drop(one)

    def _drop(self, one: _Connection) -> None:
        """Close a connection and remove it from wherever it is registered."""
        if one.events:
            self._selector.unregister(one.sock)
            one.events = 0
        self._others.discard(one)
        self._leavers = [leaver for leaver in self._leavers if leaver[0] is not one]
        if self._clients.get(one.rank) is one:
            del self._clients[one.rank]
        if self._hub is one:
            self._hub = None
        self._aim()
        one.sock.close()

    def _lost(self, one: _Connection) -> None:
        """Handle the end of a connection."""
        role, rank = one.role, one.rank
        why = "unreachable" if one.error in _LOST_HOST else "closed"
        established = self._hub is one or self._clients.get(rank) is one
        self._drop(one)
        if role == "attempt" and rank == self._target:
            self._again(one.where)
            self._judge(one, self._failed)
        elif role == "probe" and rank in self._asked:
            self._judge(one, self._asked[rank])
        elif role == "client" and established and rank not in self._gone and not self._leaving:
            self._declare(self._exit_record(rank, why, one.text()))
        elif role == "hub" and established:
            self._hub_lost(one, why)

    def _is_late(self) -> bool:
        """True if there has been another hub: then all ranks have had time to start."""
        return self._target > 0

    def _judge(self, one: _Connection, failed: dict[str, str]) -> None:
        """Record that an address of a rank can't be reached.

        If none is left, the rank is suspected dead if its host refused the connections, or if this follows a
        hub's death.
        """
        rank = one.rank
        if one.error in (errno.ECONNREFUSED, errno.EPROTO):
            failed[one.where] = "closed"
        elif one.connecting and one.error != errno.ECONNRESET:  # which may pass, or become a refusal
            failed[one.where] = "unreachable"
        if len(failed) < len(self._ways(rank)):
            return
        refused = all(why == "closed" for why in failed.values())
        if (self._near(rank) and refused) or self._is_late():
            self._suspect(self._exit_record(rank, "closed" if refused else "unreachable", ""), certain=False)

    def _hub_lost(self, one: _Connection, why: str) -> None:
        # The hub has discarded messages that were not sent completely.
        self._held.extendleft(message for message in reversed(one.queue) if message[0] == _MESSAGE)
        if self._heard:
            return  # no rank waits for this rank any more
        if one.rank in self._gone:
            self._elect()
        else:
            # A hub that had reported its exits to this rank would not have ended before its farewell had arrived.
            self._suspect(self._exit_record(one.rank, why, one.text()), certain=one.told)

    def _suspect(self, gone: PeerExit, *, certain: bool) -> None:
        """Handle a rank that is gone, while other ranks may have its farewell unless it is `certain` to have died."""
        rank = gone.rank
        if gone.words or (certain and rank > self._target):
            self._declare(gone)
            return
        if rank not in self._unsure or (certain and not self._unsure[rank][2]):
            self._unsure[rank] = gone, time.monotonic(), certain
        self._elect()

    def _held_until(self, _: PeerExit, since: float, certain: bool) -> float:
        """Return the time at which a rank in ``_unsure`` counts as dead, unless a report about it arrives before."""
        if certain:
            return since + HEAR_WITHIN
        if self._leaving:
            return float("inf")  # those that stay find out
        return max(since, self._elected_at) + TELL_WITHIN * (1 if self._is_hub() else 2)

    def _decide(self) -> None:
        """Declare the unsure ranks dead, as the hub to which all others have connected without a farewell of these."""
        others = (rank for rank in self._alive() if rank != self.rank)
        if (
            self._unsure
            and self._is_hub()
            and not self._leaving
            and time.monotonic() >= self._hearsay_at + TELL_WITHIN
            and all(rank in self._clients and self._clients[rank].told for rank in others)
        ):
            for gone, _, _ in list(self._unsure.values()):
                self._declare(gone)

    def _exit_record(self, rank: int, why: str, words: str) -> PeerExit:
        peer = self._peers[rank] if self._peers else {}
        return PeerExit(rank, why, words, int(peer.get("pid", 0)), str(peer.get("host", "")))

    def _again(self, where: str) -> None:
        pause = self._retry.get(where, (0.0, 0.1))[1]
        self._retry[where] = time.monotonic() + pause, min(pause * 2, 2.0)

    # --- election of the hub

    def _alive(self) -> list[int]:
        return [rank for rank in range(self.size) if rank not in self._gone and rank not in self._unsure]

    def _elect(self) -> None:
        if not self._peers or self._heard:
            return
        target = min((rank for rank in self._alive() if rank != self.rank or not self._leaving), default=self.rank)
        if target == self._target:
            return
        for one in [one for one in self._others if one.role == "attempt"]:
            self._drop(one)
        self._target = target
        self._elected_at = now = time.monotonic()
        self._retry.clear()
        self._failed.clear()
        if target != self.rank:
            for where in self._ways(target):
                self._retry[where] = 0.0, 0.1
            return
        for gone, _, certain in list(self._unsure.values()):
            if certain:
                self._declare(gone)
        while self._held:
            self._spread(self._held.popleft())
        _allow_descriptors(self.size)
        self._ask = {rank: (now + ASK_AFTER, ASK_AFTER) for rank in self._alive() if rank != self.rank}
        for rank in self._clients:
            self._ask.pop(rank, None)

    def _declare(self, gone: PeerExit, teller: _Connection | None = None) -> None:
        """Report once that a rank is gone, here and to the other ranks."""
        rank = gone.rank
        if rank in self._gone or rank == self.rank:
            return
        self._unsure.pop(rank, None)
        self._gone[rank] = gone
        if not self._leaving:
            self._events.append(gone)
        self._backlog.pop(rank, None)
        self._ask.pop(rank, None)
        self._asked.pop(rank, None)
        for one in self._established():
            if one is not teller and one.rank != rank:
                one.queue.append(self._news(gone))
        if gone.why != "left" and rank in self._clients:
            self._drop(self._clients[rank])
        if self._hub is not None and self._hub.rank == rank:
            one = self._hub
            self._drop(one)
            self._hub_lost(one, gone.why)
        self._elect()

    def _news(self, gone: PeerExit) -> _Outgoing:
        if gone.rank in self._farewells:
            return self._farewells[gone.rank]
        what = {"rank": gone.rank, "why": gone.why, "words": gone.words, "pid": gone.pid, "host": gone.host}
        return _GONE, self.rank, -1, _encode(what)

    def _aim(self) -> None:
        """Let the crash descriptor refer to the hub, or on the hub to the rank that would be the next hub."""
        living = [rank for rank in self._clients if rank not in self._gone]
        to = self._hub or (self._clients[min(living)] if living else None)
        if to is self._crash_to or self._crash_fd is None:
            return
        self._crash_to = to
        if to is not None:
            os.dup2(to.sock.fileno(), self._crash_fd, inheritable=False)
        else:
            _to_stderr(self._crash_fd)

    # --- the protocol

    def _take(self, one: _Connection, message: _Outgoing) -> None:
        kind, _, _, payload = message
        try:
            content = json.loads(payload)
        except (ValueError, RecursionError):
            content = None
        if not isinstance(content, dict):
            one.spoilt(payload)
            if one.role in ("stranger", "attempt"):
                raise _Violation("no JSON object")
            return
        try:
            steps: dict[tuple[str, bytes], Callable[[], None]] = {
                ("stranger", _HELLO): lambda: self._hello(one, content),
                ("stranger", _JOINED): lambda: self._join(one),
                ("attempt", _CHALLENGE): lambda: self._answer(one, content),
                ("attempt", _WELCOME): lambda: self._welcomed(one, content),
                ("attempt", _REJECTED): lambda: self._rejected(one),
            }
            if one.role not in ("client", "hub"):
                steps[one.role, kind]()
            elif kind == _GONE:
                self._told(one, PeerExit(**content))
            elif kind == _HEARD:
                self._heard = True
            elif kind == _TOLD:
                one.told = True
            elif kind in (_MESSAGE, _LEAVE):
                self._deliver(one, message, content)
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            raise _Violation(f"{kind!r}: {error!r}") from error

    def _deliver(self, one: _Connection, message: _Outgoing, body: dict[str, Any]) -> None:
        kind, source, dest, _ = message
        if kind == _LEAVE and source == one.rank:
            self._leavers.append((one, message))
        elif kind != _LEAVE and one.role == "client" and source != one.rank:
            raise _Violation("a message with the source of another rank")
        if source in self._gone or not 0 <= source < self.size or source == self.rank:
            return
        if not self._leaving and dest in (_ALL, self.rank):
            self._events.append(Message(source, body))
        if kind == _MESSAGE:
            if one.role == "client":
                self._spread(message)
        else:
            if source != one.rank:
                self._hearsay_at = time.monotonic()
            self._farewells[source] = message
            self._declare(self._exit_record(source, "left", ""), one)

    def _told(self, one: _Connection, gone: PeerExit) -> None:
        """Handle another rank's report of an exit. A rank with its own connection to that rank ignores the report."""
        if not 0 <= gone.rank < self.size or (self._hub is not None and self._hub.rank == gone.rank):
            return
        if one.role == "client" and gone.rank in self._clients:
            return
        self._declare(gone, one)

    def _proof(self, side: str, server: str, client: str, rank: int, to: int) -> str:
        """Return a proof that only a rank of this job can compute.

        Each side proves itself for a nonce that the other has just drawn, so that a proof is valid on one
        connection only; `side` keeps the proof of one side from being used as that of the other.
        """
        text = f"{side} {server} {client} {rank} {to} {self.size}"
        return hmac.new(self._token, text.encode(), hashlib.sha256).hexdigest()

    def _answer(self, one: _Connection, content: dict[str, Any]) -> None:
        challenge = str(content["nonce"])
        if content["rank"] != one.rank:
            raise _Violation("this is another rank")
        for other in [other for other in self._others if other.role == "attempt" and other is not one]:
            self._drop(other)
            self._again(other.where)
        proof = self._proof("client", challenge, one.nonce, self.rank, one.rank)
        hello = {"rank": self.rank, "nonce": one.nonce, "proof": proof}
        one.nonce = f"{challenge} {one.nonce}"
        one.queue.append((_HELLO, self.rank, one.rank, _encode(hello)))

    def _hello(self, one: _Connection, content: dict[str, Any]) -> None:
        rank, nonce = int(content["rank"]), str(content["nonce"])
        proof = self._proof("client", one.nonce, nonce, rank, self.rank)
        if not 0 <= rank < self.size or rank == self.rank or not hmac.compare_digest(proof, str(content["proof"])):
            raise _Violation("a wrong proof")
        one.rank = rank
        one.deadline = float("inf")
        if self._is_dead(rank):
            one.queue.append((_REJECTED, self.rank, rank, b"{}"))
            return
        proof = self._proof("server", one.nonce, nonce, rank, self.rank)
        one.queue.append((_WELCOME, self.rank, rank, _encode({"proof": proof})))

    def _welcomed(self, one: _Connection, content: dict[str, Any]) -> None:
        challenge, _, nonce = one.nonce.partition(" ")
        proof = self._proof("server", challenge, nonce, self.rank, one.rank)
        if not hmac.compare_digest(proof, str(content["proof"])):
            raise _Violation("a wrong proof")
        for other in [other for other in self._others if other.role == "attempt" and other is not one]:
            self._drop(other)
        self._others.discard(one)
        self._retry.clear()
        one.role = "hub"
        self._hub = one
        # From now on the other side takes the end of this connection for the end of this process.
        one.queue.append((_JOINED, self.rank, one.rank, b"{}"))
        one.queue.extend(self._news(gone) for gone in self._gone.values())
        one.queue.append((_TOLD, self.rank, one.rank, b"{}"))
        one.queue.extend(message for message in self._held if message[2] not in self._gone)
        self._held.clear()
        if self._leaving and self._farewell is not None:
            one.queue.extend(self._backlog.pop(one.rank, ()))
            one.queue.append(self._farewell)
        self._aim()

    def _is_dead(self, rank: int) -> bool:
        """Return True if it is known that a rank has died. One that has left may still have to report other exits."""
        return rank in self._gone and self._gone[rank].why != "left"

    def _rejected(self, one: _Connection) -> None:
        """Handle a rejection: the other rank takes this rank for dead, since the network was interrupted."""
        rank = one.rank
        self._drop(one)
        self._suspect(self._exit_record(rank, "unreachable", ""), certain=not self._leaving)

    def _join(self, one: _Connection) -> None:
        rank = one.rank
        if rank < 0 or self._is_dead(rank):
            raise _Violation("connection refused: this rank counts as dead, or has not proved the job token")
        old = self._clients.pop(rank, None)
        if old is not None:
            self._drop(old)
        self._others.discard(one)
        one.role = "client"
        self._clients[rank] = one
        self._ask.pop(rank, None)
        self._asked.pop(rank, None)
        self._unsure.pop(rank, None)
        one.queue.extend(self._backlog.pop(rank, ()))
        one.queue.extend(self._news(gone) for gone in self._gone.values())
        if self._leaving and self._farewell is not None:
            one.queue.append(self._farewell)
            self._informed = self._informed or (rank > self.rank and rank not in self._gone)
        one.queue.append((_TOLD, self.rank, rank, b"{}"))
        self._aim()

    # --- the end

    def _close_all(self) -> None:
        for one in self._connections():
            one.sock.close()
        self._clients.clear()
        self._others.clear()
        self._hub = self._crash_to = None
        if self._crash_fd is not None:
            _to_stderr(self._crash_fd)
        self._listener.close()
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
