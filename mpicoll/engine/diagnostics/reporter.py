"""Reports on the states of all ranks, which the watchdog makes at the end of a job or at another thread's request."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from mpicoll.engine.diagnostics.peers import QUERY_TIMEOUT, Peers
from mpicoll.engine.diagnostics.process_exit import call_within

_WRITE_TIMEOUT = 3.0
"""Seconds in which a report is written."""

BRIEF_QUERY_TIMEOUT = 0.15
"""Seconds in which the other ranks reply after a rank has died: the launcher leaves them a quarter of a second."""


class _Request:
    """A request of another thread for a report, because of ``why``."""

    def __init__(self, why: str) -> None:
        self.why = why
        self.served = threading.Event()
        self.text = ""


class Reporter:
    """Writer of reports to `folder` (None: no files), as part of the job that is named `job`."""

    def __init__(self, peers: Peers) -> None:
        self.job = ""
        self.folder: str | None = None
        self.last_served = 0.0  # time of the last reply to a thread, which is about to raise Timeout
        self._peers = peers
        self._requests: deque[_Request] = deque()

    def request(self, why: str) -> str:
        """Collect the states of all ranks because of `why`, write the report, and return its summary.

        It takes at most ``2 * QUERY_TIMEOUT`` seconds. It must not be called on the watchdog's own thread.
        """
        network = self._peers.network
        if network is None:
            return ""
        request = _Request(why)
        self._requests.append(request)
        network.wake()
        request.served.wait(2 * QUERY_TIMEOUT)
        return request.text

    def serve_requests(self) -> None:
        """Make the requested reports, on the watchdog's thread."""
        while self._requests:
            request = self._requests.popleft()
            try:
                request.text, write = self.examine(request.why)
                request.text = "\n".join(filter(None, (request.text, write())))
            finally:
                self.last_served = time.monotonic()
                request.served.set()

    def examine(self, why: str, seconds: float = QUERY_TIMEOUT, min_wait: float = 0.0) -> tuple[str, Callable[[], str]]:
        """Collect the states of all ranks and analyse them. The ranks have `seconds` to reply.

        Returns the summary, and a function that writes the report and returns its path as a sentence, or the
        reason why there is none. It waits at most ``_WRITE_TIMEOUT`` seconds for the file system. Both are empty if no
        operation has been waiting for `min_wait` seconds.
        """
        try:
            # Late, see `late_imports`.
            from pathlib import Path

            from mpicoll.engine.diagnostics import report_file
            from mpicoll.engine.diagnostics.analysis import analyse
            from mpicoll.engine.diagnostics.deadlock import open_questions

            states = self._peers.collect_states(seconds, full=True)
            pending = [one for state in states.values() for one in (state or {}).get("pending", [])]
            if max((one["seconds"] for one in pending), default=0.0) < min_wait:
                return "", str
            questions = open_questions({rank: one for rank, one in states.items() if one is not None})
            if questions and seconds > BRIEF_QUERY_TIMEOUT:
                states = self._peers.collect_states(seconds, full=True, calls=questions)
            analysis = analyse(states, self._peers.size)
        except Exception as error:  # noqa: BLE001  a failing analysis must not keep the job from being ended
            return f"There is no report, because of {error!r}", str
        summary = "\n".join(one for one in analysis.words if one != why)

        def write() -> str:
            folder = self.folder
            if folder is None:
                return ""
            remedy = "set MPICOLL_REPORT to a folder that can be written to"

            def write_file() -> str:
                try:
                    path, _ = report_file.write(Path(folder), self.job, why, states, analysis)
                except Exception as error:  # noqa: BLE001  as above
                    return f"The report can't be written to {folder} ({error!r}); {remedy}"
                return f"Where each rank stands, its stacks and its last operations: {path}"

            late = f"The report could not be written to {folder} within {_WRITE_TIMEOUT:g} s; {remedy}"
            return call_within(_WRITE_TIMEOUT, write_file) or late

        return summary, write
