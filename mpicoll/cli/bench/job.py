"""Main function of each rank of a benchmark, from its settings to the report."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import mpicoll
from mpicoll.cli import formatting
from mpicoll.cli.bench import device_arrays, messages, peers, report
from mpicoll.cli.bench.cases import (
    COLLECTIVES,
    DTYPES,
    MESSAGES,
    OPS,
    REDUCTIONS,
    RING_CASES,
    ArrayKind,
    Workload,
)
from mpicoll.cli.bench.measure import Point, Wrong, measure
from mpicoll.cli.bench.overlap import Overlap, overlap
from mpicoll.cli.bench.peers import Contestant
from mpicoll.cli.bench.team import Team
from mpicoll.engine.core.communicator import Communicator
from mpicoll.engine.selection.catalogue import DEVICE, algorithms_of, canonical_name, resolve_name
from mpicoll.engine.world import world
from mpicoll.errors import AlgorithmError, ArgumentError, SetupError
from mpicoll.wording import count

PEERS = ("mpi4py", "gloo", "nccl", "copy")

_WAYS = ("ipc", "nccl", "shm_flat", "shm_pipelined", "ring")
"""Default candidates on a device: one for each path that device memory can take."""

_CASES = {"messages": ("message", MESSAGES)}
"""Noun and names of what a kind of bench measures, where these are no collectives."""

_SMALL = ("allreduce", "reduce", "bcast", "allgather", "reduce_scatter", "alltoall", "barrier")
"""Default collectives of `bench overhead`."""


@dataclass(slots=True)
class Settings:
    """The validated settings. `array` is the library of the arrays on a device, None for arrays on the host.
    `command`, `progress` and `width` describe the command line and the terminal of the process that parsed them."""

    kind: str
    collectives: tuple[str, ...]
    sizes: tuple[int, ...]
    against: tuple[str, ...]
    algorithms: tuple[str, ...]
    dtype: str
    op: str
    like: ArrayKind
    plan: bool
    registered: bool
    rewrite: bool
    compute: str
    computing: int | None
    seconds: float
    blocks: int | None
    ranks: int | None
    limit: float
    json: str | Path | None
    plot: Path | None
    draw: str
    array: device_arrays.LibraryName | None = None
    command: str = ""
    progress: bool = False
    width: int = 0


def parse_settings(given: dict[str, Any]) -> Settings:
    """Return the settings for the arguments `given`.

    Raises ArgumentError, AlgorithmError or DTypeError for arguments that cannot be measured, SetupError if an output
    is requested whose library is not installed.
    """
    kind = given["kind"]
    defaults = {"sweep": ("allreduce",), "messages": (), "overlap": ("allreduce",), "overhead": _SMALL}[kind]
    collectives = COLLECTIVES if given["collectives"] == ["all"] else tuple(given["collectives"]) or defaults
    noun, cases = _CASES.get(kind, ("collective", (*COLLECTIVES, *RING_CASES)))
    _check_known(noun, collectives, cases)
    _check_known("dtype", [given["dtype"]], DTYPES)
    _check_known("op", [given["op"]], OPS)
    array = device_arrays.select_library("bench", given["device"], given["array"], (given["dtype"],))
    for name in sorted(set(collectives) & set(RING_CASES)):
        if kind != "sweep" or array is not None:
            raise ArgumentError(
                f"bench: {name} is measured on the host, and not by bench overhead or overlap; leave it out"
            )
    for option in ("like", "registered", "rewrite") if array is not None else ():
        if given[option] is not None:
            raise ArgumentError(f"bench: --{option} is for arrays on the host; leave it out, or --device cuda")
    against = _parse_peers(given["against"], array) if kind != "messages" else _parse_message_peers(given["against"])
    for collective in set(collectives) & set(REDUCTIONS):
        dtype = "float16" if given["dtype"] == "bfloat16" else given["dtype"]
        mpicoll.explain(collective, 8, op=given["op"], dtype=dtype)
    if kind == "overlap":
        _can_overlap(collectives, given["like"])
    with_torch = {"gloo", "nccl"} & set(against) or "torch" in (given["like"], array) or kind == "overhead"
    with_torch = with_torch or bool(set(messages.OF_TORCH) & set(collectives))
    if with_torch and find_spec("torch") is None:
        raise SetupError("bench: gloo, nccl, tensors and bench overhead need torch, which is not installed")
    if given["plot"] is not None:
        formatting.require_matplotlib()
        formatting.check_writable("--plot", given["plot"])
        if given["plot"].suffix not in (".png", ".svg", ".pdf"):
            raise ArgumentError(f"--plot {given['plot']}: must end in .png, .svg or .pdf")
    if given["np"] is not None and given["np"] < 1:
        raise ArgumentError(f"-np must be at least 1, got {given['np']}")
    return Settings(
        kind=kind,
        collectives=collectives,
        sizes=tuple(given["sizes"]),
        against=against,
        algorithms=_algorithms(given["algorithms"], collectives, array),
        dtype=given["dtype"],
        op=given["op"],
        like=given["like"] or "numpy",
        plan=bool(given["plan"]),
        registered=bool(given["registered"]),
        rewrite=bool(given["rewrite"]),
        compute=given["compute"] or "numpy",
        computing=given["computing"],
        seconds=given["seconds"],
        blocks=given["blocks"],
        ranks=given["np"],
        limit=given["limit"],
        json=given["json"],
        plot=given["plot"],
        draw=given["draw"] or "time",
        array=array,
    )


def _parse_peers(text: str | None, array: device_arrays.LibraryName | None) -> tuple[str, ...]:
    names = text or {None: "mpi4py", "torch": "gloo,nccl,copy", "cupy": "copy"}[array]
    against = () if names == "none" else tuple(names.split(","))
    _check_known("peer", against, PEERS)
    if array is not None and "mpi4py" in against:
        raise ArgumentError(
            "bench: --against mpi4py is for arrays on the host; most MPI libraries end the process when they meet"
            " memory of a device"
        )
    if array == "cupy" and {"gloo", "nccl"} & set(against):
        raise ArgumentError("bench: gloo and nccl work on tensors; add --array torch, or leave them out")
    return against


def _parse_message_peers(text: str | None) -> tuple[str, ...]:
    default = messages.PEERS if find_spec("torch") is not None else messages.PEERS[:1]
    against = default if text is None else () if text == "none" else tuple(text.split(","))
    _check_known("peer of messages", against, messages.PEERS)
    return against


def _check_known(what: str, names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise ArgumentError(f"bench: no {what} {name!r}; there are {', '.join(known)}")


def _can_overlap(collectives: Sequence[str], like: str | None) -> None:
    if "barrier" in collectives:
        raise ArgumentError("bench overlap: a barrier has nothing to hide; leave it out")
    if like == "torch" and {"scan", "exscan"} & set(collectives):
        raise ArgumentError("bench overlap: torch.distributed has no scan and no exscan; leave --like torch out")


def _algorithms(
    text: str | None, collectives: Sequence[str], array: device_arrays.LibraryName | None
) -> tuple[str, ...]:
    known = [one for one in collectives if one not in RING_CASES]
    if not text:
        return tuple(map(canonical_name, _WAYS)) if array is not None else ()
    if text != "all":
        asked = tuple(map(canonical_name, text.split(",")))
        for name in asked:
            _check_algorithm(name, known)
        return asked
    names = dict.fromkeys(name for one in known for name in algorithms_of(one))
    return tuple(name for name in names if array is not None or name not in DEVICE)


def _check_algorithm(name: str, collectives: Sequence[str]) -> None:
    """Raise ArgumentError if none of the collectives has the algorithm; one suffices, for others it is left out."""
    reasons = []
    for collective in collectives:
        try:
            resolve_name(collective, name)
        except AlgorithmError as error:
            reasons.append(str(error))
        else:
            return
    reason = reasons[0] if reasons else "none of what is measured has algorithms; leave it out"
    others = f"; nor can it serve {', '.join(collectives[1:])}" if len(reasons) > 1 else ""
    raise ArgumentError(f"bench: --algorithms {name}: {reason}{others}")


def main(rank: int, asked: Settings) -> int:
    """Run the benchmark as one rank. `rank` is passed by :func:`mpicoll.spawn` and not used. Collective."""
    comm = world()
    if asked.ranks not in (None, comm.size):
        raise ArgumentError(f"bench: -np {asked.ranks}, but the launcher has started {comm.size} ranks; leave -np out")
    if asked.computing is not None and asked.computing > comm.size:
        raise ArgumentError(f"bench overlap: --computing {asked.computing}, but the job has {count(comm.size, 'rank')}")
    team = Team(comm)
    try:
        device_arrays.give(team, asked.array)
        {"sweep": _sweep, "messages": _messages, "overlap": _overlaps, "overhead": _overhead}[asked.kind](team, asked)
        status = 0
    except (Wrong, SetupError) as error:
        team.report_error(error)
        status = 1 if isinstance(error, Wrong) else 2
    peers.close()
    # Ranks that exit with a nonzero status end the job, possibly before other ranks have written their output.
    team.barrier()
    return status


def _kind(asked: Settings) -> ArrayKind:
    if asked.array is not None:
        return cast("ArrayKind", f"cuda {asked.array}")
    return cast("ArrayKind", f"registered {asked.like}") if asked.registered else asked.like


def _sweep(team: Team, asked: Settings) -> None:
    kind = _kind(asked)
    form = "_init" if asked.plan else ""
    entered = [peers.candidate("mpicoll", kind=kind, form=form)]
    entered += [peers.candidate(one, kind=kind, form=form, algorithm=one) for one in asked.algorithms]
    entered += [_peer(one, team.comm, asked.like if asked.array is None else kind) for one in asked.against]
    if asked.rewrite:
        entered = [peers.write_before(one) for one in entered] + [peers.write(kind)]
    points = _measure_points(team, asked, entered)
    first_peer = asked.against[0] if asked.against else None
    _report(team, asked, points, first_peer)
    if team.rank == 0 and asked.plot is not None:
        title = f"{team.size} ranks, {_label(asked)}"
        report.plot(asked.plot, points, against=asked.draw, title=title)


def _messages(team: Team, asked: Settings) -> None:
    if team.size < 2:
        raise SetupError("bench: messages need 2 ranks, and there is one; start more (-np 2)")
    entered = messages.Messages(team.comm, asked.collectives, asked.against, asked.like)
    points = _measure_points(team, asked, entered.contestants)
    entered.close()
    _report(team, asked, points, asked.against[0] if asked.against else None)


def _peer(name: str, comm: Communicator, like: ArrayKind) -> Contestant:
    if name == "mpi4py":
        return peers.mpi4py(comm, kind=like)
    if name == "copy":
        return peers.copy(like)
    try:
        return peers.of_torch(name, comm, kind=like)
    except SetupError as error:
        if like != "cuda torch":
            raise
        # This peer is a default there, so its absence is not an error.
        return peers.make_absent(name, like, str(error))


def _overhead(team: Team, asked: Settings) -> None:
    through_torch = partial(peers.of_torch, "mpicoll", team.comm, kind="torch", apart=False)
    entered = [
        peers.mpi4py(team.comm, kind="numpy"),
        peers.candidate("call", kind="numpy", out=False),
        peers.candidate("out=", kind="numpy"),
        peers.candidate("counts=, out=", kind="numpy", counts=True),
        peers.candidate("None elsewhere, out=", kind="numpy", absent=True),
        peers.candidate("strided, out=", kind="numpy", strided=True),
        peers.add_wait(peers.candidate("i-form, wait", kind="numpy", form="i")),
        peers.add_wait(peers.mpi4py(team.comm, kind="numpy", name="mpi4py, I-form, Wait", form="i")),
        peers.candidate("plan", kind="numpy", form="_init"),
        peers.mpi4py(team.comm, kind="torch", name="mpi4py, tensor"),
        peers.candidate("tensor", kind="torch", out=False),
        peers.candidate("tensor, out=", kind="torch"),
        peers.candidate("tensor, counts=, out=", kind="torch", counts=True),
        peers.candidate("tensor, None, out=", kind="torch", absent=True),
        peers.candidate("tensor, plan", kind="torch", form="_init"),
        through_torch(name="torch"),
        through_torch(name="torch, drop-in", dropin=True),
        peers.add_wait(through_torch(name="torch, async", asynchronous=True)),
    ]
    points = _measure_points(team, asked, entered)
    if team.rank == 0:
        if asked.json != "-":
            formatting.console(asked.width).print(*report.overhead(points, {one.name: one.kind for one in entered}))
        _write(team, asked, {"points": report.as_json(points)})


def _measure_points(team: Team, asked: Settings, entered: Sequence[Contestant]) -> list[Point]:
    workloads = _workloads(team, asked)
    points = []
    with formatting.steps(team.rank == 0 and asked.progress, len(workloads)) as step:
        for workload in workloads:
            label = f"{workload.collective} {formatting.nbytes(workload.nbytes)}"
            points.append(
                measure(
                    team,
                    workload,
                    entered,
                    seconds=asked.seconds,
                    blocks=asked.blocks,
                    step=lambda name, label=label: step(f"{label} {name}", 0),  # type: ignore[misc]
                )
            )
            step(label, 1)
    return points


def _overlaps(team: Team, asked: Settings) -> None:
    if asked.like == "torch":
        entered = peers.of_torch("mpicoll", team.comm, kind="torch", asynchronous=True)
        form = "async_op of torch"
    else:
        entered = peers.candidate("mpicoll", kind="numpy", form="i")
        form = "the i-form"
    workloads = _workloads(team, asked)
    found: list[Overlap] = []
    with formatting.steps(team.rank == 0 and asked.progress, len(workloads)) as step:
        for workload in workloads:
            found.append(overlap(team, workload, entered, asked.compute, asked.seconds, asked.computing))
            step(f"{workload.collective} {formatting.nbytes(workload.nbytes)}", 1)
    if team.rank != 0:
        return
    rows = [
        [
            f"{one.workload.collective} {formatting.nbytes(one.workload.nbytes)}",
            *map(formatting.seconds, (one.pure, one.compute, one.total)),
            f"{one.percent:.0f} %",
        ]
        for one in found
    ]
    title = f"overlap of {form}, {team.size} ranks, {_label(asked)}, compute: {asked.compute}"
    if asked.computing is not None:
        title += f" on {count(asked.computing, 'rank')}"
    columns = ("", "pure", "compute", "total", "hidden")
    if asked.json != "-":
        formatting.console(asked.width).print(formatting.table(title, columns, rows))
    overlaps = []
    for one in found:
        workload = one.workload
        overlaps.append(
            {
                **{name: getattr(workload, name) for name in ("collective", "nbytes", "dtype", "op", "ranks")},
                **{name: getattr(one, name) for name in ("pure", "compute", "total", "percent", "rounds")},
            }
        )
    _write(team, asked, {"overlaps": overlaps})


def _workloads(team: Team, asked: Settings) -> list[Workload]:
    """Return the workloads by collective, in ascending order of size. Sizes equal after rounding occur once."""
    found: dict[tuple[str, int], Workload] = {}
    for collective in asked.collectives:
        for size in asked.sizes:
            workload = Workload(collective, size, asked.dtype, asked.op, team.size)
            found.setdefault((collective, workload.nbytes), workload)
    return list(found.values())


def _report(team: Team, asked: Settings, points: Sequence[Point], first_peer: str | None) -> None:
    if team.rank != 0:
        return
    console = formatting.console(asked.width)
    collectives = dict.fromkeys(point.workload.collective for point in points)
    for collective in collectives if asked.json != "-" else ():
        chosen = [point for point in points if point.workload.collective == collective]
        bound = "gloo" if collective in MESSAGES else "copy" if asked.array is not None else None
        console.print(report.table(chosen, first_peer=first_peer, bound=bound, settings=_label(asked, collective)))
    _write(team, asked, {"points": report.as_json(points)})


def _write(team: Team, asked: Settings, measured: dict[str, Any]) -> None:
    if asked.json is not None:
        plain = {name: str(value) if isinstance(value, Path) else value for name, value in _public(asked).items()}
        told = {} if asked.array is None else device_arrays.facts()
        report.write(asked.json, team.comm, asked.command, plain, told | measured)


def _public(asked: Settings) -> dict[str, Any]:
    private = ("command", "progress", "width", "json", "limit", "ranks")
    return {name: value for name, value in dataclasses.asdict(asked).items() if name not in private}


def _label(asked: Settings, collective: str | None = None) -> str:
    words = [asked.dtype, asked.op, _kind(asked).removeprefix("registered ")]
    if collective in MESSAGES:
        words.remove(asked.op)
        if collective in messages.OF_TORCH:
            words[-1] = "torch"
    words += [
        word
        for word, wanted in (
            ("plan", asked.plan),
            ("registered", asked.registered),
            ("rewrite", asked.rewrite and collective != "barrier"),
        )
        if wanted
    ]
    return " ".join(words)
