"""Reports that all living ranks have connected, and have reported the exits that they had seen."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Any

from mpicoll.transport.control.connection import REPORTED, Connection, encode
from mpicoll.transport.control.links import Links
from mpicoll.transport.control.membership import Membership


class Completeness:
    """The reports that this rank has received, and those that it owes to its hub and to its clients.

    Each rank reports to its hub. The leader of a group of a tree reports when its whole group has, and the root answers
    when all leaders have. `missing` are the children that are not connected.
    """

    def __init__(self, members: Membership, links: Links, missing: AbstractSet[int]) -> None:
        self._members = members
        self._links = links
        self._missing = missing
        self._owes_report = False  # the hub is to know when all children have reported
        self._unanswered: dict[Connection, None] = {}  # clients that are answered when all ranks have reported

    @property
    def is_complete(self) -> bool:
        """True if all living ranks have reported to this hub, or to the root."""
        hub = self._links.hub
        return self._have_children_reported() and (
            self._members.is_hub or not self._members.is_tree or (hub is not None and hub.has_reported_all)
        )

    def _have_children_reported(self) -> bool:
        clients = self._links.clients
        return not self._missing and all(
            client.has_reported for rank, client in clients.items() if self._members.is_alive(rank)
        )

    def report_to(self, hub: Connection) -> None:
        """Report to a new hub, as the leader of a group when all of it have reported."""
        members = self._members
        self._owes_report = members.is_tree and members.leads and not members.resigned
        if not self._owes_report:
            hub.enqueue([(REPORTED, members.rank, hub.rank, b"{}")])

    def receive(self, one: Connection, content: dict[str, Any]) -> None:
        """Handle the report of another rank."""
        one.has_reported = True
        one.has_reported_all = content.get("all") is True
        if one.role == "client" and not self._members.is_in_group(one.rank):
            self._unanswered[one] = None

    def send(self) -> None:
        """Report to the hub, and as the root to the leaders, when all ranks below have reported."""
        if not (self._owes_report or self._unanswered) or not self._have_children_reported():
            return
        rank, hub = self._members.rank, self._links.hub
        if self._owes_report and hub is not None:
            self._owes_report = False
            hub.enqueue([(REPORTED, rank, hub.rank, b"{}")])
        if self._members.is_hub:
            for one in self._unanswered:
                one.enqueue([(REPORTED, rank, one.rank, encode({"all": True}))])
            self._unanswered.clear()

    def drop(self, one: Connection) -> None:
        """Send no answer on a connection that is closed."""
        self._unanswered.pop(one, None)
