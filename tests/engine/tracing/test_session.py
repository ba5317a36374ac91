"""Traces of several ranks, from the begin to the merged file."""

from __future__ import annotations

import os
import stat
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.ranks import Ranks
from support.traces import operations, read

import mpicoll
from mpicoll.engine.diagnostics import process_exit
from mpicoll.engine.trace import trace
from mpicoll.engine.tracing import parts, session, trace_files
from mpicoll.engine.tracing.session import TraceSession


def test_written_before_the_end(tmp_path: Path) -> None:
    """For who ends the process."""

    def body() -> Path:
        under_way = TraceSession(tmp_path, mpicoll.world()._core.transport, 10.0)
        mpicoll.barrier()
        process_exit.exit_hooks[-1]()
        assert len(parts.load_parts(under_way._folder)) == 1
        under_way.stop()
        return under_way._folder

    before = process_exit.exit_hooks.copy()
    (folder,) = mpicoll.run_local(body, 1)
    assert len(parts.load_parts(folder)) == 1
    assert process_exit.exit_hooks == before


def test_no_other_user_can_write_to_the_folder_of_the_parts(tmp_path: Path) -> None:
    """They could place links there, whatever the permissions of the folder of the traces are."""
    tmp_path.chmod(0o777)
    precious = tmp_path / "precious"
    precious.write_text("data")

    def body() -> tuple[int, Path]:
        under_way = TraceSession(tmp_path, mpicoll.world()._core.transport, 10.0)
        (tmp_path / f"{under_way.job}.json").symlink_to(precious)
        mode = under_way._folder.stat().st_mode
        under_way.finish()
        return mode, under_way.path

    before = os.umask(0)
    try:
        [(mode, path)] = mpicoll.run_local(body, 1)
    finally:
        os.umask(before)
    assert stat.S_IMODE(mode) == 0o700
    assert path.is_file()
    assert not path.is_symlink()
    assert precious.read_text() == "data"


def test_a_rank_that_is_gone_at_the_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def body() -> None:
        under_way = TraceSession(tmp_path, mpicoll.world()._core.transport, 10.0)
        mpicoll.barrier()
        if mpicoll.world().rank == 1:
            under_way.stop()
            under_way._part.unlink()
        else:
            under_way.finish()

    mpicoll.run_local(body, 3)
    (file,) = tmp_path.glob("*.json")
    assert {one["pid"] for one in operations(read(file))} == {0, 2}
    assert trace_files.load(file).missing == [1]
    assert "rank 1 has exited" in capfd.readouterr().err


def test_parts_that_rank_0_does_not_see(several: Ranks, tmp_path: Path) -> None:
    """On other hosts, their folders are others."""
    where = several.share(tmp_path)

    def body() -> Path:
        world = mpicoll.world()
        with trace(where / f"host{world.rank}") as path:
            for _ in range(2000):
                mpicoll.barrier()
        mpicoll.barrier()
        return path

    several(body)
    (file,) = (where / "host0").iterdir()
    assert len(operations(read(file))) == 2000 * several.size
    for rank in range(1, several.size):
        assert list((where / f"host{rank}").iterdir()) == []


def test_chunks_of_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_CHUNK", 100)
    test_parts_that_rank_0_does_not_see(Ranks("local-2"), tmp_path)


class Apart:
    """A transport each rank of which is a node of its own."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self.nodes = tuple(range(transport.size))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def test_clocks_that_differ(several: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is 1000 s ahead of the one before, and 1 s more at the end. What is read is a little late, never early."""
    later = threading.local()

    def clock() -> float:
        return time.monotonic() + (1000 + getattr(later, "by", 0)) * mpicoll.world().rank

    monkeypatch.setattr(session, "clock", clock)
    where = several.share(tmp_path)

    def body() -> parts.Clocks:
        under_way = TraceSession(where, Apart(mpicoll.world()._core.transport), 30.0)
        mpicoll.barrier()
        later.by = 1
        under_way.finish()
        return under_way._clocks

    clocks = several(body)[0]
    assert set(clocks) == (set(range(1, several.size)) if several.local or mpicoll.world().rank == 0 else set())
    for node, ((first, before), (second, after)) in clocks.items():
        assert before == pytest.approx(1000 * node, abs=0.2)
        assert after == pytest.approx(1001 * node, abs=0.2)
        assert first - before <= second - after + 0.4
    mpicoll.barrier()
    (file,) = where.iterdir()
    if not several.local:
        return  # who has begun when is shown by clocks that were not changed for that
    table = trace_files.load(file)
    barrier = table.begin[[table.calls[one]["name"] == "barrier" for one in table.call]]
    # Their begins were taken from one clock; as though from several, they are as far apart as those.
    np.testing.assert_allclose(barrier[:-1] - barrier[1:], 1000e6, rtol=2e-3)


def test_ranks_of_one_node_have_one_clock(tmp_path: Path) -> None:
    def body() -> parts.Clocks:
        under_way = TraceSession(tmp_path, mpicoll.world()._core.transport, 10.0)
        under_way.finish()
        return under_way._clocks

    clocks, *_ = mpicoll.run_local(body, 4, ranks_per_node=2)
    assert set(clocks) == {1}
    assert len(clocks[1]) == 2
