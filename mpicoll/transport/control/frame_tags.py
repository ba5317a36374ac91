"""Tags of frames, which bind each frame to its connection, its direction and its place in the stream."""

from __future__ import annotations

from mpicoll.transport.hashes import blake2b

TAG_SIZE = 16
NO_TAG = bytes(TAG_SIZE)
"""The tag of a frame that is sent before there are keys."""


class FrameTags:
    """The tags of the frames that are sent in one direction of a connection, in their order.

    A tag is a keyed hash (BLAKE2b) of the frame's number, header and payload, with a key that only this direction of
    this connection has. So a frame that is forged, changed, repeated, missing or out of order has a wrong tag, as has
    every frame after it.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def next_tag(self, frame: bytes) -> bytes:
        """Return the tag of the next frame, whose header and payload are `frame`."""
        tag = blake2b(self._count.to_bytes(8, "big") + frame, key=self._key, digest_size=TAG_SIZE).digest()
        self._count += 1
        return tag
