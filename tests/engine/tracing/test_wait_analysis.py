"""Wait times in collectives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from support.traces import ALLREDUCE, BARRIER, message, part

from mpicoll.engine.tracing import parts


def test_waiting_and_awaited_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    for rank, begin in enumerate((1000.000, 1000.030, 1000.010)):
        part(
            folder, rank, [("0.0", 1, ALLREDUCE, begin, 1000.040), ("0.0", 2, BARRIER, 1000.050, 1000.060 + begin % 1)]
        )
    table = parts.load_parts(folder)
    assert table.job == "job"
    assert table.missing == []
    assert table.rank.tolist() == [0, 0, 1, 1, 2, 2]
    np.testing.assert_allclose(table.begin, [0, 50e3, 30e3, 50e3, 10e3, 50e3], atol=1e-3)
    np.testing.assert_allclose(table.wait, [30e3, 0, 0, 0, 20e3, 0], atol=1e-3)
    assert table.last[[0, 2, 4]].tolist() == [1, 1, 1]


def test_collectives_are_distinguished_by_communicator_and_number(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    comms = {"0.0": [0, 1], "0.1": [1, 0]}
    mine = [("0.0", 1, 1001.0, 1003.0), ("0.0", 2, 1003.0, 1003.5), ("0.1", 1, 1004.0, 1009.0)]
    theirs = [("0.1", 1, 1008.0, 1009.0), ("0.0", 1, 1002.0, 1003.0), ("0.0", 2, 1003.0, 1003.5)]
    for rank, calls in enumerate((mine, theirs)):
        part(folder, rank, [(comm, number, ALLREDUCE, *times) for comm, number, *times in calls], comms=comms)
    table = parts.load_parts(folder)
    np.testing.assert_allclose(table.wait, [1e6, 0, 4e6, 0, 0, 0], atol=1e-3)


def test_who_is_done_before_the_last_one_comes_has_not_waited_for_it(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    for rank, (begin, end) in enumerate(((1000.0, 1000.001), (1002.0, 1002.5), (1001.0, 1003.0))):
        part(folder, rank, [("0.0", 1, ALLREDUCE, begin, end)])
    np.testing.assert_allclose(parts.load_parts(folder).wait, [1e3, 0, 1e6], atol=1e-3)


def test_messages_wait_for_no_rank(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    part(folder, 0, [("0.0", 0, message("send", 1, 0), 1000.0, 1000.1)])
    part(folder, 1, [("0.0", 0, message("recv", 0, 0), 1000.2, 1000.3)])
    table = parts.load_parts(folder)
    assert np.isnan(table.wait).all()
    assert table.last.tolist() == [-1, -1]
