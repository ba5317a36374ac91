"""Which calls may be the same collective, and whose data they need."""

from __future__ import annotations

import pytest
from support.rank_states import BARRIER, PAIR, SUM, WORLD, doing, waits

from mpicoll.engine.diagnostics.analysis import analyse
from mpicoll.engine.diagnostics.call_facts import ranks_needed
from mpicoll.engine.diagnostics.flight_recorder import Call


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (
            Call("allgather", None, "int8", (2, 5), counts=(2, 4)),
            Call("allgather", None, "int8", (4, 5), counts=(2, 4)),
        ),
        (
            Call("alltoall", None, "int8", (2,), counts=(2, 0), arrivals=(2, 3)),
            Call("alltoall", None, "int8", (4,), counts=(3, 1), arrivals=(0, 1)),
        ),
        # torch's short way and its long one.
        (
            Call("broadcast", 32, root=1, algorithm="native"),
            Call("bcast", 32, "int32", (8,), root=1, algorithm="native"),
        ),
        (Call("all_reduce", 32, "int32", (2, 4), op="sum"), Call("allreduce", 32, "int32", (8,), op="sum")),
    ],
    ids=str,
)
def test_calls_that_may_differ(first: Call, second: Call) -> None:
    assert analyse({0: waits(3, PAIR, first), 1: waits(3, PAIR, second)}, 2).mismatches == []


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (
            Call("allgather", None, "int8", (2, 5), counts=(2, 4)),
            Call("allgather", None, "int8", (4, 5), counts=(2, 3)),
        ),
        (Call("allgather", None, "int8", (2, 5)), Call("alltoall", None, "int8", (2, 5))),
        (Call("bcast", 8, "int8", (8,), root=1), Call("bcast", 8, "int8", (8,), root=0)),
        (Call("bcast", 8, "int8", (8,), root=1), Call("bcast", 8, "int8", (9,), root=1)),
        (Call("bcast", 8, "int8", (8,), root=1), Call("bcast", 8, "int16", (8,), root=1)),
        (SUM, Call("allreduce", 4000, "float32", (1000,), op="max", algorithm="ring")),
        (SUM, Call("allreduce", 4000, "float32", (1000,), op="sum", algorithm="native")),
        (SUM, Call("several", parts=(SUM,))),
        (Call("several", parts=(SUM, BARRIER)), Call("several", parts=(SUM, SUM))),
        (Call("several", parts=(SUM,)), Call("several", parts=(SUM, SUM))),
    ],
    ids=str,
)
def test_calls_that_may_not(first: Call, second: Call) -> None:
    assert len(analyse({0: waits(3, PAIR, first), 1: waits(3, PAIR, second)}, 2).mismatches) == 1


@pytest.mark.parametrize(
    ("call", "rank", "needed"),
    [
        (SUM, 1, {0, 1, 2, 3}),
        (Call("all_reduce", 8, "int8", (8,), op="sum"), 1, {0, 1, 2, 3}),
        (Call("broadcast", 8, root=3), 1, {3}),
        (BARRIER, 1, {0, 1, 2, 3}),
        (Call("split"), 1, {0, 1, 2, 3}),
        (Call("allreduce", 0, "int8", (0,)), 1, set()),
        (Call("scan", 8, "int8", (8,)), 2, {0, 1}),
        (Call("exscan", 8, "int8", (8,)), 0, set()),
        (Call("bcast", 8, "int8", (8,), root=1), 2, {1}),
        (Call("bcast", 8, "int8", (8,), root=1), 1, {1}),
        (Call("gather", 8, "int8", (8,), root=1), 1, {0, 1, 2, 3}),
        (Call("gather", 8, "int8", (8,), root=1), 2, set()),
        (Call("gather", None, "int8", (8,), root=1, counts=(8, 8, 0, 1)), 1, {0, 1, 3}),
        (Call("reduce", 8, "int8", (8,), root=0), 0, {0, 1, 2, 3}),
        (Call("scatter", None, "int8", (8,), root=1, counts=(8, 8, 0, 1)), 2, set()),
        (Call("scatter", None, "int8", (8,), root=1, counts=(8, 8, 0, 1)), 3, {1}),
        (Call("allgather", None, "int8", (0, 2), counts=(1, 2, 0, 0)), 3, {0, 1}),
        (Call("alltoall", None, "int8", (4,), counts=(1, 1, 1, 1), arrivals=(0, 1, 2, 0)), 1, {1, 2}),
        (Call("alltoall", 4, "int8", (4,)), 1, {0, 1, 2, 3}),
        (Call("reduce_scatter", None, "int8", (4,), counts=(0, 1, 2, 1)), 0, set()),
        (Call("reduce_scatter", None, "int8", (4,), counts=(0, 1, 2, 1)), 1, {0, 1, 2, 3}),
        (Call("free"), 1, set()),
        (Call("several", parts=(Call("scan", 8, "int8", (8,)), Call("bcast", 8, "int8", (8,), root=3))), 1, {0, 3}),
    ],
    ids=str,
)
def test_whose_data_a_rank_needs(call: Call, rank: int, needed: set[int]) -> None:
    assert ranks_needed(doing(WORLD, 1, call)["call"], (0, 1, 2, 3), rank) == needed
