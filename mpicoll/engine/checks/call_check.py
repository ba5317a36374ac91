"""Comparison of the ranks' collective calls.

``MPICOLL_CHECK`` and :func:`mpicoll.debug` compare all arguments (:class:`Check`): each collective begins with the
exchange of one word, and only where the words differ do the ranks exchange descriptions of their calls. Then all ranks
raise the same error before any other data is sent, and the communicator stays usable.

By default the ranks compare a signature of each call. In shared memory the comparison costs next to nothing (see
:meth:`mpicoll.engine.core.arena.Arena.matcher`). Where ranks share no memory, :class:`Between` compares each of the
first collectives of a communicator, and later ones in batches, unless ``MPICOLL_CHECK=off``.
"""

from __future__ import annotations

import json
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias
from weakref import ref
from zlib import crc32

from mpicoll.config import UNCHECKED
from mpicoll.engine.diagnostics.flight_recorder import Call, Entry, Group, Raw, Site, call_site
from mpicoll.engine.diagnostics.position import Executing, Position
from mpicoll.errors import CommunicationError, CommunicatorError, MismatchError, NumericsError, RankFailed, Timeout
from mpicoll.transport.base import Transport

if TYPE_CHECKING:
    from mpicoll.engine.core.communicator import Communicator

Told: TypeAlias = "dict[str, Any]"
"""Description of a rank's call that is sent to the other ranks."""

_SAME = ("allreduce", "bcast", "allgather")
"""Collectives whose results must have the same bits on all ranks."""

_PAIRS = 5
"""Maximum number of mismatched blocks that an error names."""

_ORDINARY = ("operation", "number", "communicator", "dtype", "memory", "shape", "op", "root", "counts", "algorithm")


@dataclass(frozen=True, slots=True)
class Options:
    """Enabled checks: `calls` before each collective (and messages), `numerics`: NaN and infinity in inputs and
    outputs, `checksum`: equality of the results that must be equal on all ranks. Without `calls`, `between` still
    compares some of the collectives whose ranks share no memory."""

    calls: bool = False
    numerics: bool = False
    checksum: bool = False
    between: bool = True

    @classmethod
    def of(cls, words: Sequence[str]) -> Options:
        """Return the options that `words` name."""
        asked = set(words) - {UNCHECKED}
        return cls(bool(asked), "numerics" in asked, "checksum" in asked, UNCHECKED not in words)

    def changed(self, check: bool | None, numerics: bool | None, checksum: bool | None) -> Options:
        """Return the options with the given values replaced (None: unchanged)."""
        if check is False:
            return Options(between=self.between)
        numerics = self.numerics if numerics is None else numerics
        checksum = self.checksum if checksum is None else checksum
        return Options(check or self.calls or numerics or checksum, numerics, checksum, self.between)


def agreed(transport: Transport, words: Sequence[str]) -> Options:
    """Return the union of the checks that the ranks' variables request with `words`; no default checks if one rank
    disables them. Collective."""
    if transport.size == 1:
        return Options.of(words)
    asked = transport.texts(",".join(words))
    return Options.of([word for text in asked for word in text.split(",") if word])


