"""Messages between workers and servers: tags, requests of workers and notices of servers."""

from __future__ import annotations

import json
from enum import IntEnum
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mpicoll.errors import CommunicationError, MpicollError, RankFailed, Timeout

Array: TypeAlias = np.ndarray[Any, Any]

REQUEST_TAG, NOTICE_TAG, _FIRST_TAG = 0, 1, 2

NOTICE_BYTES = 1024
"""Size of a notice. One is received in advance from each server, so all have the same size."""

WHOLE = -1
"""In the place of a number of rows: all of them."""


class Payload(IntEnum):
    """Contents of the messages of a bucket."""

    WEIGHTS = 0
    GRADIENT = 1
    PUSHED_ROWS = 2
    PULLED_ROWS = 3


def tag_of(bucket: int, payload: Payload) -> int:
    """Return the tag of a message of `bucket`, a number on its server."""
    return _FIRST_TAG + len(Payload) * bucket + payload


class Kind(IntEnum):
    """Requests of a worker."""

    PUSH = 1
    """The gradients of one step are sent completely."""
    PULL = 2
    """Send the weights."""
    LEAVE = 3
    """The worker has ended; `flag` is not 0 if it was by an error: 1, or 2 plus the rank of a server that has died."""


class Request(NamedTuple):
    """Request of a worker that has pushed `clock` times. `norm` is that of the gradient, `counts` are the numbers of
    rows for each sparse bucket of the server."""

    kind: Kind
    clock: int
    flag: int = 0
    norm: float = 0.0
    counts: tuple[int, ...] = ()

    def encode(self) -> Array:
        """Return the message."""
        norm = np.float64(self.norm).view(np.int64)
        return np.array([self.kind, self.clock, self.flag, norm, *self.counts], np.int64).view(np.uint8)


def request_memory(sparse: int) -> Array:
    """Return memory for a request to a server of so many `sparse` buckets."""
    return np.empty(8 * (4 + sparse), np.uint8)


def decode_request(memory: Array) -> Request:
    """Return the request in a message."""
    words = memory.view(np.int64)
    kind, clock, flag = words[:3].tolist()
    return Request(Kind(kind), clock, flag, float(words[3:4].view(np.float64)[0]), tuple(words[4:].tolist()))


_ERRORS: dict[str, type[MpicollError]] = {"RankFailed": RankFailed, "Timeout": Timeout}


def encode_notice(error: BaseException | None) -> Array:
    """Return the notice of a server that has failed with `error`, or that takes note of the end of a worker."""
    message = np.zeros(NOTICE_BYTES, np.uint8)
    if error is not None:
        text = str(error) if isinstance(error, MpicollError) else f"{type(error).__name__}: {error}"
        fields = {"kind": type(error).__name__, "ranks": list(getattr(error, "ranks", ())), "text": text[:600]}
        # json escapes other characters by six each.
        data = json.dumps(fields).encode()
        if len(data) > NOTICE_BYTES:
            data = json.dumps(fields | {"text": text[:100]}).encode()
        message[: len(data)] = np.frombuffer(data, np.uint8)
    return message


def decode_notice(message: Array, who: str) -> MpicollError | None:
    """Return the error that a notice reports; None if it takes note of an end. `who` describes this worker."""
    data = message.tobytes().rstrip(b"\0")
    if not data:
        return None
    fields = json.loads(data)
    text = f"{who}: a server has failed: {fields['text']}"
    if fields["kind"] == "RankFailed":
        return RankFailed(text, tuple(fields["ranks"]))
    return _ERRORS.get(fields["kind"], CommunicationError)(text)
