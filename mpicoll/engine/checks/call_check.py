"""Comparison of all arguments of the ranks' collective calls, and of their results.

``MPICOLL_CHECK`` and :func:`mpicoll.debug` enable it. Each collective then begins with the exchange of one word, and
only where the words differ do the ranks exchange descriptions of their calls. All ranks raise the same error before any
other data is sent, and the communicator stays usable.

By default the ranks compare only a signature of each call. In shared memory that costs next to nothing (see
:meth:`mpicoll.engine.core.arena.Arena.matcher`). Where ranks share no memory,
:class:`~mpicoll.engine.core.call_comparison.BatchedComparison` compares each of the first collectives of a
communicator, and later ones in batches, unless ``MPICOLL_CHECK=off``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from mpicoll.engine.checks import numerics_check
from mpicoll.engine.core.call_comparison import compare_words
from mpicoll.engine.core.call_mismatch import (
    Description,
    compared_fields,
    describe_call,
    hash_fields,
    mismatch_error,
    nonfinite_error,
    unequal_results_error,
)
from mpicoll.engine.core.queue import OperationQueue
from mpicoll.engine.core.registry import Options
from mpicoll.engine.diagnostics.flight_recorder import Entry, EntryTuple
from mpicoll.errors import CommunicationError, Timeout
from mpicoll.transport.base import Transport

_REPLICATED = ("allreduce", "bcast", "allgather")
"""Collectives whose results must have the same bits on all ranks."""


class CallCheck:
    """Observer of the collectives of one communicator, which performs the checks that `options` enable."""

    needs_call_sites = True
    needs_every_operation = True
    compares_calls = True

    def __init__(self, transport: Transport, queue: OperationQueue, options: Options) -> None:
        self._transport = transport
        self._queue = queue
        self._options = options

    def before(self, raw: EntryTuple, function: Callable[..., Any], interrupts: list[BaseException]) -> None:
        """Compare the ranks' calls and check the inputs. Raises MismatchError or NumericsError on all ranks."""
        entry = Entry._make(raw)
        operations = getattr(function, "operations", ())
        nonfinite = ""
        if self._options.numerics:
            nonfinite = next(filter(None, map(numerics_check.describe_nonfinite_input, operations)), "")
        fields, rank_dependent = compared_fields(entry, operations)

        def describe() -> Description:
            return describe_call(entry, fields) | {"nonfinite": nonfinite}

        if self._transport.size == 1:
            if nonfinite:
                raise nonfinite_error(entry.group, [describe()], inputs=True)
            return
        word = hash_fields(fields)
        if nonfinite or rank_dependent:
            # Make the words differ, so that the ranks exchange their descriptions.
            word ^= self._transport.rank + 1
        descriptions = self._compare(entry, word, describe, interrupts)
        if descriptions is None:
            return
        error = mismatch_error(entry.group, descriptions)
        if error is not None:
            raise error
        if any(one["nonfinite"] for one in descriptions):
            raise nonfinite_error(entry.group, descriptions, inputs=True)

    def after(self, raw: EntryTuple, function: Callable[..., Any], interrupts: list[BaseException]) -> None:
        """Check the results. Raises NumericsError or MismatchError on all ranks."""
        operations = getattr(function, "operations", ())
        growing = [one for one in operations if numerics_check.may_overflow(one)] if self._options.numerics else []
        replicated = (
            [one for one in operations if one.query.collective in _REPLICATED] if self._options.checksum else []
        )
        if not growing and not replicated:
            return
        entry = Entry._make(raw)
        nonfinite = next(filter(None, map(numerics_check.describe_nonfinite_result, growing)), "")
        sums = [numerics_check.checksum(one) for one in replicated]
        fields, _ = compared_fields(entry, operations)

        def describe() -> Description:
            return describe_call(entry, fields) | {"nonfinite": nonfinite, "sums": sums}

        if self._transport.size == 1:
            if nonfinite:
                raise nonfinite_error(entry.group, [describe()], inputs=False)
            return
        word = hash_fields({"sums": sums}) ^ (self._transport.rank + 1 if nonfinite else 0)
        descriptions = self._compare(entry, word, describe, interrupts)
        if descriptions is None:
            return
        if any(one["nonfinite"] for one in descriptions):
            raise nonfinite_error(entry.group, descriptions, inputs=False)
        raise unequal_results_error(entry.group, descriptions)

    def _compare(
        self, entry: Entry, word: int, describe: Callable[[], Description], interrupts: list[BaseException]
    ) -> list[Description] | None:
        """Return the descriptions of all ranks if their words differ, otherwise None. Raises CommunicationError if not
        all ranks can enter the collective."""
        try:
            texts = compare_words(self._transport, self._queue, entry, word, lambda: json.dumps(describe()), interrupts)
        except Timeout:
            raise  # Timeout is reported with the call anyway
        except CommunicationError as error:
            where = "" if entry.site is None else f" at {entry.site}"
            what = f"{entry.call}, collective {entry.number} of {entry.group.name},{where}"
            error.args = (f"{what}: {error}",)
            raise
        return None if texts is None else [json.loads(text) for text in texts]
