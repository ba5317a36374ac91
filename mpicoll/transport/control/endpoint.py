"""The protocol of the control network: how a rank reacts to packets, to connections that fail, and to time."""

from __future__ import annotations

import errno
import json
import selectors
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from mpicoll.logs import get_logger
from mpicoll.transport.control import timing
from mpicoll.transport.control.addresses import AddressBook
from mpicoll.transport.control.completeness import Completeness
from mpicoll.transport.control.connection import (
    ALL,
    CHALLENGE,
    EXITED,
    FAREWELL,
    FAREWELLS,
    FORWARDED,
    HELLO,
    JOINED,
    MESSAGE,
    REJECTED,
    REPORTED,
    WELCOME,
    Connection,
    Packet,
    ProtocolViolation,
    encode,
)
from mpicoll.transport.control.crash_descriptor import CrashDescriptor
from mpicoll.transport.control.dialer import Dialer
from mpicoll.transport.control.events import Event, Message, PeerExit
from mpicoll.transport.control.farewells import Farewells, read_farewells
from mpicoll.transport.control.handshake import Handshake
from mpicoll.transport.control.links import Links
from mpicoll.transport.control.listener import Listener
from mpicoll.transport.control.membership import Membership
from mpicoll.transport.control.routing import Router
from mpicoll.transport.control.sockets import (
    allow_descriptors,
    is_connected,
    lost_after,
    silence,
    unacknowledged_bytes,
)
from mpicoll.wording import rank_list

_LOST_HOST = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN}


_FEW_CLIENTS = 16
"""A hub of no more clients forwards farewells without a delay."""

_MAX_STRANGERS = 64
"""Accepted connections without a proof, beyond one for each rank. Each takes a descriptor of the program."""


