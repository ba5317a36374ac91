"""Which algorithm is taken, and the reason given for it."""

from __future__ import annotations

import pickle
import re
import threading
from collections.abc import Callable, Iterator
from subprocess import CompletedProcess

import numpy as np
import pytest

import mpicoll
from mpicoll import config
from mpicoll.engine.selection import selector
from mpicoll.engine.selection.catalogue import SHARED_MEMORY, HierarchicalAlgorithm, algorithms_of
from mpicoll.engine.selection.cost_model import predict
from mpicoll.engine.selection.costs import TYPICAL, Costs, Link
from mpicoll.engine.selection.defaults import DEFAULT_RULES, DEVICE_RULES, FALLBACK_RULES, TCP_PAIR_RULES, TCP_RULES
from mpicoll.engine.selection.layout import NodeLayout, make_layout
from mpicoll.engine.selection.query import (
    KINDS,
    UNTUNED,
    DeviceCapabilities,
    SelectionContext,
    SelectionQuery,
    TunedTable,
    selection_context,
)
from mpicoll.engine.selection.rules import Rules, format_range, format_rules, parse_built_in_rules, parse_rules
from mpicoll.engine.selection.selector import choose, unsupported_reasons

INF = float("inf")
Python = Callable[..., "CompletedProcess[str]"]


NODE, NODES = NodeLayout(4, 1, 4), NodeLayout(4, 2, 2)


def problem(
    collective: str = "allreduce",
    nbytes: int | None = 8,
    *,
    mpi: bool = True,
    where: SelectionContext | None = None,
    **more: object,
) -> SelectionQuery:
    """A call on 4 ranks without shared memory, that the MPI library can serve or can't."""
    native = None if mpi else "there is no MPI"
    return SelectionQuery(collective, nbytes, where or selection_context(NODE), native=native, **more)  # type: ignore[arg-type]


def taken(collective: str = "allreduce", nbytes: int | None = 8, argument: str | None = None, **more: object) -> str:
    return str(choose(problem(collective, nbytes, **more), argument))  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A default table in which everything is native, save for an algorithm in shared memory that comes first."""
    everything = ";".join(f"{collective}:native" for collective in mpicoll.schedules.collectives())
    monkeypatch.setattr(selector, "DEFAULT_RULES", f"allreduce:16k-64k:shm_flat;{everything}")
    selector._choose.cache_clear()
    yield
    selector._choose.cache_clear()


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Set MPICOLL_ALGORITHMS for this test."""

    def forget() -> None:
        for cached in (config.config, selector._parse_environment, selector._choose):
            cached.cache_clear()

    def put(text: str) -> None:
        monkeypatch.setenv("MPICOLL_ALGORITHMS", text)
        forget()

    yield put
    monkeypatch.undo()
    forget()


# --- the grammar


