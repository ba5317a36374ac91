"""Pictures of docs/ that are made from code are as the code makes them."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest
from support.launch import ROOT

from mpicoll import schedules


@pytest.fixture(scope="module")
def drawings() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_collectives", ROOT / "ci" / "docs" / "collectives.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_collectives(drawings: ModuleType) -> None:
    """To write them anew: python ci/docs/collectives.py docs/images"""
    for name in drawings.MOVES:
        assert (ROOT / "docs" / "images" / f"collective-{name}.svg").read_text() == drawings.draw(name), name


def test_contributions(drawings: ModuleType) -> None:
    """The masks of a drawing are those of its numbers."""
    everyone = (1 << drawings.RANKS) - 1
    for name in ("bcast", "scatter", "gather", "allgather", "alltoall"):
        for _, after in drawings.call(name):
            if after is not None:
                assert after.masks == [1 << number // 10 for number in after.numbers], name
    for name in ("reduce", "allreduce", "reduce_scatter"):
        after = drawings.call(name)[0][1]
        assert after.masks == [everyone] * len(after.numbers)


@pytest.mark.parametrize("name", ["ring", "recursive_doubling"])
def test_animations(name: str) -> None:
    """To write them anew: mpicoll algorithms draw allreduce/NAME --ranks 4 --animate --output FILE"""
    file = ROOT / "docs" / "images" / f"{name.replace('_', '-')}.svg"
    assert file.read_text() == schedules.animate(f"allreduce/{name}", 4)
