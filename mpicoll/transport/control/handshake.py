"""The handshake by which both ends of a new connection prove that they belong to the job.

The side that accepts sends a challenge, the other answers with a hello, and receives a welcome. Each side proves, for a
nonce that the other has just drawn, that it has the job's token.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from typing import Any

from mpicoll.transport.control.connection import (
    CHALLENGE,
    HELLO,
    REJECTED,
    WELCOME,
    Connection,
    ProtocolViolation,
    encode,
)


class Handshake:
    """The handshakes of rank `rank` of `size` in the job with the secret `token`.

    What the peer has sent is passed as `content`. Raises ProtocolViolation if that is not what a rank of this job
    sends, or KeyError, TypeError or ValueError if it does not have the right form.
    """

    def __init__(self, rank: int, size: int, token: bytes) -> None:
        self._rank = rank
        self._size = size
        self._token = token

    def challenge(self, accepted: Connection) -> None:
        """Send a challenge on a connection that this rank has accepted."""
        content = {"nonce": accepted.nonce, "rank": self._rank}
        accepted.queue.append((CHALLENGE, self._rank, -1, encode(content)))

    def answer(self, attempt: Connection, content: dict[str, Any]) -> None:
        """Answer a challenge with a proof."""
        challenge = str(content["nonce"])
        if content["rank"] != attempt.rank:
            raise ProtocolViolation("the port belongs to another rank")
        proof = self._proof("client", challenge, attempt.nonce, self._rank, attempt.rank)
        hello = {"rank": self._rank, "nonce": attempt.nonce, "proof": proof}
        attempt.nonce = f"{challenge} {attempt.nonce}"
        attempt.queue.append((HELLO, self._rank, attempt.rank, encode(hello)))

    def welcome(self, accepted: Connection, content: dict[str, Any], is_dead: Callable[[int], bool]) -> None:
        """Verify the answer to a challenge, and send a proof in return, or a rejection if the rank counts as dead."""
        rank, nonce = int(content["rank"]), str(content["nonce"])
        proof = self._proof("client", accepted.nonce, nonce, rank, self._rank)
        if not 0 <= rank < self._size or rank == self._rank or not hmac.compare_digest(proof, str(content["proof"])):
            raise ProtocolViolation("wrong proof of the job token")
        accepted.rank = rank
        accepted.deadline = float("inf")
        if is_dead(rank):
            accepted.queue.append((REJECTED, self._rank, rank, b"{}"))
            return
        proof = self._proof("server", accepted.nonce, nonce, rank, self._rank)
        accepted.queue.append((WELCOME, self._rank, rank, encode({"proof": proof})))

    def verify_welcome(self, attempt: Connection, content: dict[str, Any]) -> None:
        """Verify the proof of the rank that has accepted the connection."""
        challenge, _, nonce = attempt.nonce.partition(" ")
        proof = self._proof("server", challenge, nonce, self._rank, attempt.rank)
        if not hmac.compare_digest(proof, str(content["proof"])):
            raise ProtocolViolation("wrong proof of the job token")

    def _proof(self, side: str, server: str, client: str, rank: int, to: int) -> str:
        """Return a proof that only a rank of this job can compute.

        It contains both nonces, so that it is valid on one connection only; `side` keeps the proof of one side from
        being used as that of the other.
        """
        text = f"{side} {server} {client} {rank} {to} {self._size}"
        return hmac.new(self._token, text.encode(), hashlib.sha256).hexdigest()