@pytest.mark.parametrize(
    "text",
    [DEFAULT_RULES, DEVICE_RULES, FALLBACK_RULES, TCP_RULES, TCP_PAIR_RULES],
    ids=["host", "device", "fallback", "tcp", "pair"],
)
def test_built_in_rules_name_algorithms_that_exist(text: str) -> None:
    rules = parse_rules(text)
    assert tuple(one for collective, _ in rules for one in parse_built_in_rules(text, collective)) == rules


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ("", ()),
        (" ; ", ()),
        ("allreduce:ring", (("allreduce", ((0, INF, "ring"),)),)),
        ("allreduce:native", (("allreduce", ((0, INF, "native"),)),)),
        ("bcast:chain/8", (("bcast", ((0, INF, "chain/8"),)),)),
        ("bcast:0-64:chain/8", (("bcast", ((0, 64, "chain/8"),)),)),
        (
            "allreduce:0-64k:native,64k-1m:ring,1m-inf:tree",
            (("allreduce", ((0, 65536, "native"), (65536, 1 << 20, "ring"), (1 << 20, INF, "tree"))),),
        ),
        ("reduce:1K-2G:binomial", (("reduce", ((1024, 2 << 30, "binomial"),)),)),
        (
            "scan:linear; barrier:dissemination ;",
            (("scan", ((0, INF, "linear"),)), ("barrier", ((0, INF, "dissemination"),))),
        ),
        ("scan: 0-8:linear, 8-inf:native", (("scan", ((0, 8, "linear"), (8, INF, "native"))),)),
        ("scan:linear;scan:native", (("scan", ((0, INF, "linear"),)), ("scan", ((0, INF, "native"),)))),
    ],
)
def test_rules(text: str, rules: Rules) -> None:
    assert parse_rules(text) == rules


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ring", "rule 'ring': expected collective:algorithm"),
        ("allreduce", "rule 'allreduce': expected collective:algorithm"),
        ("allreduce:", "rule 'allreduce:': expected collective:algorithm"),
        (":ring", "rule ':ring': no collective ''"),
        ("allredcue:ring", "rule 'allredcue:ring': no collective 'allredcue'; there are allgather, allreduce"),
        ("bcast:chain;x:ring", "rule 'x:ring': no collective 'x'"),
        ("allreduce:rong", "allreduce has no algorithm 'rong'; there are native, shm_flat, shm_pipelined, cma, "),
        ("allreduce:0-4k:", "allreduce has no algorithm ''"),
        ("allreduce:ring,", "allreduce has no algorithm ''"),
        ("allreduce:4k:ring", "rule '4k:ring' of allreduce: expected from-to:algorithm, such as 4k-1m:ring"),
        ("allreduce:-4k:ring", "rule '-4k:ring' of allreduce: expected from-to"),
        ("allreduce:1-2-3:ring", "rule '1-2-3:ring' of allreduce: expected from-to"),
        ("allreduce:4k-4k:ring", "rule '4k-4k:ring' of allreduce: the range 4k-4k is empty"),
        ("allreduce:1m-1k:ring", "rule '1m-1k:ring' of allreduce: the range 1m-1k is empty"),
        ("allreduce:inf-inf:ring", "the range inf-inf is empty"),
        ("allreduce:0-4q:ring", "'4q' is not a number of bytes; write for example 0, 512, 64k, 1m, 2g or inf"),
        ("allreduce:few-inf:ring", "'few' is not a number of bytes"),
        ("bcast:chain/", "bcast algorithm 'chain/': the part behind / must be a number of segments"),
        ("bcast:chain/0", "bcast algorithm 'chain/0': the part behind / must be a number of segments"),
        ("bcast:chain/x", "bcast algorithm 'chain/x': the part behind / must be a number of segments"),
        ("bcast:chain/-1", "bcast algorithm 'chain/-1': the part behind / must be a number of segments"),
        ("bcast:chain/4097", "the part behind / must be a number of segments, from 1 to 4096"),
        ("bcast:chain/²", "the part behind / must be a number of segments, from 1 to 4096"),
        (f"bcast:chain/{'9' * 5000}", "the part behind / must be a number of segments, from 1 to 4096"),
        (f"bcast:0-{'9' * 400}:chain", "is not a number of bytes"),
        ("bcast:0-٣:chain", "is not a number of bytes"),
        ("bcast:binomial/2", "bcast algorithm 'binomial/2': binomial has no segments"),
        ("bcast:native/2", "bcast has no algorithm 'native'"),
        ("allreduce:chain", "allreduce has no algorithm 'chain'"),
    ],
)
def test_malformed_rules(text: str, message: str) -> None:
    with pytest.raises(mpicoll.AlgorithmError) as caught:
        parse_rules(text)
    assert type(caught.value) is mpicoll.AlgorithmError
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("nbytes", "name"), [(0, "ring"), (1023, "ring"), (1024, "tree"), (4095, "tree"), (4096, "native")]
)
def test_borders_of_ranges(nbytes: int, name: str) -> None:
    """The lower end belongs to a range, the upper end does not; outside of all, the table decides."""
    with mpicoll.algorithms(allreduce="0-1k:ring,1k-4k:tree"):
        choice = choose(problem(nbytes=nbytes), None)
    assert choice.name == name
    assert choice.reason == ("table" if name == "native" else "forced by `with algorithms`")


@pytest.mark.parametrize(
    ("collective", "nbytes", "name"),
    [
        ("allreduce", 1 << 30, "shm_or_cma"),
        ("gather", 64 << 20, "shm_or_cma"),
        ("allgather", 32 << 10, "shm_pipelined"),
        ("allgather", 64 << 10, "shm_or_cma"),
        ("alltoall", 64 << 20, "shm_or_cma"),
    ],
)
def test_built_in_rules_for_large_messages(collective: str, nbytes: int, name: str) -> None:
    rules = dict(parse_rules(DEFAULT_RULES))[collective]
    assert next(taken for low, high, taken in rules if low <= nbytes < high) == name


SPREAD, PAIRS, MANY = NodeLayout(4, 4, 1), NodeLayout(8, 4, 2), NodeLayout(64, 64, 1)