class Family:
    """Communicators of one rank, and the changes that :func:`mpicoll.debug` has made to their checks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._members: list[ref[Communicator]] = []
        self._changes: list[tuple[bool | None, bool | None, bool | None]] = []

    def add(self, comm: Communicator) -> None:
        """Register a new communicator."""
        with self._lock:
            self._members.append(ref(comm, self._members.remove))
        _set(comm, self._now(comm))

    def members(self) -> list[Communicator]:
        """Return the communicators that are alive and not freed, in the order of creation."""
        with self._lock:
            known = [one() for one in self._members.copy()]
        return [comm for comm in known if comm is not None and not comm.freed]

    def change(self, *what: bool | None) -> tuple[bool | None, bool | None, bool | None]:
        """Change the checks from now on."""
        check, numerics, checksum = what
        added = (check, numerics, checksum)
        self._changes.append(added)
        self._apply(wait=True)
        return added

    def restore(self, added: tuple[bool | None, bool | None, bool | None], *, wait: bool) -> None:
        """Undo a change."""
        for index in reversed(range(len(self._changes))):
            if self._changes[index] is added:
                del self._changes[index]
                break
        self._apply(wait=wait)

    def _now(self, comm: Communicator) -> Options:
        options = comm.asked
        for change in self._changes:
            options = options.changed(*change)
        return options

    def _apply(self, *, wait: bool) -> None:
        # In the same order on all ranks, since earlier operations are completed first, and may need the other ranks.
        for comm in self.members():
            if wait:
                with comm.progress.lock:
                    while comm.progress.queue:
                        comm.progress.queue.popleft().run()
                    _set(comm, self._now(comm))
            else:
                _set(comm, self._now(comm))


def _set(comm: Communicator, options: Options) -> None:
    comm.checks = options
    comm.progress.observer = Check(comm, options) if options.calls else None


family = Family()
"""Communicators of a process that is one rank."""


_COMPARING = Position("the comparison of the ranks' calls", polls=True)


class Check:
    """Observer of the collectives of one communicator."""

    sites = True
    thorough = True
    compares = True

    def __init__(self, comm: Communicator, options: Options) -> None:
        self._comm = ref(comm)
        self._transport = comm.transport
        self._options = options
        self._watch = comm.watch
        self._executing = comm.progress.executing

    def before(self, raw: Raw, function: Callable[..., Any]) -> None:
        """Compare the ranks' calls and check the inputs. Raises MismatchError or NumericsError on all ranks."""
        entry = Entry._make(raw)
        operations = getattr(function, "operations", ())
        flaw = ""
        if self._options.numerics and operations:
            from mpicoll.engine.checks.numerics_check import flaw_of_input

            flaw = next(filter(None, map(flaw_of_input, operations)), "")
        fields, apart = compared(entry, operations)
        if self._transport.size == 1:
            if flaw:
                raise _flawed(entry.group, [described(entry, fields) | {"flaw": flaw}], "before")
            return
        word = hashed(fields)
        if flaw or apart:
            # Make the words differ, even if the flaw is the same on all ranks.
            word ^= self._transport.rank + 1
        texts = self._compare(entry, word, lambda: described(entry, fields) | {"flaw": flaw})
        if texts is None:
            return
        told = [json.loads(text) for text in texts]
        error = judged(entry.group, told)
        if error is not None:
            raise error
        if any(one["flaw"] for one in told):
            raise _flawed(entry.group, told, "before")

    def after(self, raw: Raw, function: Callable[..., Any]) -> None:
        """Check the results. Raises NumericsError or MismatchError on all ranks."""
        operations = getattr(function, "operations", ())
        if not operations or not (self._options.numerics or self._options.checksum):
            return
        from mpicoll.engine.checks import numerics_check

        growing = [one for one in operations if numerics_check.may_overflow(one)] if self._options.numerics else []
        same = [one for one in operations if one.problem.collective in _SAME] if self._options.checksum else []
        if not growing and not same:
            return
        entry = Entry._make(raw)
        flaw = next(filter(None, map(numerics_check.flaw_of_result, growing)), "")
        sums = [numerics_check.checksum(one) for one in same]
        fields, _ = compared(entry, operations)

        def told() -> Told:
            return described(entry, fields) | {"flaw": flaw, "sums": sums}

        if self._transport.size == 1:
            if flaw:
                raise _flawed(entry.group, [told()], "after")
            return
        word = hashed({"sums": sums}) ^ (self._transport.rank + 1 if flaw else 0)
        texts = self._compare(entry, word, told)
        if texts is None:
            return
        everyone = [json.loads(text) for text in texts]
        if any(one["flaw"] for one in everyone):
            raise _flawed(entry.group, everyone, "after")
        raise _unequal(entry.group, everyone)

    def _compare(self, entry: Entry, word: int, told: Callable[[], Told]) -> list[str] | None:
        """Return the texts of all ranks if their words differ, otherwise None. Raises CommunicationError if not all
        ranks can enter the collective."""
        try:
            return _exchange(self._transport, self._executing, self._watch, entry, word, lambda: json.dumps(told()))
        except Timeout:
            raise  # Timeout is reported with the call anyway
        except CommunicationError as error:
            where = "" if entry.site is None else f" at {entry.site}"
            what = f"{entry.call}, collective {entry.number} of {entry.group.name},{where}"
            error.args = (f"{what}: {error}",)
            raise


