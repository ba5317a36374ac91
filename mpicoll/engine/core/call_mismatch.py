"""Descriptions of the ranks' calls, and the errors for calls that do not match."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from mpicoll.engine.diagnostics.flight_recorder import Call, Entry, EntryTuple, Group, find_call_site
from mpicoll.errors import MismatchError, NumericsError
from mpicoll.transport.hashes import blake2b
from mpicoll.wording import count, join_and, rank_list, ranks_and_verb, shorten

Description: TypeAlias = "dict[str, Any]"
"""Description of a rank's call that is sent to the other ranks."""

MAX_TEXT = 1000
"""Maximum size in bytes of a description that :func:`encode_call` returns."""

_NO_GROUP = Group("", "", (), 0, 0.0)
"""Group of calls whose descriptions do not depend on it."""

_MAX_BLOCKS = 5
"""Maximum number of mismatched blocks that an error names."""


def compared_fields(entry: Entry, operations: Sequence[Any] = ()) -> tuple[Description, bool]:
    """Return the fields that must be equal on all ranks, and True if there are counts that can only be compared when
    those of all ranks are known."""
    call = entry.call
    fields: Description = {
        "operation": _operation_name(call, operations),
        "number": entry.number,
        "communicator": entry.group.key,
    }
    if not call.parts:
        _add_arguments(fields, "", call)
    else:
        # A call of several parts, or one that prepares another.
        for number, part in enumerate(call.parts):
            prefix = f"part {number}'s " if len(call.parts) > 1 else ""
            fields[f"{prefix}operation"] = (
                _operation_name(part, operations[number : number + 1])
                if prefix
                else f"{fields['operation']} of {_operation_name(part, ())}"
            )
            _add_arguments(fields, prefix, part)
    return fields, any(one.arrivals for one in (call, *call.parts))


def _operation_name(call: Call, operations: Sequence[Any]) -> str:
    """Return the name of the operation, independent of the API through which it is called."""
    if len(operations) == 1 and not call.parts:
        return str(operations[0].query.collective)
    return call.name.replace("_", "") if not call.name.endswith("_init") else call.name


def _add_arguments(fields: Description, prefix: str, call: Call) -> None:
    if call.dtype:
        fields[f"{prefix}dtype"] = call.dtype
        fields[f"{prefix}memory"] = call.memory or "host"
    if call.shape is not None:
        # Where there are counts, they determine the number of rows.
        fields[f"{prefix}shape"] = ["any", *call.shape[1:]] if call.counts or call.arrivals else list(call.shape)
    elif call.nbytes:
        fields[f"{prefix}size"] = call.nbytes
    if call.op:
        fields[f"{prefix}op"] = call.op
    if call.compression:
        fields[f"{prefix}compression"] = call.compression
    if call.root is not None:
        fields[f"{prefix}root"] = call.root
    if call.arrivals:
        fields[f"{prefix}counts"] = "of each rank's own"
    elif call.counts:
        fields[f"{prefix}counts"] = list(call.counts)
    if call.algorithm:
        fields[f"{prefix}algorithm"] = call.algorithm


def hash_fields(fields: Description) -> int:
    """Return a hash of 62 bits of `fields`: equal for equal `fields`, and with high probability different otherwise."""
    return int.from_bytes(blake2b(repr(fields).encode(), digest_size=8).digest(), "big") >> 2


def describe_call(entry: Entry, fields: Description) -> Description:
    """Return the description of a call that is sent to the other ranks."""
    flows = [[list(one.counts), list(one.arrivals)] for one in (entry.call, *entry.call.parts) if one.arrivals]
    site = None if entry.site is None else str(entry.site)
    return {"text": str(entry.call), "site": site, "fields": fields, "flows": flows}


def encode_call(raw: EntryTuple | None, *, runs: bool = True) -> str:
    """Return a description of this rank's call as text of at most MAX_TEXT bytes, empty if there is no call. The call
    site is determined only while the call `runs`."""
    if raw is None:
        return ""
    entry = locate_call(raw) if runs else Entry._make(raw)
    fields, _ = compared_fields(entry)
    fields.pop("communicator")
    for shorter in _shorten(describe_call(entry, fields)):
        text = json.dumps(shorter, separators=(",", ":"), ensure_ascii=False)
        if len(text.encode()) <= MAX_TEXT:
            return text
    return ""