@pytest.mark.parametrize(
    ("collective", "nbytes", "shape", "name"),
    [
        ("allreduce", 512 << 10, SPREAD, "native"),
        ("allreduce", 1 << 20, SPREAD, "ring"),
        ("allreduce", 256 << 10, PAIRS, "hierarchical"),
        ("allreduce", 1 << 20, NODES, "native"),
        ("allreduce", 2 << 20, NODES, "hierarchical"),
        ("allreduce", 1 << 20, MANY, "native"),
        ("allreduce", 4 << 20, MANY, "ring"),
        ("reduce_scatter", 512 << 10, SPREAD, "pairwise"),
        ("reduce_scatter", 512 << 10, NODES, "hierarchical"),
        ("reduce", 512 << 10, SPREAD, "chain"),
        ("reduce", 4 << 20, MANY, "reduce_scatter_gather"),
        ("reduce", 2 << 20, PAIRS, "native"),
        ("bcast", 64 << 10, SPREAD, "scatter_allgather"),
        ("bcast", 64 << 10, MANY, "native"),
        ("bcast", 256 << 10, SPREAD, "scatter_allgather"),
        ("bcast", 512 << 10, SPREAD, "chain/1"),
        ("bcast", 512 << 10, MANY, "scatter_allgather"),
        ("bcast", 128 << 10, PAIRS, "native"),
        ("bcast", 512 << 10, PAIRS, "hierarchical"),
        ("alltoall", 1 << 20, SPREAD, "pairwise"),
        ("alltoall", 1 << 20, PAIRS, "pairwise"),
        ("alltoall", 1 << 20, MANY, "native"),
        ("gather", 1 << 20, SPREAD, "native"),
        ("gather", 2 << 20, PAIRS, "linear"),
        ("scatter", 2 << 20, SPREAD, "linear"),
        ("scan", 512 << 10, SPREAD, "linear"),
        ("scan", 1 << 20, PAIRS, "linear"),
        ("exscan", 512 << 10, PAIRS, "native"),
    ],
)
def test_built_in_rules_for_tcp(
    monkeypatch: pytest.MonkeyPatch, collective: str, nbytes: int, shape: NodeLayout, name: str
) -> None:
    """Schedules, if the blocks are large: the hierarchical one where nodes have several ranks each."""
    monkeypatch.setattr(selector, "DEFAULT_RULES", DEFAULT_RULES)
    choice = choose(problem(collective, nbytes, where=selection_context(shape, connects=True)), None)
    assert choice.name == name
    assert (", table for TCP" in f", {choice.reason.rpartition('; ')[2]}") == (name != "native")


def test_rules_for_tcp_do_not_hold_for_other_networks() -> None:
    assert choose(problem(nbytes=1 << 20, where=selection_context(SPREAD)), None).name == "native"


def test_first_of_overlapping_ranges() -> None:
    with mpicoll.algorithms(allreduce="0-1k:ring,0-inf:tree"):
        assert [choose(problem(nbytes=nbytes), None).name for nbytes in (8, 2048)] == ["ring", "tree"]


def test_unknown_size_counts_as_nothing() -> None:
    with mpicoll.algorithms(alltoall="0-1:bruck,1-inf:pairwise"):
        assert choose(problem("alltoall", None), None).name == "bruck"


# --- the order of the sources


def test_table() -> None:
    assert taken() == "native: table"


def test_a_rule_of_the_table_names_its_range() -> None:
    shared = {"no_shm_reason": None, "no_cma_reason": None}
    assert taken(nbytes=16384, **shared) == "shm_flat: table, 16k-64k"
    assert taken(nbytes=16383, **shared) == taken(nbytes=65536, **shared) == "native: table"
    assert taken(nbytes=16384) == "native: not shm_flat (table, 16k-64k): there is no shared memory; table"


def test_the_cheapest_schedule_where_the_table_can_not_serve() -> None:
    small, large = (taken(nbytes=nbytes, mpi=False) for nbytes in (8, 16 << 20))
    why = "not native (table): there is no MPI; cost model with typical costs:"
    assert small.startswith(f"recursive_doubling: {why} 10")
    assert large.startswith(f"halving_doubling: {why} ")
    assert ", ring " in large
    assert re.fullmatch(r".*: 10(\.0\d)? µs, \w+ [\d.]+ µs", small)


def test_fallback_where_the_size_is_not_known() -> None:
    assert taken("alltoall", None, mpi=False).endswith(": not native (table): there is no MPI; fallback table")


def test_fallback_for_a_single_rank() -> None:
    alone = problem(mpi=False, where=selection_context(make_layout((0,))))
    assert str(choose(alone, None)).endswith(": not native (table): there is no MPI; fallback table")


def test_the_model_leaves_out_what_can_not_serve() -> None:
    choice = choose(problem(nbytes=16 << 20, mpi=False, commutative=False), None)
    assert choice.algorithm is not None
    assert choice.algorithm.keeps_order(0)
    assert "cost model" in choice.reason
    assert "ring" not in choice.reason


# --- what was tuned


def tuned(rules: dict[str, str], shape: NodeLayout = NODE, costs: Costs = TYPICAL) -> TunedTable:
    """A table as if from a file, for one shape."""
    parsed = {kind: parse_rules(text) for kind, text in rules.items()}
    return TunedTable("text", "t.json", {shape: parsed}, costs)