def _exchange(
    transport: Transport,
    executing: Executing,
    watch: Watcher | None,
    raw: Raw | None,
    word: int,
    text: Callable[[], str],
) -> list[str] | None:
    """Return the texts of all ranks if their words differ, otherwise None. Collective; raises CommunicationError if the
    collective `raw` can never complete, RankFailed if a rank of it has died."""

    def check_wait() -> None:
        if watch is not None and raw is not None:
            watch.check(raw)
            watch.check_deaths(raw[0])

    outer, executing.executor = executing.executor, _COMPARING
    try:
        return transport.compare(word, text, check_wait)
    finally:
        executing.executor = outer


def hashed(fields: Told) -> int:
    """Return a hash of 62 bits of `fields`: equal for equal `fields`, and with high probability different otherwise."""
    return int.from_bytes(blake2b(repr(fields).encode(), digest_size=8).digest(), "big") >> 2


def compared(entry: Entry, operations: Sequence[Any] = ()) -> tuple[Told, bool]:
    """Return the fields that must be equal on all ranks, and True if there are counts that can only be compared when
    those of all ranks are known."""
    call = entry.call
    fields: Told = {"operation": _name(call, operations), "number": entry.number, "communicator": entry.group.key}
    if not call.parts:
        _add(fields, "", call)
    else:
        # A call of several parts, or one that prepares another.
        for number, part in enumerate(call.parts):
            at = f"part {number}'s " if len(call.parts) > 1 else ""
            fields[f"{at}operation"] = (
                _name(part, operations[number : number + 1]) if at else f"{fields['operation']} of {_name(part, ())}"
            )
            _add(fields, at, part)
    apart = any(one.arrivals for one in (call, *call.parts))
    return fields, apart


def _name(call: Call, operations: Sequence[Any]) -> str:
    """Return the name of the operation, independent of the API through which it is called."""
    if len(operations) == 1 and not call.parts:
        return str(operations[0].problem.collective)
    return call.name.replace("_", "") if not call.name.endswith("_init") else call.name


def _add(fields: Told, at: str, call: Call) -> None:
    if call.dtype:
        fields[f"{at}dtype"] = call.dtype
        fields[f"{at}memory"] = call.memory or "host"
    if call.shape is not None:
        # Where there are counts, they determine the number of rows.
        fields[f"{at}shape"] = ["any", *call.shape[1:]] if call.counts or call.arrivals else list(call.shape)
    elif call.nbytes:
        fields[f"{at}size"] = call.nbytes
    if call.op:
        fields[f"{at}op"] = call.op
    if call.root is not None:
        fields[f"{at}root"] = call.root
    if call.arrivals:
        fields[f"{at}counts"] = "of each rank's own"
    elif call.counts:
        fields[f"{at}counts"] = list(call.counts)
    if call.algorithm:
        fields[f"{at}algorithm"] = call.algorithm


def described(entry: Entry, fields: Told) -> Told:
    """Return the description of a call that is sent to the other ranks."""
    flows = [[list(one.counts), list(one.arrivals)] for one in (entry.call, *entry.call.parts) if one.arrivals]
    site = None if entry.site is None else str(entry.site)
    return {"text": str(entry.call), "site": site, "fields": fields, "flows": flows}


def judged(group: Group, told: Sequence[Told | None]) -> MismatchError | None:
    """Return the error for the calls of the ranks of `group` (None: unknown), the same on every rank; None if the calls
    match."""
    known = {rank: one for rank, one in enumerate(told) if one is not None}
    kinds: dict[str, list[int]] = {}
    for rank, one in known.items():
        kinds.setdefault(repr(one["fields"]), []).append(rank)
    # Largest group of ranks first; among equal ones, the group with the lowest rank.
    parties = sorted(kinds.values(), key=lambda ranks: (-len(ranks), ranks[0]))
    if len(parties) < 2:
        return _unfit(group, known)
    fields = _differing([known[ranks[0]]["fields"] for ranks in parties])
    usual, others = parties[0], parties[1:]
    calls = [f"{_ranks(ranks)} {_s('calls', ranks)} {known[ranks[0]]['text']}" for ranks in others]
    text = "; ".join(calls)
    what = f"{text} where {_ranks(usual)} {_s('calls', usual)} {known[usual[0]]['text']}; they differ in {_and(fields)}"
    ranks = tuple(rank for party in others for rank in party)
    return _mismatch(group, what, ranks, fields, told, parties)


