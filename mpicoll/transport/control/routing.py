"""The ways of messages through the hubs of the control network."""

from __future__ import annotations

from mpicoll.transport.control.connection import ALL, Packet
from mpicoll.transport.control.links import Links
from mpicoll.transport.control.membership import Membership


class Router:
    """The forwarding of messages by a rank.

    A hub forwards them to its group, and those of its group to the other groups.
    """

    def __init__(self, members: Membership, links: Links) -> None:
        self._members = members
        self._links = links

    def may_send(self, client: int, source: int) -> bool:
        """Return True if `client` may send a message of `source`: its own, or as a leader one of its group."""
        members = self._members
        if members.is_in_group(client) or not 0 <= source < members.size:
            return source == client
        return members.is_in_group(source, client)

    def send(self, packet: Packet) -> None:
        """Send a packet of this rank."""
        if self._members.leads:
            self.forward(packet)
        else:
            self._links.send_to_hub(packet)

    def forward(self, packet: Packet) -> None:
        """Send `packet`, of this rank or from a client, to all its destinations except its source."""
        self.forward_to_group(packet)
        if self._members.is_tree:
            self.forward_outward(packet)

    def forward_to_group(self, packet: Packet) -> None:
        """Send `packet` to its destinations in the group of this rank, except its source."""
        _, source, dest, _ = packet
        members = self._members
        single = (dest,) if dest != ALL and members.is_in_group(dest) else ()
        for rank in members.group_of(members.rank) if dest == ALL else single:
            if rank not in (members.rank, source) and rank not in members.exits:
                self._links.send_to_client(rank, packet)

    def forward_outward(self, packet: Packet) -> None:
        """Send `packet` to its destinations in groups that are neither that of this rank nor that of its source."""
        _, source, dest, _ = packet
        members = self._members
        if dest != ALL and members.is_in_group(dest):
            return
        if members.is_hub:
            leaders = members.other_leaders() if dest == ALL else [members.leader_of(dest)]
            for leader in leaders:
                if leader is not None and not members.is_in_group(leader, source):
                    self._links.send_to_client(leader, packet)
        elif members.leads:
            self._links.send_outward(packet)
        else:
            self._links.hold_outward(packet)