def test_tuned_comes_after_what_is_forced_and_before_the_table(environment: Callable[[str], None]) -> None:
    where = selection_context(NODE, tuned({"moved": "allreduce:ring;bcast:0-1k:chain/3,1k-1m:native"}))
    assert taken(where=where) == "ring: tuned for moved on 4 ranks on 1 node, t.json"
    assert taken("bcast", 1023, where=where) == "chain/3: tuned for moved, 0-1k on 4 ranks on 1 node, t.json"
    assert choose(problem("bcast", 1023, where=where), None).segments == 3
    assert taken("bcast", 1 << 20, where=where) == taken("reduce", where=where) == "native: table"
    assert taken(where=where, argument="tree") == "tree: forced by the argument"
    with mpicoll.algorithms(allreduce="tree"):
        assert taken(where=where) == "tree: forced by `with algorithms`"
    environment("allreduce:double_tree")
    assert taken(where=where) == "double_tree: forced by MPICOLL_ALGORITHMS"


def test_tuned_for_another_shape() -> None:
    table = tuned({"moved": "allreduce:ring"}, NODES)
    assert taken(where=selection_context(NODE, table)) == "native: table"
    assert taken(where=selection_context(NODES, table)).startswith(
        "ring: tuned for moved on 4 ranks on 2 nodes, 2 on each, t.json"
    )


def test_tuned_but_can_not_serve() -> None:
    where = selection_context(NODE, tuned({"moved": "allreduce:shm_pipelined"}))
    why = "not shm_pipelined (tuned for moved on 4 ranks on 1 node, t.json): there is no shared memory; table"
    assert taken(where=where) == f"native: {why}"
    assert taken(where=where, no_shm_reason=None) == "shm_pipelined: tuned for moved on 4 ranks on 1 node, t.json"


@pytest.mark.parametrize("kind", KINDS)
def test_tuned_by_class_of_dtypes(kind: str) -> None:
    """Integers and complex numbers follow floats if they were not tuned themselves; nothing else does."""
    where = selection_context(NODE, tuned({"float": "allreduce:ring", "complex": "allreduce:tree"}))
    expected = {"float": "ring", "integer": "ring", "complex": "tree"}.get(kind, "native")
    assert choose(problem(where=where, kind=kind), None).name == expected


def test_tuned_for_devices() -> None:
    """By what devices the ranks have and whether they share them, apart from the host's; classes follow each other
    there as well."""
    rules = {
        "float": "allreduce:tree",
        "float on A": "allreduce:ring",
        "half on A": "allreduce:0-1k:shm_pipelined",
        "float on A shared by 2": "allreduce:double_tree",
    }
    where = selection_context(NODE, tuned(rules))

    def on(models: str | None, kind: str = "float", **more: object) -> str:
        return taken(where=where, kind=kind, no_shm_reason=None, device=DeviceCapabilities(models=models), **more)

    assert on("A") == "ring: tuned for float on A on 4 ranks on 1 node, t.json"
    assert on("A", "integer") == on("A")
    assert on("A", "half") == "shm_pipelined: tuned for half on A, 0-1k on 4 ranks on 1 node, t.json"
    assert on("A shared by 2").startswith("double_tree: tuned for float on A shared by 2 on 4 ranks")
    # Not by what the host has, nor before the ranks have told each other.
    for other in ("A and B", "A shared by 4", None):
        assert on(other) == "ipc: table, 0-1m"
    with mpicoll.algorithms(allreduce="ipc"):
        assert on("A").startswith("ipc: forced")


def test_measured_costs_decide_instead_of_typical_ones() -> None:
    """Where messages cost nothing but their bytes, the ring wins even at 8 bytes."""
    for costs, name in (
        (Costs(Link(1.0, 0.0), Link(1.0, 0.0), 0.0, measured=True), "recursive_doubling"),
        (Costs(Link(0.0, 1.0), Link(0.0, 1.0), 0.0, measured=True), "halving_doubling"),
    ):
        choice = choose(problem(mpi=False, where=selection_context(NODE, tuned({}, costs=costs))), None)
        assert choice.name == name
        assert "cost model with measured costs: " in choice.reason


# --- the model


def test_shapes() -> None:
    assert make_layout((0, 0, 1, 1)) == NODES
    assert make_layout((0, 1, 0, 0)) == NodeLayout(4, 2, 3)
    assert [str(make_layout(nodes)) for nodes in ((0,), (0, 0), (0, 1), (0, 1, 1))] == [
        "1 rank on 1 node",
        "2 ranks on 1 node",
        "2 ranks on 2 nodes, 1 on each",
        "3 ranks on 2 nodes, 2 on the fullest",
    ]


def test_equal_sites_are_one_object() -> None:
    assert selection_context(make_layout((0, 0))) is selection_context(make_layout((0, 0)), UNTUNED)
    assert selection_context(NODE) is not selection_context(NODES)


@pytest.mark.parametrize("collective", mpicoll.schedules.collectives())
@pytest.mark.parametrize("size", [2, 3, 8, 16])
def test_few_messages_are_followed(collective: str, size: int) -> None:
    """On one link class the prediction is the simulated price, or close to it where ports overlap."""
    for name in mpicoll.schedules.algorithms_of(collective):
        if name in ("double_tree", "linear", "recursive_doubling"):
            continue  # these overlap
        algorithm = mpicoll.schedules.get(collective, name)
        for nbytes in (8, 1 << 20):
            alpha, beta = TYPICAL.node.alpha, TYPICAL.node.beta
            exact = mpicoll.schedules.price(algorithm, size, nbytes, alpha=alpha, beta=beta, gamma=TYPICAL.gamma)
            assert predict(algorithm, NodeLayout(size, 1, size), nbytes, 1, TYPICAL) == pytest.approx(exact)