def _differing(fields: Sequence[Told]) -> list[str]:
    """Return the names of the fields that differ between ranks; for different operations, only fields that all of them
    have."""
    first = fields[0]
    names = [name for one in fields for name in one]
    missing = object()
    found = [
        name
        for name in dict.fromkeys(names)
        if any(one.get(name, missing) != first.get(name, missing) for one in fields)
    ]
    if "operation" in found:
        found = [name for name in found if all(name in one for one in fields)]
    if len(found) > 1:
        # The algorithm is chosen by the other arguments.
        found = [name for name in found if not name.endswith("algorithm")]
    return [{"number": "the number of the collective"}.get(name, name) for name in found]


def _unfit(group: Group, known: dict[int, Told]) -> MismatchError | None:
    """Return the error for blocks that differ from what their receivers expect; None if all blocks match."""
    wrong: list[tuple[int, int, str]] = []
    flows = [one["flows"] for one in known.values()]
    for place in range(len(flows[0]) if flows else 0):
        for source, one in known.items():
            for dest, other in known.items():
                leave, arrive = one["flows"][place][0][dest], other["flows"][place][1][source]
                if leave != arrive:
                    text = (
                        f"rank {source} sends {leave} {_s('row', [0] * leave)} to rank {dest}, which expects {arrive}"
                    )
                    wrong.append((source, dest, text))
    if not wrong:
        return None
    more = [f"and {len(wrong) - _PAIRS} more"] if len(wrong) > _PAIRS else []
    what = f"{'; '.join([text for *_, text in wrong[:_PAIRS]] + more)}; they differ in counts"
    ranks = tuple(sorted({rank for source, dest, _ in wrong for rank in (source, dest)}))
    told = [known.get(rank) for rank in range(len(group.members))]
    return _mismatch(group, f"in what {known[0]['text'].partition('(')[0]} moves: {what}", ranks, ["counts"], told, [])


def _mismatch(
    group: Group,
    what: str,
    ranks: tuple[int, ...],
    fields: Sequence[str],
    told: Sequence[Told | None],
    parties: Sequence[Sequence[int]],
) -> MismatchError:
    known = {rank: one for rank, one in enumerate(told) if one is not None}
    numbers = [one["fields"]["number"] for one in known.values()]
    number = max(set(numbers), key=lambda one: (numbers.count(one), -one))
    lines = [f"the ranks of {group.name} disagree about collective {number}: {what}{_outside(group, ranks)}"]
    for party in parties or [[rank] for rank in known]:
        lines.append(f"  {_ranks(party)}: {known[party[0]]['text']}")
        lines += _sites({rank: known[rank]["site"] for rank in party})
    unknown = [rank for rank in range(len(told)) if rank not in known]
    if unknown:
        lines.append(f"  {_ranks(unknown)}: not known")
    calls = tuple(None if one is None else {**one["fields"], "text": one["text"], "site": one["site"]} for one in told)
    return MismatchError("\n".join(lines), ranks, tuple(fields), calls, number)


def _flawed(group: Group, told: Sequence[Told], when: str) -> NumericsError:
    wrong = {rank: one for rank, one in enumerate(told) if one["flaw"]}
    first = next(iter(wrong.values()))
    number = first["fields"]["number"]
    went, way = ("passes", "to") if when == "before" else ("gets", "from")
    kinds: dict[tuple[str, str], list[int]] = {}
    for rank, one in wrong.items():
        kinds.setdefault((one["flaw"], one["text"]), []).append(rank)
    texts = [f"{_ranks(ranks)} {_s(went, ranks)} {flaw}, {way} {text}" for (flaw, text), ranks in kinds.items()]
    because = "" if when == "before" else ", though all operands are finite: the result overflows"
    outside = _outside(group, tuple(wrong))
    lines = [f"NaN or infinity in collective {number} of {group.name}: {'; '.join(texts)}{because}{outside}"]
    lines += _sites({rank: one["site"] for rank, one in wrong.items()}, "  ")
    return NumericsError("\n".join(lines), tuple(wrong))


