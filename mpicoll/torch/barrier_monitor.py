"""Barrier that reports the missing ranks. It uses the control network, so it works even if MPI is blocked.

torch's store would do as well, but on several nodes any host can write to that, and so release the barrier.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from mpicoll.engine.diagnostics.mailbox import Mailbox
from mpicoll.errors import Timeout

GRACE = timedelta(seconds=10)
"""Additional time for which the other ranks wait after rank 0's timeout, to receive its report of the missing ranks."""


class MonitoredBarrier:
    """Call `number` of the barrier on one rank of a group.

    `members` are the ranks of the group as ranks of the job, and `rank` is this rank's number among them. `key` names
    the group. `number` must be greater than those of earlier barriers of the group, and the same on all ranks.
    """

    def __init__(self, mailbox: Mailbox, key: str, members: Sequence[int], rank: int, number: int) -> None:
        self._mailbox = mailbox
        self._subject = f"monitored_barrier of {key}"
        self._members = members
        self._rank = rank
        self._number = number

    def wait(self, timeout: timedelta, wait_all_ranks: bool, explain: Callable[[str], str] | None = None) -> None:
        """Wait until all ranks have called this method.

        If some ranks have not called it within `timeout`, rank 0 raises Timeout with the first missing rank or, with
        `wait_all_ranks`, all missing ranks, and with the result of `explain` about them. The other ranks raise the same
        error without the result of `explain`.
        """
        if self._rank == 0:
            report = self._wait_for_ranks(timeout, wait_all_ranks)
            for other in self._members[1:]:
                self._mailbox.send(other, self._subject, self._number, report)
            if report:
                report = f"monitored_barrier: [Rank 0]: {report}"
                explanation = explain(report) if explain is not None else ""
                raise Timeout(f"{report}\n{explanation}" if explanation else report)
            return
        root, bound = self._members[0], (timeout + GRACE).total_seconds()
        self._mailbox.send(root, self._subject, self._number)
        received = self._mailbox.take(root, self._subject, self._number, bound)
        report = f"no report was received within {timeout.total_seconds():g} s" if received is None else received
        if report:
            raise Timeout(
                f"monitored_barrier: [Rank {self._rank}]: Rank {self._rank} successfully reached monitoredBarrier, but"
                f" received errors while waiting for send/recv from rank 0: {report}"
            )

    def _wait_for_ranks(self, timeout: timedelta, wait_all_ranks: bool) -> str:
        """Wait for all ranks, and return the error text; empty if all have arrived.

        The text is that of torch, because programs may search for it.
        """
        milliseconds = int(timeout.total_seconds() * 1000)
        if milliseconds <= 0:
            return f"Rank 0 timed out in monitoredBarrier after {milliseconds} ms"
        deadline = time.monotonic() + timeout.total_seconds()
        missing: list[int] = []
        for rank, member in enumerate(self._members[1:], 1):
            left = max(deadline - time.monotonic(), 0.0)
            if self._mailbox.take(member, self._subject, self._number, left) is None:
                missing.append(rank)
                if not wait_all_ranks:
                    break
        if not missing:
            return ""
        names = ("Ranks " if wait_all_ranks else "Rank ") + ", ".join(map(str, missing))
        return f"{names} failed to pass monitoredBarrier in {milliseconds} ms"