@pytest.mark.parametrize("collective", mpicoll.schedules.collectives())
@pytest.mark.parametrize("segments", [1, 7])
def test_many_messages_follow_from_closed_forms(collective: str, segments: int) -> None:
    """Just above the bound, the estimate is not far from the exact price."""
    size = 32
    for name in mpicoll.schedules.algorithms_of(collective):
        algorithm = mpicoll.schedules.get(collective, name)
        if segments > 1 and not algorithm.segmented:
            continue
        alpha, beta, gamma = TYPICAL.node.alpha, TYPICAL.node.beta, TYPICAL.gamma
        for nbytes in (8, 1 << 24):
            exact = mpicoll.schedules.price(
                algorithm, size, nbytes, alpha=alpha, beta=beta, gamma=gamma, segments=segments
            )
            told = predict(algorithm, NodeLayout(size, 1, size), nbytes, segments, TYPICAL)
            # Bursts of sends, which overlap in part, are overrated by what follows messages level by level.
            most = 1.7 if (collective, name) == ("reduce_scatter", "linear") else 1.25
            assert 0.75 * exact <= told <= most * exact, name


def test_no_number_of_ranks_is_too_large() -> None:
    for shape in (NodeLayout(100_000, 1, 100_000), NodeLayout(65_536, 4096, 16), NodeLayout(99_999, 5000, 30)):
        choice = choose(problem(nbytes=1 << 20, mpi=False, where=selection_context(shape)), None)
        assert "cost model" in choice.reason


def test_messages_between_nodes_cost_more() -> None:
    ring = mpicoll.schedules.get("allreduce", "ring")
    near, far, uneven = (predict(ring, one, 1 << 20, 1, TYPICAL) for one in (NODE, NODES, NodeLayout(4, 2, 3)))
    assert near < far <= uneven


# --- precedence


def test_each_source_comes_before_the_next(environment: Callable[[str], None]) -> None:
    environment("allreduce:tree")
    assert taken() == "tree: forced by MPICOLL_ALGORITHMS"
    with mpicoll.algorithms(allreduce="ring"):
        assert taken() == "ring: forced by `with algorithms`"
        assert taken(argument="double_tree") == "double_tree: forced by the argument"
        assert taken(argument="native") == "native: forced by the argument"
    assert taken() == "tree: forced by MPICOLL_ALGORITHMS"
    assert taken("bcast") == "native: table"


@pytest.mark.parametrize(
    ("former", "name"), [("slots", "shm_flat"), ("pieces", "shm_pipelined"), ("pieces/256k", "shm_pipelined/256k")]
)
def test_former_names_are_accepted_and_the_present_ones_printed(
    former: str, name: str, environment: Callable[[str], None]
) -> None:
    assert format_rules(parse_rules(f"allreduce:{former},0-4k:{former}")) == f"allreduce:0-inf:{name},0-4k:{name}"
    assert taken(argument=former, no_shm_reason=None) == f"{name}: forced by the argument"
    with pytest.raises(mpicoll.AlgorithmError, match=f"algorithm '{name}' can't serve this: there is no shared memory"):
        taken(argument=former)
    with mpicoll.algorithms(allreduce=former):
        assert taken(no_shm_reason=None) == f"{name}: forced by `with algorithms`"
    environment(f"allreduce:{former}")
    assert taken(no_shm_reason=None) == f"{name}: forced by MPICOLL_ALGORITHMS"


def test_environment_with_ranges(environment: Callable[[str], None]) -> None:
    environment("allreduce:0-1k:tree;bcast:chain/3")
    assert taken(nbytes=1023) == "tree: forced by MPICOLL_ALGORITHMS"
    assert taken(nbytes=1024) == "native: table"
    assert choose(problem("bcast"), None).segments == 3


def test_malformed_environment(environment: Callable[[str], None]) -> None:
    environment("allreduce:rong")
    with pytest.raises(mpicoll.SetupError) as caught:
        taken()
    assert str(caught.value).startswith("MPICOLL_ALGORITHMS='allreduce:rong': allreduce has no algorithm 'rong'")


@pytest.mark.slow
def test_a_malformed_environment_is_reported_at_the_first_call(python: Python) -> None:
    done = python("import numpy, mpicoll; mpicoll.allreduce(numpy.ones(2))", MPICOLL_ALGORITHMS="allreduce:4k:ring")
    assert done.returncode == 1
    assert "mpicoll.errors.SetupError: MPICOLL_ALGORITHMS='allreduce:4k:ring': rule '4k:ring'" in done.stdout