def _unequal(group: Group, told: Sequence[Told]) -> MismatchError:
    kinds: dict[str, list[int]] = {}
    for rank, one in enumerate(told):
        kinds.setdefault(repr(one["sums"]), []).append(rank)
    parties = sorted(kinds.values(), key=lambda ranks: (-len(ranks), ranks[0]))
    others = tuple(rank for party in parties[1:] for rank in party)
    sums = ", ".join(f"{_ranks(party)}: {_hex(told[party[0]]['sums'])}" for party in parties)
    what = (
        f"{_ranks(others)} {_s('gets', others)} another result of {told[0]['text']} than {_ranks(parties[0])}, though"
        f" it must have the same bits on all ranks (checksums: {sums})"
    )
    return _mismatch(group, what, others, ["result"], told, parties)


def _hex(sums: Sequence[int]) -> str:
    return " ".join(f"{one:08x}" for one in sums)


def _sites(sites: dict[int, str | None], indent: str = "    ") -> list[str]:
    """Return lines with the call sites of the ranks."""
    places: dict[str, list[int]] = {}
    for rank, site in sites.items():
        if site is not None:
            places.setdefault(site, []).append(rank)
    return [f"{indent}{_ranks(ranks)} at {site}" for site, ranks in places.items()]


def _ranks(ranks: Sequence[int]) -> str:
    return f"{_s('rank', ranks)} {', '.join(map(str, ranks))}"


def _s(word: str, many: Sequence[Any]) -> str:
    """Return the noun or the verb `word` in the number that `many` requires."""
    if word in ("calls", "gets", "passes"):
        return word if len(many) == 1 else word.removesuffix("es" if word == "passes" else "s")
    return word if len(many) == 1 else f"{word}s"


def _and(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def _outside(group: Group, ranks: Sequence[int]) -> str:
    """Return a text with the ranks of the job that correspond to `ranks` of a subgroup."""
    if group.members == tuple(range(len(group.members))):
        return ""
    named = ", ".join(f"{rank} is {group.members[rank]}" for rank in ranks)
    return f" (as ranks of the job, {named})"


# By default only signatures are compared. What follows describes the calls whose signatures differ.

TEXT = 1000
"""Maximum size in bytes of the description of a rank's call."""


def brief(raw: Raw | None, *, runs: bool = True) -> str:
    """Return a description of this rank's call, in at most TEXT bytes. The call site is determined only while the call
    `runs`."""
    if raw is None:
        return ""
    entry = Entry._make(raw)
    if entry.site is None and runs:
        entry = entry._replace(site=_foreground_site())
    fields, _ = compared(entry)
    fields.pop("communicator")
    full = described(entry, fields)
    for shorter in _shorter(full):
        text = json.dumps(shorter, separators=(",", ":"), ensure_ascii=False)
        if len(text.encode()) <= TEXT:
            return text
    return ""


def rows_error(
    transport: Transport, executing: Executing, watch: Watcher | None, raw: Raw | None
) -> CommunicationError:
    """Return the error for the collective `raw`, whose blocks differ from what their receivers expect. Collective."""
    assert raw is not None  # the collective that has just begun
    entry = Entry._make(raw)
    if entry.site is None:
        entry = entry._replace(site=_foreground_site())
    fields, _ = compared(entry)
    # Words that differ make the transport exchange the texts.
    word = transport.rank + 1
    texts = _exchange(transport, executing, watch, raw, word, lambda: json.dumps(described(entry, fields)))
    error = None if texts is None else judged(entry.group, [json.loads(text) for text in texts])
    return error or CommunicationError(f"{entry.call} on {entry.group.name}: ranks expect other counts than are sent")


def from_texts(group: Group, texts: Sequence[str]) -> MismatchError | None:
    """Return the error for the texts of :func:`brief` of the ranks of `group`; None if all calls match."""
    told: list[Told | None] = [json.loads(text) if text else None for text in texts]
    for one in told:
        if one is not None:
            one["flows"] = []  # a signature does not cover rows that have to match
    return judged(group, told)


def _shorter(told: Told) -> Iterator[Told]:
    yield told
    fields = {
        name: value if len(str(value)) < 40 else f"{hashed({'': value}):x}" for name, value in told["fields"].items()
    }
    told = told | {"flows": [], "fields": fields}
    yield told
    told["text"] = _cut(told["text"], 200)
    yield told
    told["site"] = told["site"] and f"…{told['site'][-100:]}"
    yield told


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[:length]}…"