class Endpoint:
    """One rank of the control network. It never blocks, starts no thread, and is not thread-safe.

    Its owner waits with `selector` until :attr:`next_time`, passes what is ready to :meth:`serve`, and then calls
    :meth:`act_on_time` and :meth:`transmit`. Events for the owner are appended to :attr:`events`. Other threads may
    append to :attr:`outbox`. `clock` returns the time with which all deadlines are compared.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        token: bytes,
        outage: float,
        selector: selectors.BaseSelector,
        crash_descriptor: CrashDescriptor | None,
        clock: Callable[[], float],
        addresses: Sequence[str],
    ) -> None:
        self.rank = rank
        self.size = size
        self.outage = outage
        self.outbox: deque[Packet] = deque()
        self.events: deque[Event] = deque()
        self.members = Membership(rank, size)
        self.farewells = Farewells(rank)
        self.listener = Listener(rank, size, selector, addresses)
        self._links = Links(selector)
        self._router = Router(self.members, self._links)
        self._handshake = Handshake(rank, size, token)
        self._addresses = AddressBook(rank)
        self._crash_descriptor = crash_descriptor
        self._now = clock
        self._dialer = Dialer(rank, self._addresses, self._links)
        self._missing: set[int] = set()  # the children that are not connected
        self._waiting: dict[Connection, None] = {}  # of ranks that can't be clients yet
        self._completeness = Completeness(self.members, self._links, self._missing)
        self._resign_at = float("inf")  # while this rank leaves, but is still a hub
        self._resign_by = float("inf")
        self._forward_at = float("inf")  # the farewells that have arrived
        self._log_missing_at = float("inf")
        self._check_silence_at = float("inf")

    def connect(self, addresses: Sequence[dict[str, Any]], groups: Sequence[int]) -> None:
        """Set the addresses of all ranks, and begin to connect: as a tree if there are `groups`, by rank."""
        self._addresses.set(addresses)
        if groups:
            self.members.set_groups(groups)
        self.members.resigned = self.members.leaving and not self.members.is_tree
        self.outage = float(addresses[0]["outage"])
        self._log_missing_at = self._now() + timing.LOG_MISSING_AFTER
        self._elect()

    def close(self) -> None:
        """Close all connections and the port."""
        self._links.close()
        if self._crash_descriptor is not None:
            self._crash_descriptor.use_stderr()
        self.listener.close()

    # --- sending

    def transmit(self) -> None:
        """Queue the packets of the outbox, and hand the kernel as much as it accepts."""
        if self.outbox or self._forward_at <= self._now() or self.members.is_alone:
            self._forward_farewells()
        while self.outbox:
            packet = self.outbox.popleft()
            if packet[0] == FAREWELL:
                self._leave(packet)
            else:
                self._router.send(packet)
        if self._waiting:
            self._admit_waiting()
        self._completeness.send()
        self._links.write()
        if self._may_confirm_farewells():
            # If this process died before all others have the farewell, the leaving rank would seem to have died too.
            roles = ("client", "hub") if self.members.is_tree else ("client",)
            self.farewells.confirm([one for one in self._links.unwritten if one.role in roles])
            self._links.write()
        if self._resign_at != float("inf") and (self._have_clients_left() or self._resign_at <= self._now()):
            self._stop_lingering()
            self._links.write()

    def _may_confirm_farewells(self) -> bool:
        """Return True if a farewell that has been sent on all connections is safe."""
        members = self.members
        if not members.is_tree:
            return not (self._missing and members.is_hub and not members.resigned)
        if not members.resigned and (self._missing or not members.leads):
            return False
        return members.is_hub or self._links.hub is not None

    def needs_turn(self) -> bool:
        """Return True if the thread that waits with the selector has to take account of what was sent."""
        return self._check_silence_at == float("inf") or self._links.needs_selector

    def is_delivered(self) -> bool:
        """Return True if everything that was sent is in the kernels of the next hops, so that this process may end."""
        if self.members.is_alone:
            return not self.members.leaving or self._links.is_delivered()
        if self.members.leaving:
            return self.farewells.is_certain and self._links.is_delivered()
        if self.outbox or self._links.has_waiting_packets():
            return False
        return self._links.is_delivered()

    def _leave(self, farewell: Packet) -> None:
        """Send the farewell to the hub.

        A hub waits for the farewells of its clients: at the end of a program all ranks leave within a moment, and if
        each of them in turn became the hub, all others would connect to each of them.
        """
        self.members.leaving = True
        if self.members.leads:
            self._resign_by = self._now() + timing.LINGER_AT_MOST
            self._resign_at = self._now() + timing.LINGER
        elif self.members.hub >= 0:
            self._resign(farewell)

    def _have_clients_left(self) -> bool:
        """Return True if all clients of this hub have left, or died, and need nothing of it any more."""
        members = self.members
        is_last = members.is_alone
        if not is_last and members.is_tree and not members.is_hub:
            is_last = all(one == self.rank or one in members.exits for one in members.group_of(self.rank))
        return is_last and self.farewells.are_confirmed

    def _stop_lingering(self) -> None:
        """Send the farewell of this hub.

        The leader of a group sends it to the root first, and to its group when the root has received it. Then no packet
        comes to the group through this rank any more, and all that have come are on their way before the farewell.
        """
        self._resign_at = float("inf")
        self._forward_farewells()
        farewell, hub = self.farewells.own, self._links.hub
        assert farewell is not None
        if not self.members.is_hub:
            if hub is not None:
                hub.enqueue([farewell])
        elif not self.members.resigned:
            self._resign(farewell)

    def _resign(self, farewell: Packet) -> None:
        """Send the farewell on all connections, and be hub no more.

        One receiver is enough: it forwards the farewell to ranks that connect to it, or to the next hub if it
        leaves as well. A hub without clients connects to the next rank, also to a higher one: that one may
        leave as well, and each then sends the other its farewell; the higher one continues.
        """
        self.members.resigned = True
        self._resign_at = float("inf")
        self._forward_farewells()
        for one in self._links.established():
            if not self.farewells.needs_nothing(one):
                one.enqueue([farewell])
        self.farewells.reached_higher_rank = any(
            rank > self.rank and rank not in self.members.exits for rank in self._links.clients
        )
        if self.members.is_hub and not self.farewells.reached_higher_rank:
            self._elect()

    # --- time

    def prepare_wait(self) -> float:
        """Set the events for which the selector waits, and return the time until which it may wait."""
        self.listener.resume(self._now(), self._expects_connections)
        self._links.update_selector()
        if self._check_silence_at == float("inf") and self._links.unacknowledged:
            self._check_silence_at = self._now() + timing.SILENCE_CHECK_INTERVAL
        times = [self._log_missing_at, self._check_silence_at, self.listener.next_time, self._dialer.next_time]
        times += [self.members.expiry(one) for one in self.members.suspects.values()]
        times += [self._links.deadlines.next_time, self._resign_at, self._forward_at]
        return min(times)

    def act_on_time(self) -> None:
        """Do what has become due."""
        now = self._now()
        for one in self._links.take_due(now):
            self._handle_deadline(one, now)
        for suspect in list(self.members.suspects.values()):
            if self.members.expiry(suspect) <= now:
                self._declare(suspect.exit)
        for one in self._dialer.begin_due(now, self.outage, self.members.has_had_time):
            self._handle_end(one)
        if self._check_silence_at <= now:
            self._check_silence_at = float("inf")
            self._check_silence()
        if self._log_missing_at <= now:
            self._log_missing_at = float("inf")
            self._log_missing()
        for gone in self.members.unannounced(lambda: self._completeness.is_complete, now):
            self._declare(gone)

    def _handle_deadline(self, one: Connection, now: float) -> None:
        """Handle a connection for which something should have happened by now."""
        # What arrived in time counts, also if this process is late to handle it.
        if not one.connecting:
            self._serve_connection(one, selectors.EVENT_READ)
        has_proved = one.rank >= 0 if one.role == "stranger" else one.role in ("client", "waiting", "hub")
        if one.sock.fileno() < 0 or (has_proved and not one.corrupt):
            return
        if one.connecting and is_connected(one.sock):
            self._finish_connecting(one)
        elif one.corrupt:
            self._close_violated(one, ProtocolViolation("a frame with a wrong tag"))
        elif one.role == "attempt" and not one.connecting:
            if not self._dialer.wait_longer(one, now):
                self._handle_end(one)
        else:
            one.error = errno.ETIMEDOUT
            self._handle_end(one)

    def _check_silence(self) -> None:
        """Find hosts that have been silent for too long and owe an acknowledgement.

        TCP restarts its own timeout when data is sent: it sends no more keepalive probes, and measures from
        there.
        """
        for one in self._links.unacknowledged.copy():
            if one.sock.fileno() < 0:
                continue  # the end of another one has closed it
            if not unacknowledged_bytes(one.sock):
                self._links.record_acknowledgement(one)
            elif self._links.is_established(one) and silence(one.sock) >= lost_after(self.outage):
                one.error = errno.ETIMEDOUT
                self._handle_end(one)

    def _log_missing(self) -> None:
        if self.farewells.own is not None:
            return
        to_hub = [] if self._links.hub or self.members.is_hub else [self.members.hub]
        missing = sorted({*self._missing, *to_hub})
        if missing:
            log = get_logger().warning if self.members.is_hub else get_logger().info
            log(
                "rank %d is not connected with %s yet; a death there would not be detected at once%s",
                self.rank,
                rank_list(missing),
                self._addresses.describe_paths(missing),
            )

    # --- connections

    def serve(self, key: selectors.SelectorKey, mask: int) -> None:
        """Handle a socket that the selector has found to be ready."""
        if isinstance(key.fileobj, socket.socket) and key.data is self.listener:
            self._accept(key.fileobj)
        elif isinstance(key.data, Connection):
            self._serve_connection(key.data, mask)

    def _accept(self, listening: socket.socket) -> None:
        for sock in self.listener.accept(listening, self.outage, self._now(), expected=self._expects_connections()):
            stranger = self._links.open(sock, "stranger")
            self._handshake.challenge(stranger)
            stranger.write()  # at once, because the time to answer begins now
            self._links.deadlines.set(stranger, self._now() + timing.PROVE_WITHIN)
            strangers = self._links.strangers
            if len(strangers) > self.size + _MAX_STRANGERS:
                # A rank of the job proves itself at once, and connects again if it was among the oldest.
                self._drop(next((one for one in strangers if one.rank < 0), stranger))

    def _expects_connections(self) -> bool:
        """Return True if ranks may be about to connect: to the hub, or to a rank that may become the hub."""
        return bool(self._missing) or (not self.members.is_hub and self._links.hub is None)

    def _update_missing(self, rank: int) -> None:
        """Take account of a change of `rank`, or of its connection to this hub."""
        if self.members.is_child(rank) and rank not in self._links.clients:
            self._missing.add(rank)
        else:
            self._missing.discard(rank)

    def _leader_of_others(self, rank: int) -> int | None:
        """Return the leader of another group, that of `rank`; None in the own group."""
        return None if self.members.is_in_group(rank) else self.members.leader_of(rank)

    def _update_leader(self, rank: int, before: int | None) -> None:
        """Take account of a change of `rank`, whose group had the leader `before`: expect the leader that follows, and
        send it what waits for the one before."""
        after = self._leader_of_others(rank)
        if after == before:
            return
        if before is not None:
            self._update_missing(before)
            for packet in self._links.take_for_client(before):
                if after is not None and packet[2] != before:
                    self._links.send_to_client(after, packet)
        if after is not None:
            self._update_missing(after)
            if after in self._missing:
                self._dialer.probe_too(after, self._now())

    def _serve_connection(self, one: Connection, mask: int) -> None:
        if one.sock.fileno() < 0:
            return  # closed in this turn
        self._links.touch(one)
        if one.connecting:
            self._finish_connecting(one)
            return
        if mask & selectors.EVENT_WRITE:
            one.write()
        try:
            for packet in one.read():
                self._handle(one, packet)
                if one.sock.fileno() < 0:
                    return
        except EOFError:
            self._handle_end(one)
        except ProtocolViolation as violation:
            self._close_violated(one, violation)
        else:
            if one.corrupt:
                deadlines = self._links.deadlines
                deadlines.set(one, min(deadlines.get(one), self._now() + timing.CRASH_WITHIN))

    def _close_violated(self, one: Connection, violation: ProtocolViolation) -> None:
        """Close a connection whose peer has violated the protocol."""
        log = get_logger().warning if one.role in ("client", "waiting", "hub") else get_logger().debug
        log("rank %d closes its connection with %s: %s", self.rank, one.name(), violation)
        one.error = errno.EPROTO
        self._handle_end(one)

    def _finish_connecting(self, one: Connection) -> None:
        if not self._dialer.finish(one, self._now()):
            self._handle_end(one)
        elif one.role == "probe" and self._addresses.is_local(one.rank):
            self._drop(one)  # the port is open, and no other process has it

    def _drop(self, one: Connection) -> None:
        """Close a connection."""
        self.farewells.drop(one)
        self._links.drop(one)
        self._waiting.pop(one, None)
        self._completeness.drop(one)
        if one.role == "client":
            self._update_missing(one.rank)
        if self._crash_descriptor is not None and one is self._crash_descriptor.connection:
            self._redirect_crash_output()

    def _drop_other_attempts(self, one: Connection) -> list[Connection]:
        others = [other for other in self._links.attempts if other is not one]
        for other in others:
            self._drop(other)
        return others

    def _handle_end(self, one: Connection) -> None:
        """Handle the end of a connection."""
        why = "unreachable" if one.error in _LOST_HOST else "closed"
        established = self._links.is_established(one)
        self._drop(one)
        outcome = self._dialer.record_end(one, self._now())
        # Before all ranks have had time to start, only a closed port of this host is evidence of a death.
        if outcome is not None and (
            self.members.has_had_time(one.rank) or (outcome == "closed" and self._addresses.is_local(one.rank))
        ):
            self._suspect_host(one.rank, outcome)
            self._suspect(self._addresses.exit_of(one.rank, outcome), certain=False)
        elif one.role == "hub" and established:
            self._handle_hub_end(one, why)
        elif one.role == "client" and established and one.rank not in self.members.exits and not self.members.resigned:
            if not self.members.is_in_group(one.rank):
                for packet in one.queue:
                    if packet[0] in (MESSAGE, EXITED, FAREWELL, FAREWELLS):
                        self._links.send_to_client(one.rank, packet)  # which the next leader of its group will be sent
            self._declare(self._addresses.exit_of(one.rank, why, one.crash_text()))
            for rank in self._on_lost_host(one.rank, why):
                self._declare(self._addresses.exit_of(rank, why))

    def _on_lost_host(self, rank: int, why: str) -> list[int]:
        """Return the ranks of a tree that are unreachable too if `rank` is: those of its group on its host."""
        if why != "unreachable" or self.members.is_in_group(rank):
            return []
        return [
            one
            for one in self.members.group_of(rank)
            if one != rank
            and self.members.is_alive(one)
            and one not in self._links.clients
            and self._addresses.share_host(one, rank)
        ]

    def _suspect_host(self, rank: int, why: str) -> None:
        """Suspect the ranks on the host of `rank` if that is unreachable."""
        for one in self._on_lost_host(rank, why):
            self.members.suspect(self._addresses.exit_of(one, why), self._now(), certain=False)

    def _handle_hub_end(self, one: Connection, why: str) -> None:
        self._links.recover_messages(one, outward=not self.members.is_in_group(one.rank))
        if self.farewells.is_forwarded:
            return
        if one.rank in self.members.exits:
            self._elect()
        else:
            self._suspect_host(one.rank, why)
            # A hub that had reported its exits to this rank would not have ended before its farewell had arrived.
            self._suspect(self._addresses.exit_of(one.rank, why, one.crash_text()), certain=one.has_reported)

    def _redirect_crash_output(self) -> None:
        """Let the crash descriptor refer to the hub, or on the hub to the rank that would be the next hub.

        When this rank leaves, no other one needs to know how it ends.
        """
        if self._crash_descriptor is not None and self.members.leaving:
            self._crash_descriptor.use_stderr()
        elif self._crash_descriptor is not None:
            clients = self._links.clients
            lowest = min((rank for rank in clients if rank not in self.members.exits), default=None)
            self._crash_descriptor.redirect(self._links.hub or (None if lowest is None else clients[lowest]))

    # --- exits and the election of the hub

    def _suspect(self, gone: PeerExit, *, certain: bool) -> None:
        """Handle a rank that seems to have died. Other ranks may have its farewell unless its death is `certain`."""
        leader = self._leader_of_others(gone.rank)
        if self.members.suspect(gone, self._now(), certain=certain):
            self._declare(gone)
        else:
            self._update_missing(gone.rank)
            self._update_leader(gone.rank, leader)
            self._elect()

    def _declare(self, gone: PeerExit, reporter: Connection | None = None) -> None:
        """Report once that a rank is gone, here and to the other ranks."""
        leader = self._leader_of_others(gone.rank)
        if not self.members.record(gone):
            return
        if not self.members.leaving:
            self.events.append(gone)
        self._update_missing(gone.rank)
        self._update_leader(gone.rank, leader)
        self._links.take_for_client(gone.rank)
        self._dialer.stop_probing(gone.rank)
        if reporter is not None and gone.rank in self.farewells.received:
            if not self.farewells.unsent:
                self._forward_at = self._now() + self._forwarding_delay()
            self.farewells.unsent[gone.rank] = reporter
        else:
            [report] = self._make_reports([gone])
            for one in self._list_receivers_of_exits():
                if one is not reporter and one.rank != gone.rank:
                    one.enqueue([report])
            # Before the messages that other ranks send when they know of it.
            for rank in self._missing if self.members.is_tree else ():
                self._links.send_to_client(rank, report)
        if gone.why != "left" and gone.rank in self._links.clients:
            self._drop(self._links.clients[gone.rank])
        elif self._crash_descriptor is not None and self._crash_descriptor.rank == gone.rank:
            self._redirect_crash_output()
        hub = self._links.hub
        if hub is not None and hub.rank == gone.rank:
            self._drop(hub)
            self._handle_hub_end(hub, gone.why)
        self._elect()

    def _forwarding_delay(self) -> float:
        clients = len(self._links.clients)
        return min(timing.FORWARD_AFTER * clients, timing.FORWARD_WITHIN) if clients > _FEW_CLIENTS else 0.0

    def _forward_farewells(self) -> None:
        """Forward the farewells that have arrived."""
        self._forward_at = float("inf")
        unsent = self.farewells.unsent
        if not unsent:
            return
        self.farewells.unsent = {}
        packets = self.farewells.make_packets(unsent)
        reporters = set(unsent.values())
        for one in self._list_receivers_of_exits():
            if one not in reporters:
                one.enqueue(packets)
            else:
                one.enqueue(self.farewells.make_packets(rank for rank, source in unsent.items() if source is not one))
        for rank in self._missing if self.members.is_tree else ():
            for packet in packets:
                self._links.send_to_client(rank, packet)

    def _list_receivers_of_exits(self) -> list[Connection]:
        """Return the connections on which exits are reported: clients that have left need no reports."""
        received = self.farewells.received
        return [one for one in self._links.established() if one.role != "client" or one.rank not in received]

    def _make_reports(self, exits: Sequence[PeerExit]) -> list[Packet]:
        """Return the packets that report exits to other ranks: the farewells where there were some."""
        left = [gone.rank for gone in exits if gone.rank in self.farewells.received]
        died = [gone for gone in exits if gone.rank not in self.farewells.received]
        return [*self.farewells.make_packets(left), *((EXITED, self.rank, ALL, encode(one._asdict())) for one in died)]

    def _elect(self) -> None:
        """Determine the hub. If it is another one, connect to it, or take over as the hub."""
        hub, farewell = self._links.hub, self.farewells.own
        if self.members.is_tree and hub is not None and self.members.is_alive(hub.rank):
            return
        if not self._addresses or self.farewells.is_forwarded or not self.members.elect(self._now()):
            return
        for one in list(self._links.attempts):
            self._drop(one)
        self._missing.clear()
        if self.members.is_hub:
            self._dialer.stop_seeking()
        else:
            self._dialer.seek_hub(self.members.hub)
        if self.members.leads:
            self._take_over()
        is_subleader = self.members.leads and not self.members.is_hub
        if self.members.leaving and not self.members.resigned and not is_subleader and farewell is not None:
            self._resign(farewell)

    def _take_over(self) -> None:
        """Become a hub: expect the children, and forward what waits."""
        children = self.members.children()
        self._missing.update(rank for rank in children if rank not in self._links.clients)
        if self.members.is_hub:
            for suspect in list(self.members.suspects.values()):
                if suspect.certain:
                    self._declare(suspect.exit)
        for packet in self._links.take_for_hub():
            self._router.forward(packet)
        if self.members.is_hub:
            for packet in self._links.take_outward():
                self._router.forward_outward(packet)
        allow_descriptors(len(children) + _MAX_STRANGERS)
        self._dialer.probe(sorted(self._missing), self._now())

    # --- packets

    def _handle(self, one: Connection, packet: Packet) -> None:
        kind, _, _, payload = packet
        if one.role == "waiting":
            one.deferred.append(packet)
            return
        try:
            content = json.loads(payload)
        except (ValueError, RecursionError):
            content = None
        if not isinstance(content, dict):
            raise ProtocolViolation("the payload is not a JSON object")
        try:
            if one.role in ("client", "hub"):
                self._handle_established(one, packet, content)
            else:
                self._handle_handshake(one, kind, content)
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            raise ProtocolViolation(f"{kind!r}: {error!r}") from error

    def _handle_handshake(self, one: Connection, kind: bytes, content: dict[str, Any]) -> None:
        steps: dict[tuple[str, bytes], Callable[[], None]] = {
            ("stranger", HELLO): lambda: self._welcome(one, content),
            ("stranger", JOINED): lambda: self._join(one, content),
            ("attempt", CHALLENGE): lambda: self._answer_challenge(one, content),
            ("attempt", WELCOME): lambda: self._add_hub(one, content),
            ("attempt", REJECTED): lambda: self._handle_rejection(one),
            ("probe", CHALLENGE): lambda: self._handshake.answer(one, content),
            ("probe", WELCOME): lambda: self._confirm_probe(one),
            ("probe", REJECTED): lambda: self._confirm_probe(one),
        }
        steps[one.role, kind]()

    def _handle_established(self, one: Connection, packet: Packet, content: dict[str, Any]) -> None:
        kind = packet[0]
        if kind == EXITED:
            self._handle_report(one, PeerExit(**content))
        elif kind == FORWARDED and content.get("received") is not True:
            self.farewells.is_forwarded = True
        elif kind == FORWARDED:
            if self.farewells.own is not None and not self.members.resigned:
                self._resign(self.farewells.own)
        elif kind == REPORTED:
            self._completeness.receive(one, content)
        elif kind == FAREWELLS:
            for farewell, body in read_farewells(content, self.size):
                self._deliver(one, farewell, body)
                if one.sock.fileno() < 0:
                    return
        elif kind in (MESSAGE, FAREWELL):
            self._deliver(one, packet, content)

    def _welcome(self, one: Connection, content: dict[str, Any]) -> None:
        greeting = {"exits": self.members.list_ranges()}
        self._handshake.welcome(one, content, self.members.has_died, greeting)
        self._links.deadlines.remove(one)

    def _answer_challenge(self, one: Connection, content: dict[str, Any]) -> None:
        self._handshake.answer(one, content)
        for other in self._drop_other_attempts(one):
            self._dialer.retry(other, self._now())

    def _add_hub(self, one: Connection, content: dict[str, Any]) -> None:
        one.known_exits = _read_ranges(content)
        self._drop_other_attempts(one)
        self._dialer.stop_seeking()
        self._links.add_hub(one)
        # From now on the other side takes the end of this connection for the end of this process.
        one.enqueue([(JOINED, self.rank, one.rank, encode({"exits": self.members.list_ranges()}))])
        one.enqueue(self._make_reports(self.members.list_unknown_exits(one.known_exits)))
        self._completeness.report_to(one)
        one.enqueue(packet for packet in self._links.take_for_hub() if packet[2] not in self.members.exits)
        # A rank that leads no more has none of them, or those of ranks that will send them to its hub.
        outward = self._links.take_outward() if self.members.is_tree else ()
        one.enqueue(
            packet
            for packet in outward
            if self.members.leads and self.members.is_in_group(packet[1]) and packet[2] not in self.members.exits
        )
        if self.members.leaving and self.farewells.own is not None and self._resign_at == float("inf"):
            # Those of others would violate the protocol: for the peer this rank is a client.
            one.enqueue(packet for packet in self._links.take_for_client(one.rank) if packet[1] == self.rank)
            one.enqueue([self.farewells.own])
        self._redirect_crash_output()

    def _confirm_probe(self, one: Connection) -> None:
        """Handle the answer to a probe, which proves by its tag that it comes from the rank."""
        self._dialer.confirm(one)
        self._drop(one)

    def _handle_rejection(self, one: Connection) -> None:
        """Handle a rejection: this rank counts as dead for the other one, since the network was interrupted."""
        self._drop(one)
        self._suspect(self._addresses.exit_of(one.rank, "unreachable"), certain=not self.members.leaving)

    def _join(self, one: Connection, content: dict[str, Any]) -> None:
        """Make an accepted connection that of a client, or let it wait."""
        one.known_exits = _read_ranges(content)
        if self._has_to_wait(one.rank):
            one.role = "waiting"
            self._waiting[one] = None
        else:
            self._add_client(one)

    def _has_to_wait(self, rank: int) -> bool:
        """Return True if `rank` has another hub as far as this rank knows, and what was sent through that may arrive.

        It connects because that one is gone, which this rank will learn from the connection to it, after all packets.
        """
        members, links = self.members, self._links
        if not members.is_tree or members.resigned or members.is_child(rank) or not members.is_alive(rank):
            return False
        if members.is_in_group(rank):
            return not members.leads and links.hub is not None
        return members.leader_of(rank) in links.clients if members.is_hub else links.hub is not None

    def _admit_waiting(self) -> None:
        """Make connections those of clients that have to wait no more."""
        for one in list(self._waiting):
            if one not in self._waiting or self._has_to_wait(one.rank):
                continue
            del self._waiting[one]
            one.role = "stranger"
            try:
                self._add_client(one)
                for packet in one.deferred:
                    if one.sock.fileno() >= 0:
                        self._handle(one, packet)
            except ProtocolViolation as violation:
                self._close_violated(one, violation)
            one.deferred = []

    def _add_client(self, one: Connection) -> None:
        rank = one.rank
        if rank < 0 or self.members.has_died(rank):
            raise ProtocolViolation("connection refused: this rank counts as dead, or has not proved the job token")
        old = self._links.clients.get(rank)
        if old is not None:
            self._drop(old)
        self._links.add_client(one)
        self._dialer.stop_probing(rank)
        leader = self._leader_of_others(rank)
        self.members.suspects.pop(rank, None)
        self._update_missing(rank)
        self._update_leader(rank, leader)
        one.enqueue(self._links.take_for_client(rank))
        one.enqueue(self._make_reports(self.members.list_unknown_exits(one.known_exits)))
        if self.members.resigned and self.farewells.own is not None:
            one.enqueue([self.farewells.own])
            if rank > self.rank and rank not in self.members.exits:
                self.farewells.reached_higher_rank = True
        one.enqueue([(REPORTED, self.rank, rank, b"{}")])
        if self._crash_descriptor is not None and rank not in self.members.exits:
            self._crash_descriptor.prefer(one)

    def _deliver(self, one: Connection, packet: Packet, body: dict[str, Any]) -> None:
        kind, source, dest, _ = packet
        members = self.members
        if kind == FAREWELL and source == one.rank:
            self.farewells.confirm_later(one)
            if not members.is_in_group(source):
                one.enqueue([(FORWARDED, self.rank, source, encode({"received": True}))])
        elif kind != FAREWELL and one.role == "client" and not self._router.may_send(one.rank, source):
            raise ProtocolViolation("a message with the source of another rank")
        if kind != FAREWELL and source != one.rank and one.rank in members.exits:
            return  # the next leader of the group may have sent later messages already
        if source in members.exits or not 0 <= source < self.size or source == self.rank or dest >= self.size:
            return
        if not self.members.leaving and dest in (ALL, self.rank):
            self.events.append(Message(source, body))
        if kind == MESSAGE:
            if one.role == "client":
                self._router.forward(packet)
            elif members.is_tree and members.leads:
                self._router.forward_to_group(packet)
        else:
            if source != one.rank:
                self.members.relayed_at = self._now()
            if self._resign_at != float("inf"):
                self._resign_at = min(self._now() + timing.LINGER, self._resign_by)
            self.farewells.receive(packet)
            self._declare(self._addresses.exit_of(source, "left"), one)

    def _handle_report(self, one: Connection, gone: PeerExit) -> None:
        """Handle another rank's report of an exit. A rank with its own connection to that rank ignores the report."""
        hub = self._links.hub
        if not 0 <= gone.rank < self.size or (hub is not None and hub.rank == gone.rank):
            return
        if one.role == "client" and gone.rank in self._links.clients:
            return
        self._declare(gone, one)


def _read_ranges(content: dict[str, Any]) -> list[tuple[int, int]]:
    """Return the ranges of ranks whose exits the peer knows."""
    return [(int(first), int(last)) for first, last in content["exits"]]