def test_nested_contexts() -> None:
    with mpicoll.algorithms(allreduce="ring", bcast="chain"):
        with mpicoll.algorithms(allreduce="0-1k:tree"):
            assert [choose(problem(nbytes=nbytes), None).name for nbytes in (8, 2048)] == ["tree", "ring"]
            assert choose(problem("bcast"), None).name == "chain"
        assert choose(problem(), None).name == "ring"
    assert choose(problem(), None).name == "native"


def test_a_context_ends_with_an_exception() -> None:
    with pytest.raises(ZeroDivisionError), mpicoll.algorithms(allreduce="ring"):
        raise ZeroDivisionError
    assert taken() == "native: table"


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"allreduce": "rong"}, "allreduce has no algorithm 'rong'"),
        ({"allredcue": "ring"}, "no collective 'allredcue'"),
        ({"allreduce": ""}, "expected collective:algorithm"),
        ({"allreduce": "4k-1k:ring"}, "is empty"),
    ],
    ids=["algorithm", "collective", "nothing", "range"],
)
def test_a_wrong_context_is_refused_at_once(rules: dict[str, str], message: str) -> None:
    with pytest.raises(mpicoll.AlgorithmError, match=message), mpicoll.algorithms(**rules):
        pytest.fail("entered")
    assert taken() == "native: table"


def test_a_context_is_of_its_thread() -> None:
    entered, left = threading.Event(), threading.Event()
    seen: list[str] = []

    def other() -> None:
        entered.wait(20)
        seen.append(taken())
        with mpicoll.algorithms(allreduce="tree"):
            seen.append(taken())
        left.set()

    thread = threading.Thread(target=other)
    thread.start()
    with mpicoll.algorithms(allreduce="ring"):
        entered.set()
        assert left.wait(20)
        assert taken() == "ring: forced by `with algorithms`"
    thread.join()
    assert seen == ["native: table", "tree: forced by `with algorithms`"]


def test_a_context_reaches_background_operations() -> None:
    """What counts is the thread that calls, not the one that runs."""

    def main() -> str:
        with mpicoll.algorithms(allreduce="master_worker"):
            pending = mpicoll.iallreduce(np.ones(3))
            plan = mpicoll.allreduce_init(np.ones(3))
        assert pending.wait()[0] == plan()[0] == 3
        return plan.choice.name

    assert mpicoll.run_local(main, 3) == ["master_worker"] * 3


# --- what can't serve

ORDER = "the operation does not commute, and this algorithm changes the order of ranks"
WHOLE = "the operation is not elementwise, and this algorithm splits the array"
UNEVEN = "the blocks differ in size"


@pytest.mark.parametrize(
    ("asked", "name", "refusal"),
    [
        (problem(mpi=False), "native", "there is no MPI"),
        (problem(commutative=False), "ring", ORDER),
        (problem(elementwise=False), "ring", WHOLE),
        (problem("reduce", commutative=False, root=1), "binomial", ORDER),
        (problem("alltoall", uneven=True), "bruck", UNEVEN),
    ],
    ids=["native", "order", "whole", "root", "uneven"],
)
def test_refusals(asked: SelectionQuery, name: str, refusal: str, environment: Callable[[str], None]) -> None:
    """An argument insists; a context or the environment prefers."""
    with pytest.raises(mpicoll.AlgorithmError) as caught:
        choose(asked, name)
    assert str(caught.value).startswith(f"{asked.collective}: algorithm {name!r} can't serve this: {refusal}")
    with mpicoll.algorithms(**{asked.collective: name}):
        choice = choose(asked, None)
    assert choice.name != name
    assert choice.reason.startswith(f"not {name} (forced by `with algorithms`): {refusal}; ")
    environment(f"{asked.collective}:{name}")
    choice = choose(asked, None)
    assert choice.name != name
    assert choice.reason.startswith(f"not {name} (forced by MPICOLL_ALGORITHMS): {refusal}; ")


def test_order_is_kept_at_root_0() -> None:
    assert choose(problem("reduce", commutative=False), "binomial").name == "binomial"


@pytest.mark.parametrize("collective", mpicoll.schedules.collectives())
@pytest.mark.parametrize("nbytes", [0, 8, 1 << 14, 1 << 20])
@pytest.mark.parametrize("root", [0, 3])
def test_something_always_serves(collective: str, nbytes: int, root: int) -> None:
    """The hardest problem that there is: no MPI, an operation with an order of ranks, uneven blocks."""
    if collective not in ("bcast", "reduce", "gather", "scatter"):
        root = 0
    reduction = collective in ("allreduce", "reduce", "reduce_scatter", "scan", "exscan")
    asked = problem(
        collective,
        nbytes,
        mpi=False,
        root=root,
        commutative=not reduction,
        uneven=collective in ("gather", "scatter", "allgather", "reduce_scatter"),
    )
    choice = choose(asked, None)
    assert choice.algorithm is not None
    assert choice.algorithm.collective == collective
    assert choice.algorithm.keeps_order(root) or not reduction


