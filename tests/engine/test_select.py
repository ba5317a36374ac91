"""Which algorithm is taken, and the reason given for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from subprocess import CompletedProcess

import numpy as np
import pytest

import mpicoll
from mpicoll import config
from mpicoll.engine import select
from mpicoll.engine.select import Problem, choose, parse

INF = float("inf")
Python = Callable[..., "CompletedProcess[str]"]


def problem(collective: str = "allreduce", nbytes: int | None = 8, *, mpi: bool = True, **more: object) -> Problem:
    """A call on 4 ranks, that the MPI library can serve or can't."""
    return Problem(collective, nbytes, 4, native=None if mpi else "there is no MPI", **more)  # type: ignore[arg-type]


def taken(collective: str = "allreduce", nbytes: int | None = 8, argument: str | None = None, **more: object) -> str:
    return str(choose(problem(collective, nbytes, **more), argument))  # type: ignore[arg-type]


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Set MPICOLL_ALGORITHMS for this test."""

    def forget() -> None:
        for cached in (config.config, select._environment, select._choose):
            cached.cache_clear()

    def put(text: str) -> None:
        monkeypatch.setenv("MPICOLL_ALGORITHMS", text)
        forget()

    yield put
    monkeypatch.undo()
    forget()


# --- the grammar


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
def test_rules(text: str, rules: select.Rules) -> None:
    assert parse(text) == rules


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ring", "rule 'ring': expected collective:algorithm"),
        ("allreduce", "rule 'allreduce': expected collective:algorithm"),
        ("allreduce:", "rule 'allreduce:': expected collective:algorithm"),
        (":ring", "rule ':ring': no collective ''"),
        ("allredcue:ring", "rule 'allredcue:ring': no collective 'allredcue'; there are allgather, allreduce"),
        ("bcast:chain;x:ring", "rule 'x:ring': no collective 'x'"),
        ("allreduce:rong", "allreduce has no algorithm 'rong'; there are native, double_tree, "),
        ("allreduce:0-4k:", "allreduce has no algorithm ''"),
        ("allreduce:ring,", "allreduce has no algorithm ''"),
        ("allreduce:4k:ring", "rule '4k:ring' of allreduce: expected from-to:algorithm, such as 4k-1m:ring"),
        ("allreduce:-4k:ring", "rule '-4k:ring' of allreduce: expected from-to"),
        ("allreduce:1-2-3:ring", "rule '1-2-3:ring' of allreduce: expected from-to"),
        ("allreduce:4k-4k:ring", "rule '4k-4k:ring' of allreduce: the range 4k-4k is empty"),
        ("allreduce:1m-1k:ring", "rule '1m-1k:ring' of allreduce: the range 1m-1k is empty"),
        ("allreduce:inf-inf:ring", "the range inf-inf is empty"),
        ("allreduce:0-4q:ring", "'4q' is no number of bytes; write such as 0, 512, 64k, 1m, 2g or inf"),
        ("allreduce:few-inf:ring", "'few' is no number of bytes"),
        ("bcast:chain/", "bcast algorithm 'chain/': the part behind / must be a number of segments"),
        ("bcast:chain/0", "bcast algorithm 'chain/0': the part behind / must be a number of segments"),
        ("bcast:chain/x", "bcast algorithm 'chain/x': the part behind / must be a number of segments"),
        ("bcast:chain/-1", "bcast algorithm 'chain/-1': the part behind / must be a number of segments"),
        ("bcast:binomial/2", "bcast algorithm 'binomial/2': binomial has no segments"),
        ("bcast:native/2", "bcast has no algorithm 'native'"),
        ("allreduce:chain", "allreduce has no algorithm 'chain'"),
    ],
)
def test_malformed_rules(text: str, message: str) -> None:
    with pytest.raises(mpicoll.AlgorithmError) as caught:
        parse(text)
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


def test_first_of_overlapping_ranges() -> None:
    with mpicoll.algorithms(allreduce="0-1k:ring,0-inf:tree"):
        assert [choose(problem(nbytes=nbytes), None).name for nbytes in (8, 2048)] == ["ring", "tree"]


def test_unknown_size_counts_as_nothing() -> None:
    with mpicoll.algorithms(alltoall="0-1:bruck,1-inf:pairwise"):
        assert choose(problem("alltoall", None), None).name == "bruck"


# --- the order of the sources


def test_table() -> None:
    assert taken() == "native: table"


def test_fallback_where_mpi_can_not_serve() -> None:
    assert taken(mpi=False) == "recursive_doubling: not native (table): there is no MPI; fallback table"
    assert taken(nbytes=1 << 20, mpi=False).startswith("halving_doubling: ")


def test_each_source_comes_before_the_next(environment: Callable[[str], None]) -> None:
    environment("allreduce:tree")
    assert taken() == "tree: forced by MPICOLL_ALGORITHMS"
    with mpicoll.algorithms(allreduce="ring"):
        assert taken() == "ring: forced by `with algorithms`"
        assert taken(argument="double_tree") == "double_tree: forced by the argument"
        assert taken(argument="native") == "native: forced by the argument"
    assert taken() == "tree: forced by MPICOLL_ALGORITHMS"
    assert taken("bcast") == "native: table"


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


def test_a_malformed_environment_is_told_at_the_first_call(python: Python) -> None:
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
def test_refusals(asked: Problem, name: str, refusal: str, environment: Callable[[str], None]) -> None:
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


def test_unknown_argument() -> None:
    with pytest.raises(
        mpicoll.AlgorithmError, match="allreduce has no algorithm 'rong'; there are native, double_tree"
    ):
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


@pytest.mark.parametrize("collective", mpicoll.schedules.collectives())
def test_explain(collective: str) -> None:
    def main() -> list[str]:
        first = next(iter(mpicoll.schedules.algorithms_of(collective)))
        with mpicoll.algorithms(**{collective: first}):
            assert str(mpicoll.explain(collective, 64)) == f"{first}: forced by `with algorithms`"
        assert str(mpicoll.explain(collective, 64, algorithm=first)) == f"{first}: forced by the argument"
        choice = mpicoll.explain(collective, 64)
        assert choice.algorithm is mpicoll.schedules.get(collective, choice.name)
        return [str(choice)]

    (one,), *rest = mpicoll.run_local(main, 3)
    assert rest == [[one]] * 2
    assert one.endswith(": not native (table): there is no MPI library behind this communicator; fallback table")


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


@pytest.mark.mpi
def test_native_is_taken_under_mpi() -> None:
    for collective in mpicoll.schedules.collectives():
        assert str(mpicoll.explain(collective, 64)) == "native: table"
    count = mpicoll.world().transport.native.max_count
    choice = mpicoll.explain("allreduce", 8 * (count + 1), dtype="float64")
    assert choice.name == "halving_doubling"
    assert choice.reason == f"not native (table): {count + 1} elements are more than MPI's counts hold; fallback table"
