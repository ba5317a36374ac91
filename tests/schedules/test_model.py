from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from mpicoll import schedules
from mpicoll.errors import AlgorithmError, RankError
from mpicoll.schedules import Recv, Round, Send, algorithm, algorithms_of, collectives, find, get, model


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry of one's own."""
    monkeypatch.setattr(model, "_REGISTRY", {name: algorithms_of(name) for name in collectives()})


def test_registering_an_algorithm(registry: None) -> None:
    @algorithm("bcast", name="flat", rounds="min(1, P - 1)", sent="P - 1")
    def generate(rank: int, size: int, root: int) -> Iterator[Round]:
        """Straight from the root. One round."""
        if rank != root:
            yield Round(recvs=(Recv(root, range(1)),))
        elif size > 1:
            yield Round(sends=tuple(Send(to, range(1)) for to in range(size) if to != root))

    flat = get("bcast", "flat")
    assert flat.generate is generate
    assert flat.doc == "Straight from the root. One round."
    assert (flat.segmented, flat.uneven, flat.ordered, flat.any_root) == (False, True, False, False)
    assert schedules.verify("bcast/flat", 5, root=3).messages == 4
    assert schedules.closed_form(flat, 5) == (1, 4)


def test_the_registry_is_not_handed_out() -> None:
    algorithms_of("bcast").clear()
    assert "binomial" in algorithms_of("bcast")
    assert algorithms_of("nope") == {}


def test_find() -> None:
    ring = get("allreduce", "ring")
    assert find(ring) is ring
    assert find("allreduce/ring") is ring
    with pytest.raises(AlgorithmError, match="write collective/name, such as 'allreduce/ring'"):
        find("ring")
    with pytest.raises(AlgorithmError, match="bcast has no algorithm 'ring'; there are native, binomial, chain"):
        find("bcast/ring")
    with pytest.raises(AlgorithmError, match="no collective 'nope'; there are allgather, allreduce"):
        get("nope", "ring")


def test_schedule() -> None:
    schedule = get("reduce", "binomial").schedule(3, 4, root=1)
    assert (schedule.collective, schedule.algorithm) == ("reduce", "binomial")
    assert (schedule.rank, schedule.size, schedule.root) == (3, 4, 1)
    assert schedule.rounds == (Round(recvs=(Recv(0, range(1), reduce=True),)), Round(sends=(Send(1, range(1)),)))
    with pytest.raises(FrozenInstanceError):
        schedule.rank = 0  # type: ignore[misc]


def test_schedules_are_built_once() -> None:
    binomial, chain = get("bcast", "binomial"), get("bcast", "chain")
    assert binomial.schedule(1, 4) is binomial.schedule(1, 4)
    assert binomial.schedule(1, 4, segments=5) is binomial.schedule(1, 4)
    assert chain.schedule(1, 4, segments=5) is not chain.schedule(1, 4)


@pytest.mark.parametrize(
    ("name", "segments", "slots"),
    [
        ("allreduce/ring", 1, (6, 0)),
        ("allreduce/double_tree", 3, (6, 0)),
        ("allreduce/halving_doubling", 1, (4, 0)),
        ("allgather/ring", 1, (6, 0)),
        ("alltoall/pairwise", 1, (12, 0)),
        ("alltoall/bruck", 1, (12, 6)),
        ("barrier/dissemination", 1, (0, 0)),
        ("bcast/binomial", 7, (1, 0)),
        ("bcast/chain", 7, (7, 0)),
        ("exscan/recursive_doubling", 1, (1, 2)),
    ],
)
def test_slots(name: str, segments: int, slots: tuple[int, int]) -> None:
    assert find(name).slots(6, segments) == slots
    schedule = find(name).schedule(0, 6, segments=segments)
    assert (schedule.chunks, schedule.scratch) == slots


@pytest.mark.parametrize(("rank", "size", "root"), [(-1, 4, 0), (4, 4, 0), (0, 4, 4), (0, 4, -1), (0, 0, 0)])
def test_ranks_out_of_range(rank: int, size: int, root: int) -> None:
    with pytest.raises(RankError, match=r"bcast/binomial: rank .* and root .* must be in \[0, "):
        get("bcast", "binomial").schedule(rank, size, root)
    with pytest.raises(RankError):
        get("bcast", "binomial").steps(rank, size, root)


def test_segments_out_of_range() -> None:
    with pytest.raises(AlgorithmError, match="bcast/chain: segments must be at least 1, got 0"):
        get("bcast", "chain").schedule(0, 4, segments=0)


def test_keeps_order() -> None:
    assert get("reduce", "linear").keeps_order(3)
    assert get("reduce", "binomial").keeps_order(0)
    assert not get("reduce", "binomial").keeps_order(3)
    assert not get("allreduce", "ring").keeps_order(0)


def test_public_names() -> None:
    assert len(set(schedules.__all__)) == len(schedules.__all__)
    assert all(hasattr(schedules, name) for name in schedules.__all__)


def test_needs_the_standard_library_only() -> None:
    """Loaded by itself, without the rest of mpicoll, and with nothing that was installed."""
    root = Path(model.__file__).parents[1]
    code = f"""
import sys, types
package = types.ModuleType("mpicoll")
package.__path__ = [{str(root)!r}]
sys.modules["mpicoll"] = package
before = set(sys.modules)
import mpicoll.schedules
assert mpicoll.schedules.verify("allreduce/ring", 5).messages == 40
assert "mpicoll" in mpicoll.schedules.__name__
loaded = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print(sorted(loaded - sys.stdlib_module_names - {{"mpicoll"}}))
"""
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