def test_lost_memory_is_no_error() -> None:
    """Ranks may choose before or after it is lost; where one raised, the others would wait for it."""
    choice = choose(problem(no_shm_reason=None, shm_failed_reason="rank 2 has died"), "shm_flat")
    assert choice.name == "native"
    assert choice.reason.startswith("not shm_flat (forced by the argument): rank 2 has died; ")
    assert (
        choose(problem(nbytes=20_000, no_shm_reason=None, shm_failed_reason="rank 2 has died"), None).name == "native"
    )


def test_unknown_argument() -> None:
    with pytest.raises(mpicoll.AlgorithmError, match="allreduce has no algorithm 'rong'; there are native, shm_flat"):
        choose(problem(), "rong")


# --- segments


@pytest.mark.parametrize(
    ("nbytes", "argument", "segments"),
    [
        (0, "chain", 1),
        (8, "chain", 1),
        (256 * 1024 - 1, "chain", 1),
        (256 * 1024, "chain", 2),
        (1 << 20, "chain", 8),
        (1 << 30, "chain", 64),
        (8, "chain/5", 5),
        (1 << 30, "chain/500", 500),
    ],
)
def test_segments(nbytes: int, argument: str, segments: int) -> None:
    assert choose(problem("bcast", nbytes), argument).segments == segments


def test_no_segments_for_an_operation_on_whole_arrays() -> None:
    assert choose(problem("bcast", 1 << 30, elementwise=False), "chain").segments == 1


def test_segments_are_used() -> None:
    def main() -> int:
        x = np.arange(100.0) if mpicoll.world().rank == 0 else np.zeros(100)
        plan = mpicoll.bcast_init(x, algorithm="chain/7")
        assert plan()[99] == 99.0
        return plan.choice.segments

    assert mpicoll.run_local(main, 3) == [7] * 3


# --- explain


NO_MPI = "this communicator does not use an MPI library"


@pytest.mark.parametrize("collective", mpicoll.schedules.collectives())
def test_explain(collective: str) -> None:
    """On two nodes, where neither MPI nor shared memory can serve."""

    def main() -> list[str]:
        first = next(iter(mpicoll.schedules.algorithms_of(collective)))
        with mpicoll.algorithms(**{collective: first}):
            assert mpicoll.explain(collective, 64).reason == "forced by `with algorithms`"
        assert mpicoll.explain(collective, 64, algorithm=first).reason == "forced by the argument"
        choice = mpicoll.explain(collective, 64)
        assert choice.algorithm is mpicoll.schedules.get(collective, choice.name)
        return str(choice).splitlines()

    (one, *refused), *rest = mpicoll.run_local(main, 4, ranks_per_node=2)
    assert rest == [[one, *refused]] * 3
    assert f": not native (table): {NO_MPI}; cost model with typical costs: " in one
    methods = SHARED_MEMORY.get(collective, ())
    assert refused == [f"  not native: {NO_MPI}", *(f"  not {one}: the ranks are on several nodes" for one in methods)]


def test_explain_says_why_others_can_not_serve() -> None:
    def main() -> tuple[str, ...]:
        choice = mpicoll.explain("reduce", 1 << 30, op=lambda a, b: a, root=1)
        assert str(choice).startswith(f"{choice.name}: ")
        return choice.refused

    found = mpicoll.run_local(main, 3)[0]
    assert f"not native: {NO_MPI}" in found
    assert f"not binomial: {ORDER}" in found
    assert mpicoll.explain("allreduce", 8).refused == ()  # a single rank


def test_all_refusals() -> None:
    asked = problem(commutative=False)
    found = unsupported_reasons(asked)
    assert tuple(found) == tuple(one for one in algorithms_of("allreduce") if one not in ("nccl", "ipc"))
    for name, why in found.items():
        if why is None:
            assert choose(asked, name).name == name
        else:
            with pytest.raises(mpicoll.AlgorithmError, match=why):
                choose(asked, name)


@pytest.mark.parametrize(
    ("collective", "dtype", "kind"),
    [
        ("allreduce", "float32", "float"),
        ("reduce", "float64", "float"),
        ("scan", "float16", "half"),
        ("reduce_scatter", "complex64", "complex"),
        ("allreduce", "int8", "integer"),
        ("allreduce", "uint64", "integer"),
        ("bcast", "float16", "moved"),
        ("barrier", "int8", "moved"),
    ],
)
def test_classes_of_dtypes(collective: str, dtype: str, kind: str) -> None:
    """As calls have them, and as explain has them."""
    two = NodeLayout(2, 1, 2)
    where = selection_context(
        two, tuned({kind: f"{collective}:{list(mpicoll.schedules.algorithms_of(collective))[-1]}"}, two)
    )

    def main() -> None:
        mpicoll.world()._core.context = where
        assert mpicoll.explain(collective, 64, dtype=dtype).reason.startswith(f"tuned for {kind} on 2 ranks")
        arrays = [] if collective == "barrier" else [np.ones(64, dtype)]
        plan = getattr(mpicoll, f"{collective}_init")(*arrays)
        assert plan.choice.reason.startswith(f"tuned for {kind} on 2 ranks")

    mpicoll.run_local(main, 2)