def encode_repeated_call(call: Call) -> str:
    """Return a description of a call that this rank will repeat, without its number and its call site; see
    :func:`encode_call` and :func:`number_description`."""
    return encode_call((_NO_GROUP, 0, call, 0.0, None), runs=False)


def number_description(text: str, number: int) -> str:
    """Return the description of a repeated call as that of collective `number`."""
    if not text:
        return ""
    description = json.loads(text)
    description["fields"]["number"] = number
    return json.dumps(description)


def _shorten(description: Description) -> Iterator[Description]:
    """Yield `description`, then shorter and shorter versions of it."""
    yield description
    fields = {
        name: value if len(str(value)) < 40 else f"{hash_fields({'': value}):x}"
        for name, value in description["fields"].items()
    }
    description = description | {"flows": [], "fields": fields}
    yield description
    description["text"] = _truncate(description["text"], 200)
    yield description
    description["site"] = description["site"] and f"…{description['site'][-100:]}"
    yield description


def _truncate(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[:length]}…"


def locate_call(raw: EntryTuple) -> Entry:
    """Return the entry of the running call, with the call site on this thread if none was recorded."""
    entry = Entry._make(raw)
    thread = threading.current_thread().name
    if entry.site is not None or (thread.startswith("mpicoll-") and not thread.startswith("mpicoll-rank-")):
        return entry  # a worker thread has no call site
    return entry._replace(site=find_call_site())


def decode_mismatch_error(group: Group, texts: Sequence[str]) -> MismatchError | None:
    """Return the error for the texts of :func:`encode_call` of the ranks of `group`; None if all calls match."""
    descriptions: list[Description | None] = [json.loads(text) if text else None for text in texts]
    for one in descriptions:
        if one is not None:
            one["flows"] = []  # a signature does not cover rows that have to match
    return mismatch_error(group, descriptions)


def mismatch_error(group: Group, descriptions: Sequence[Description | None]) -> MismatchError | None:
    """Return the error for the calls of the ranks of `group` (None: unknown), the same on every rank; None if the calls
    match."""
    known = {rank: one for rank, one in enumerate(descriptions) if one is not None}
    alike = _group_ranks((rank, repr(one["fields"])) for rank, one in known.items())
    if len(alike) < 2:
        return _row_mismatch_error(group, known)
    fields = _differing_fields([known[ranks[0]]["fields"] for ranks in alike])
    most, *others = alike
    calls = [f"{ranks_and_verb(ranks, 'calls', 'call')} {known[ranks[0]]['text']}" for ranks in others]
    usual = f"{ranks_and_verb(most, 'calls', 'call')} {known[most[0]]['text']}"
    what = f"{'; '.join(calls)} where {usual}; they differ in {join_and(fields)}"
    return _make_error(group, what, tuple(rank for ranks in others for rank in ranks), fields, descriptions, alike)


def _group_ranks(values: Iterable[tuple[int, str]]) -> list[list[int]]:
    """Return the ranks with equal values: the largest group first, among groups of one size the one with the lowest
    rank."""
    kinds: dict[str, list[int]] = {}
    for rank, value in values:
        kinds.setdefault(value, []).append(rank)
    return sorted(kinds.values(), key=lambda ranks: (-len(ranks), ranks[0]))


def _differing_fields(fields: Sequence[Description]) -> list[str]:
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


def _row_mismatch_error(group: Group, known: dict[int, Description]) -> MismatchError | None:
    """Return the error for blocks that differ from what their receivers expect; None if all blocks match."""
    wrong: list[tuple[int, int, str]] = []
    flows = [one["flows"] for one in known.values()]
    for part in range(len(flows[0]) if flows else 0):
        for source, one in known.items():
            for dest, other in known.items():
                sent, expected = one["flows"][part][0][dest], other["flows"][part][1][source]
                if sent != expected:
                    text = f"rank {source} sends {count(sent, 'row')} to rank {dest}, which expects {expected}"
                    wrong.append((source, dest, text))
    if not wrong:
        return None
    name = known[0]["text"].partition("(")[0]
    what = (
        f"blocks of {name}: {'; '.join(shorten([text for *_, text in wrong], most=_MAX_BLOCKS))}; they differ in counts"
    )
    ranks = tuple(sorted({rank for source, dest, _ in wrong for rank in (source, dest)}))
    descriptions = [known.get(rank) for rank in range(len(group.members))]
    return _make_error(group, what, ranks, ["counts"], descriptions, [[rank] for rank in known])


