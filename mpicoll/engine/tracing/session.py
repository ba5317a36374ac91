"""A trace on the ranks of a communicator, from its begin to the merged file.

Each rank records its operations in its own part, ``DIR/JOB/rank-N.jsonl``. At the end rank 0 makes ``DIR/JOB.json`` of
the parts, which are sent to rank 0 where it can't read them in the file system. The clocks of nodes are compared at the
begin and at the end.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np

from mpicoll import atomic_files
from mpicoll.engine.diagnostics.process_exit import exit_hooks, log_to_stderr
from mpicoll.engine.tracing import parts, trace_files
from mpicoll.engine.tracing.recorder import Recorder
from mpicoll.errors import CommunicationError, SetupError, Timeout
from mpicoll.transport.base import Transport

_PINGS = 32
"""Round trips used to measure the offset of another clock; the fastest one counts."""

_CHUNK = 4 << 20
"""Bytes of the messages in which a part is sent."""

_TAG = 32767
"""Tag of the duplicate on which ranks communicate for tracing."""

_REPLY_TIMEOUT = 60.0
"""Seconds within which a rank has to reply after rank 0 has contacted it."""


class TraceSession:
    """Active trace on the ranks of a communicator. `path` is the path of the resulting file."""

    def __init__(self, folder: Path, transport: Transport, limit: float) -> None:
        """Begin tracing. Collective. Raises SetupError on a rank that can't write to `folder`."""
        self._owner = os.getpid()
        self._limit = limit
        self._link = link = transport.duplicate(_TAG)
        self._nodes = transport.nodes
        self._members = transport.members
        self._clocks: parts.Clocks = {}
        job = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}" if link.rank == 0 else ""
        self.job = link.allgather_text(job)[0]
        # The program may change its working directory later.
        self.path = folder.absolute() / f"{self.job}.json"
        self._folder = folder.absolute() / self.job
        if link.rank == 0:
            for rank in range(1, link.size):
                if self._represents_node(rank):
                    self._compare_clocks(rank)
                self._send_command(rank, b"q")
        else:
            self._run_commands()
        try:
            self._folder.parent.mkdir(parents=True, exist_ok=True)
            self._folder.mkdir(0o700, exist_ok=True)  # other users can't place links in it
            if link.rank == 0:
                self._write_job_file()
            self._part = self._folder / parts.part_name(self._members[link.rank])
            self._recorder = Recorder(self._part, self.job, self._members[link.rank], transport.key)
        except OSError as error:
            raise SetupError(
                f"rank {link.rank} can't write its trace to {folder}: {error.strerror}; give a folder that it may write"
                " to (MPICOLL_TRACE)"
            ) from error
        self._exit_hook = self._recorder.flush
        exit_hooks.append(self._exit_hook)

    def stop(self) -> None:
        """Stop recording and leave the parts to ``mpicoll trace merge``."""
        if os.getpid() == self._owner and self._exit_hook in exit_hooks:
            exit_hooks.remove(self._exit_hook)
            self._recorder.stop()

    def finish(self) -> None:
        """Stop recording, and make one file of all parts. Collective. A dead rank delays the others for at most the
        limit; the file contains as much of its part as rank 0 can read."""
        if os.getpid() != self._owner:
            return
        self.stop()
        try:
            if self._link.rank == 0:
                self._gather()
            else:
                size = np.array([self._part.stat().st_size], np.int64).view(np.uint8)
                self._link.isend(size, 0, 0).wait(self._limit)
                self._run_commands()
        except (CommunicationError, OSError) as error:
            log_to_stderr(
                f"rank {self._link.rank}: the trace is incomplete: {error}; `mpicoll trace merge {self._folder}` merges"
                " the parts that exist"
            )

    def free(self) -> None:
        """Release the transport that the ranks used for tracing. Collective."""
        self._link.free()

    # Rank 0 sends commands of one letter, which the other ranks execute: p(ing), s(end the part), d(elete it), q(uit).

    def _send_command(self, rank: int, letter: bytes) -> None:
        self._link.isend(np.frombuffer(letter, np.uint8).copy(), rank, 1).wait(_REPLY_TIMEOUT)

    def _run_commands(self) -> None:
        letter = np.zeros(1, np.uint8)
        while True:
            self._link.irecv(letter, 0, 1).wait(self._limit)
            command = letter.tobytes()
            if command == b"p":
                now = np.array([clock()]).view(np.uint8)
                self._link.isend(now, 0, 2).wait(_REPLY_TIMEOUT)
            elif command == b"s":
                self._send_part()
            elif command == b"d":
                self._part.unlink()
                with suppress(OSError):  # other ranks of this host may still have their parts in the folder
                    self._folder.rmdir()
            else:
                return

    def _compare_clocks(self, rank: int) -> None:
        """Measure the offset of the clock of the node of `rank` from the clock of this node."""
        remote = np.zeros(1)
        best, point = float("inf"), (0.0, 0.0)
        for _ in range(_PINGS):
            reply = self._link.irecv(remote.view(np.uint8), rank, 2)
            begin = clock()
            self._send_command(rank, b"p")
            reply.wait(_REPLY_TIMEOUT)
            end = clock()
            if end - begin < best:
                best, point = end - begin, (float(remote[0]), float(remote[0]) - (begin + end) / 2)
        self._clocks.setdefault(self._nodes[rank], []).append(point)

    def _represents_node(self, rank: int) -> bool:
        """Return True if `rank` reports the clock of its node: the first rank of each node but rank 0's."""
        return self._nodes[rank] != self._nodes[0] and self._nodes.index(self._nodes[rank]) == rank

    def _write_job_file(self) -> None:
        nodes = {str(member): node for member, node in zip(self._members, self._nodes, strict=True)}
        parts.write_job_file(self._folder, {"job": self.job, "nodes": nodes, "clocks": self._clocks})

    def _gather(self) -> None:
        """Collect all parts on rank 0, and make the file."""
        lost = self._collect_parts()
        self._write_job_file()
        trace_files.merge(self._folder)
        if not lost:
            shutil.rmtree(self._folder)

    def _collect_parts(self) -> list[str]:
        """Serve each rank in the order of arrival, and return the errors."""
        link, lost = self._link, []
        sizes = np.zeros(link.size, np.int64)
        pending_sizes = {
            rank: link.irecv(sizes[rank : rank + 1].view(np.uint8), rank, 0) for rank in range(1, link.size)
        }
        deadline = time.monotonic() + self._limit
        while pending_sizes:
            for rank, pending in list(pending_sizes.items()):
                try:
                    if pending.test() is None:
                        if time.monotonic() < deadline:
                            continue
                        raise Timeout(f"rank {rank} has not ended its trace within {self._limit:g} s")
                    self._collect_part(rank, int(sizes[rank]))
                except CommunicationError as error:
                    lost.append(str(error))
                del pending_sizes[rank]
            time.sleep(1e-3)
        for text in lost:
            log_to_stderr(f"trace {self.path}: {text}")
        return lost

    def _collect_part(self, rank: int, size: int) -> None:
        if self._represents_node(rank):
            self._compare_clocks(rank)
        part = self._folder / parts.part_name(self._members[rank])
        if not part.exists() or part.stat().st_size != size:
            self._fetch(rank, part, size)
            self._send_command(rank, b"d")
        self._send_command(rank, b"q")

    def _fetch(self, rank: int, part: Path, size: int) -> None:
        self._send_command(rank, b"s")
        atomic_files.write(part, self._receive_chunks(rank, size))

    def _receive_chunks(self, rank: int, size: int) -> Iterator[bytes]:
        while size > 0:
            chunk = np.empty(min(size, _CHUNK), np.uint8)
            self._link.irecv(chunk, rank, 3).wait(_REPLY_TIMEOUT)
            yield chunk.tobytes()
            size -= chunk.size

    def _send_part(self) -> None:
        with self._part.open("rb") as file:
            while chunk := file.read(_CHUNK):
                self._link.isend(np.frombuffer(chunk, np.uint8).copy(), 0, 3).wait(_REPLY_TIMEOUT)


def clock() -> float:
    """Return the time by the clock of the operations: the same clock for all processes of a host."""
    return time.monotonic()