def test_pairs_are_a_class_of_their_own() -> None:
    where = selection_context(
        NodeLayout(2, 1, 2), tuned({"float": "allreduce:ring", "other": "allreduce:tree"}, NodeLayout(2, 1, 2))
    )

    def main() -> str:
        mpicoll.world()._core.context = where
        plan = mpicoll.allreduce_init((np.ones(3), np.arange(3)), "minloc")
        assert plan.choice.name == mpicoll.explain("allreduce", 48, op="minloc", dtype="float64").name
        return plan.choice.name

    assert mpicoll.run_local(main, 2) == ["tree"] * 2


@pytest.mark.parametrize("collective", mpicoll.schedules.collectives())
def test_explain_is_what_a_plan_takes(collective: str) -> None:
    def main() -> None:
        for rows in (4, 40_000):
            arrays = [] if collective == "barrier" else [np.ones(rows)]
            nbytes = 8 * rows * (4 if collective in ("gather", "allgather") else 1)
            if collective == "scatter" and mpicoll.world().rank:
                arrays = [np.ones(rows // 4)]
            plan = getattr(mpicoll, f"{collective}_init")(*arrays)
            assert plan.choice == mpicoll.explain(collective, nbytes if arrays else 0, dtype="float64")

    mpicoll.run_local(main, 4)


def test_explain_knows_operations_and_dtypes() -> None:
    assert "MPI" in mpicoll.explain("allreduce", 64, op="minloc").reason
    ring = {"op": lambda a, b: a + b, "algorithm": "ring"}
    with pytest.raises(mpicoll.AlgorithmError, match=r"can't serve this: the operation .*"):
        mpicoll.run_local(lambda: mpicoll.explain("allreduce", 64, **ring), 2)
    with pytest.raises(mpicoll.DTypeError, match="band"):
        mpicoll.explain("allreduce", 64, op="band", dtype="float32")


def test_explain_of_what_does_not_exist() -> None:
    with pytest.raises(mpicoll.AlgorithmError, match="allredcue"):
        mpicoll.explain("allredcue", 8)
    with pytest.raises(mpicoll.AlgorithmError, match="allredcue"):
        mpicoll.explain("allredcue", 8, algorithm="ring")


# --- writing rules


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (0, INF, "0-inf"),
        (8, 1000, "8-1000"),
        (1024, 1536, "1k-1536"),
        (1 << 20, 3 << 20, "1m-3m"),
        (1 << 30, INF, "1g-inf"),
    ],
)
def test_ranges_as_text(low: float, high: float, text: str) -> None:
    assert format_range(low, high) == text
    assert parse_rules(f"allreduce:{text}:ring") == (("allreduce", ((low, high, "ring"),)),)


@pytest.mark.parametrize(
    "text",
    ["", "allreduce:0-inf:ring", "bcast:0-4k:native,4k-1m:chain/8,1m-inf:shm_pipelined/256k;scan:8-9:linear"],
    ids=["none", "one", "several"],
)
def test_rules_as_text(text: str) -> None:
    assert format_rules(parse_rules(text)) == text


def test_the_tables_can_be_read() -> None:
    for text in (DEFAULT_RULES, FALLBACK_RULES):
        rules: Rules = parse_rules(text)
        assert {collective for collective, _ in rules} == set(mpicoll.schedules.collectives())


@pytest.mark.mpi
def test_native_is_taken_under_mpi() -> None:
    """Whatever was tuned here: a world as if nothing had been."""
    world = mpicoll.world().duplicate()
    world._core.context = selection_context(world._core.context.layout)
    for collective in mpicoll.schedules.collectives():
        choice = mpicoll.explain(collective, 64, comm=world)
        assert choice == selector.Choice("native", None, 1, "table")
    count = world._core.transport.native.max_count
    choice = mpicoll.explain("scan", 8 * (count + 1), dtype="float64", comm=world)
    assert choice.algorithm is not None
    why = "cost model with typical costs: " if world.size > 1 else "fallback table"
    assert choice.reason.startswith(f"not native (table): {count + 1} elements are more than MPI's counts hold; {why}")
    world.free()


def test_choices_are_equal_without_what_they_refuse() -> None:
    one, other = (mpicoll.explain("allreduce", 8)._replace(refused=refused) for refused in ((), ("native",)))
    assert one == other
    assert not one != other  # noqa: SIM202  each operator has a method
    assert hash(one) == hash(other)
    assert HierarchicalAlgorithm() == pickle.loads(pickle.dumps(HierarchicalAlgorithm()))
