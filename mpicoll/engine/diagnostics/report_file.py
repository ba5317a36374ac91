"""The report: a readable text, and JSON that can be loaded again."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

from mpicoll import atomic_files
from mpicoll.engine.diagnostics.analysis import Analysis, analyse, describe_rank
from mpicoll.engine.diagnostics.call_facts import State, at_site
from mpicoll.errors import ArgumentError

_T = TypeVar("_T")


def write(
    folder: Path, job: str, why: str, states: Mapping[int, State | None], analysis: Analysis
) -> tuple[Path, Path]:
    """Write the report to `folder`, which is created if necessary: as text, and as JSON for :func:`summarize`.

    Another report of the same `job` gets a number; no file is overwritten. Each of the two files appears completely
    or not at all. Returns the paths of the text and of the JSON.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = "mpicoll-report-" + (re.sub(r"[^\w.-]+", "_", job) or "job")
    content = {
        "format": _FORMAT,
        "job": job,
        "why": why,
        "time": time.time(),
        "size": 1 + max(states, default=-1),
        "states": {str(rank): state for rank, state in sorted(states.items())},
        "analysis": asdict(analysis),
    }
    text, data = format_report(why, states, analysis), json.dumps(content)
    for number in itertools.count(1):
        stem = folder / (name if number == 1 else f"{name}-{number}")
        paths = stem.with_name(f"{stem.name}.txt"), stem.with_name(f"{stem.name}.json")
        if not paths[0].exists() and atomic_files.create(paths[1], data):
            atomic_files.create(paths[0], text)
            return paths
    raise AssertionError


_FORMAT = "mpicoll report 1"


def format_report(why: str, states: Mapping[int, State | None], analysis: Analysis) -> str:
    """Return the readable report: the analysis, then each rank."""
    lines = [*analysis.words, "", f"Reason: {why}"]
    # Launchers don't pass the batch system's variables to all hosts.
    batch = {str((state or {}).get("process", {}).get("batch", "")) for state in states.values()} - {""}
    lines += [f"Batch system: {', '.join(sorted(batch))}"] if batch else []
    lines.append(f"Written {datetime.now(timezone.utc):%Y-%m-%d %H:%M:%S} UTC")
    for rank, state in sorted(states.items()):
        lines += ["", *_rank_lines(rank, state)]
        for thread in (state or {}).get("threads", []):
            lines += ["", f"  Thread {thread['name']} (most recent call first):"]
            lines += [f"    {line}" for one in thread["stack"] for line in one.split("\n")]
        past = (state or {}).get("past", [])
        if past:
            lines += ["", f"  Last {len(past)} operations, the last one first:"]
            lines += [f"    {_past_line(one)}" for one in reversed(past)]
    return "\n".join(lines) + "\n"


def _rank_lines(rank: int, state: State | None) -> list[str]:
    """Return a description of a rank in a few lines."""
    if state is None:
        return [f"Rank {rank}: no response"]
    if state.keys() & {"left", "died", "unreached"}:
        return [f"Rank {rank}: {describe_rank(state, '')}"]
    process = state.get("process", {})
    versions = ", ".join(f"{name} {version}" for name, version in process.get("versions", {}).items())
    lines = [f"Rank {rank}: pid {process.get('pid')} on {process.get('host')} ({versions})"]
    for one in state.get("pending", []):
        number = f" number {one['number']}" if one["number"] else ""
        where = one.get("where", "")
        lines.append(
            f"  in {one['call']['text']}{number} on {one['group']} for {one['seconds']:.3g} s{at_site(one['site'])}"
            f" [{one['thread']}]{f'; {where}' if where else ''}"
        )
    if not any(one["program"] for one in state.get("pending", [])):
        lines.append(f"  {describe_rank(state | {'pending': []}, '')}")
    lines += [
        f"  {one['name']}: {one['number']} collectives begun{', one runs' if one['running'] else ''}"
        + (f", {one['queued']} queued" if one["queued"] else "")
        for one in state.get("queues", [])
        if one["number"] or one["queued"]
    ]
    lines += [f"  could not be determined: {failure}" for failure in state.get("failed", [])]
    return lines


def _past_line(one: State) -> str:
    number = f" number {one['number']}" if one["number"] else ""
    took = "" if one["seconds"] is None else f" in {one['seconds'] * 1e3:.3g} ms"
    error = f": {one['error']}" if one["error"] else ""
    return f"{one['call']}{number} on {one['group']}: {one['state']}{took}{at_site(one['site'])}{error}"


def summarize(path: Path) -> str:
    """Return the readable summary of a report, from its JSON. Raises ArgumentError if it is not an mpicoll report."""
    return _read(path, _summarize)


def read_analysis(path: Path) -> dict[str, Any]:
    """Return the analysis of a report, made again from its JSON: the sentences about it under "words", and the facts of
    which they are made. Raises ArgumentError if it is not an mpicoll report."""
    return _read(path, _analyse)


def _read(path: Path, evaluate: Callable[[dict[str, Any]], _T]) -> _T:
    try:
        content = json.loads(Path(path).read_bytes())
        if content["format"] == _FORMAT:
            return evaluate(content)
    except _MALFORMED as error:
        raise ArgumentError(f"{path} is not an mpicoll report: {type(error).__name__}: {error}") from error
    raise ArgumentError(f"{path} is a report in a format that this version can't read: {content['format']!r}")


_MALFORMED = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""Exceptions for content that is not that of a report."""


def _read_states(content: dict[str, Any]) -> dict[int, State | None]:
    states = {int(rank): state for rank, state in content["states"].items()}
    if content["size"] != len(states) or sorted(states) != list(range(len(states))):
        raise ValueError("it does not have the state of each rank")
    return states


def _analyse(content: dict[str, Any]) -> dict[str, Any]:
    states = _read_states(content)
    about = {name: content[name] for name in ("job", "why", "time", "size")}
    return about | asdict(analyse(states, len(states)))


def _summarize(content: dict[str, Any]) -> str:
    states = _read_states(content)
    analysis = analyse(states, len(states))
    when = f"{datetime.fromtimestamp(content['time'], timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
    lines = [*analysis.words, "", f"Job {content['job']}, {when}: {content['why']}", ""]
    for rank, state in sorted(states.items()):
        lines += _rank_lines(rank, state)
    return _printable("\n".join(lines) + "\n")


def _printable(text: str) -> str:
    """Return `text` with escapes for characters that a terminal may take for commands, or that can't be encoded."""
    return "".join(one if one.isprintable() or one == "\n" else repr(one)[1:-1] for one in text)