def _foreground_site() -> Site | None:
    """Return the call site of this thread; None on a worker thread, which has no call site."""
    if threading.current_thread().name.startswith("mpicoll-") and not threading.current_thread().name.startswith(
        "mpicoll-rank-"
    ):
        return None
    return call_site()


EACH = 64
"""Number of first collectives of a communicator that are compared one by one, and batch size for later ones."""


class Queue(Protocol):
    """Queue of a communicator, as :class:`Between` needs it."""

    group: Group
    current: Raw | None
    executing: Executing
    match: Callable[[Call], None]


class Watcher(Protocol):
    """Detector of operations that can never complete, and of ranks that have died."""

    def check(self, raw: Raw | None) -> None:
        """Raise CommunicationError if the operation can never complete."""

    def check_deaths(self, group: Group) -> None:
        """Raise RankFailed if a rank of `group` has died."""


class Between:
    """Comparison, at low cost, of the collectives of one communicator whose ranks share no memory.

    Each of the first EACH collectives is compared before it begins. Most programs repeat the same calls after these, so
    later collectives are compared only before every EACH-th one, together with all since the last comparison.
    Collectives after the last comparison are never compared.
    """

    __slots__ = ("_begun", "_entries", "_progress", "_signatures", "_transport", "_watch")

    def __init__(self, transport: Transport, progress: Queue, watch: Watcher | None) -> None:
        self._transport = transport
        self._progress = progress
        self._watch = watch
        self._begun = 0
        # Collectives since the last comparison.
        self._signatures: list[int] = []
        self._entries: list[Raw | None] = []

    def match(self, call: Call) -> None:
        """Begin a collective. Raises MismatchError on all ranks if the ranks have called different collectives: if the
        mismatch is found in the collective that begins, the communicator stays usable; if it is found in an earlier
        one, all later collectives raise CommunicatorError."""
        self._begun = begun = self._begun + 1
        signature = call.signature
        self._signatures.append(signature if signature > 0 else call.sign())
        self._entries.append(self._progress.current)
        if begun <= EACH or begun % EACH == 0:
            self._compare()

    def _compare(self) -> None:
        progress, signatures, entries = self._progress, self._signatures, self._entries
        self._signatures, self._entries = [], []
        last = len(entries) - 1

        def described() -> str:
            briefs = [brief(entry, runs=at == last) for at, entry in enumerate(entries)]
            return json.dumps([*zip(signatures, briefs, strict=True)])

        word = crc32(array("I", signatures))
        try:
            texts = _exchange(self._transport, progress.executing, self._watch, entries[last], word, described)
        except RankFailed:
            raise  # the transport already refuses further operations on this communicator
        except BaseException:
            self._refuse("an operation was given up, and the ranks are out of step since")
            raise
        if texts is None:
            return
        told = [json.loads(text) for text in texts]
        at = next(at for at in range(last + 1) if len({one[at][0] for one in told}) > 1)
        found: CommunicationError | None = from_texts(progress.group, [one[at][1] for one in told])
        if found is None:
            found = CommunicationError(
                f"rank {self._transport.rank} of {self._transport.size}: another rank has called another collective, or"
                " one of another size, dtype, op, root or algorithm"
            )
        if at < last:
            self._refuse("the ranks have called different collectives, as MismatchError said")
            later = f"{last - at} collective{'s' if last - at > 1 else ''} later"
            found.args = (f"{found}\n  (found {later}: its results and those since then may be wrong)",)
        raise found

    def _refuse(self, why: str) -> None:
        """Make all later collectives raise CommunicatorError."""
        name = self._progress.group.name

        def match(call: Call) -> None:
            raise CommunicatorError(f"{call} on {name}: {why}; make another communicator, by duplicate()")

        self._progress.match = match