def unequal_results_error(group: Group, descriptions: Sequence[Description]) -> MismatchError:
    """Return the error for results whose bits differ between ranks, the same on every rank."""
    alike = _group_ranks((rank, repr(one["sums"])) for rank, one in enumerate(descriptions))
    others = tuple(rank for ranks in alike[1:] for rank in ranks)
    sums = ", ".join(
        f"{rank_list(ranks)}: {' '.join(f'{one:08x}' for one in descriptions[ranks[0]]['sums'])}" for ranks in alike
    )
    what = (
        f"{ranks_and_verb(others, 'gets', 'get')} another result of {descriptions[0]['text']} than"
        f" {rank_list(alike[0])}, though it must have the same bits on all ranks (checksums: {sums})"
    )
    return _make_error(group, what, others, ["result"], descriptions, alike)


def _make_error(
    group: Group,
    what: str,
    ranks: tuple[int, ...],
    fields: Sequence[str],
    descriptions: Sequence[Description | None],
    alike: Sequence[Sequence[int]],
) -> MismatchError:
    """Return the error `what` for `ranks`, with one line for each of the groups of ranks whose calls are `alike`."""
    known = {rank: one for rank, one in enumerate(descriptions) if one is not None}
    numbers = [one["fields"]["number"] for one in known.values()]
    number = max(set(numbers), key=lambda one: (numbers.count(one), -one))
    lines = [f"the ranks of {group.name} disagree about collective {number}: {what}{_ranks_of_job(group, ranks)}"]
    for some in alike:
        lines.append(f"  {rank_list(some)}: {known[some[0]]['text']}")
        lines += _site_lines({rank: known[rank]["site"] for rank in some})
    unknown = [rank for rank in range(len(descriptions)) if rank not in known]
    if unknown:
        lines.append(f"  {rank_list(unknown)}: not known")
    calls = tuple(
        None if one is None else {**one["fields"], "text": one["text"], "site": one["site"]} for one in descriptions
    )
    return MismatchError("\n".join(lines), ranks, tuple(fields), calls, number)


def nonfinite_error(group: Group, descriptions: Sequence[Description], *, inputs: bool) -> NumericsError:
    """Return the error for values that are not finite, in the `inputs` or the results of the calls, the same on every
    rank."""
    wrong = {rank: one for rank, one in enumerate(descriptions) if one["nonfinite"]}
    number = next(iter(wrong.values()))["fields"]["number"]
    verb, way = (("passes", "pass"), "to") if inputs else (("gets", "get"), "from")
    kinds: dict[tuple[str, str], list[int]] = {}
    for rank, description in wrong.items():
        kinds.setdefault((description["nonfinite"], description["text"]), []).append(rank)
    texts = [f"{ranks_and_verb(ranks, *verb)} {values}, {way} {text}" for (values, text), ranks in kinds.items()]
    cause = "" if inputs else ", though all operands are finite: the result overflows"
    outside = _ranks_of_job(group, tuple(wrong))
    lines = [f"NaN or infinity in collective {number} of {group.name}: {'; '.join(texts)}{cause}{outside}"]
    lines += _site_lines({rank: description["site"] for rank, description in wrong.items()}, "  ")
    return NumericsError("\n".join(lines), tuple(wrong))


def _site_lines(sites: dict[int, str | None], indent: str = "    ") -> list[str]:
    """Return lines with the call sites of the ranks."""
    at: dict[str, list[int]] = {}
    for rank, site in sites.items():
        if site is not None:
            at.setdefault(site, []).append(rank)
    return [f"{indent}{rank_list(ranks)} at {site}" for site, ranks in at.items()]


def _ranks_of_job(group: Group, ranks: Sequence[int]) -> str:
    """Return a text with the ranks of the job that correspond to `ranks` of a subgroup."""
    if group.members == tuple(range(len(group.members))):
        return ""
    named = ", ".join(f"{rank} is {group.members[rank]}" for rank in ranks)
    return f" (as ranks of the job, {named})"
