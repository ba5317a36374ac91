"""Events of the control network: messages and exits of other ranks."""

from __future__ import annotations

from typing import Any, TypeAlias

from mpicoll.named_tuple import NamedTuple


class Message(NamedTuple):
    """A message from another rank."""

    source: int
    body: dict[str, Any]


class PeerExit(NamedTuple):
    """A rank that has exited.

    `why` is one of

    - "left": it has announced its exit by :meth:`~mpicoll.transport.control.network.ControlNetwork.leave`;
    - "closed": its process ended unannounced: its connection ended, or its port is closed and no rank has its farewell;
    - "unreachable": its host does not answer.

    `crash_output` is the text that it wrote to its crash descriptor before it died, if any; `pid` and `host` are from
    its address (0 and "" if unknown).
    """

    rank: int
    why: str
    crash_output: str
    pid: int
    host: str


Event: TypeAlias = Message | PeerExit
