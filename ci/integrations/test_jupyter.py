"""mpicoll.spawn in a notebook: functions of the notebook run on ranks, and their errors are shown in it."""

from __future__ import annotations

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

FIRST = """\
import numpy as np
import mpicoll

scale = 2.5

def total(rank, count):
    print(f"rank {rank} is here")
    return mpicoll.allreduce(np.full(count, scale * (rank + 1)))"""

SECOND = """\
results = mpicoll.spawn(total, args=(3,), nprocs=2, timeout=100)
[one.tolist() for one in results]"""


def execute(*cells: str) -> list[nbformat.NotebookNode]:
    """Execute a notebook of these cells, and return them with their outputs."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, timeout=100, kernel_name="python3").execute()
    return notebook.cells


def test_results_and_output() -> None:
    *_, last = execute(FIRST, SECOND)
    (result,) = [one for one in last.outputs if one.output_type == "execute_result"]
    assert result.data["text/plain"] == "[[7.5, 7.5, 7.5], [7.5, 7.5, 7.5]]"
    printed = "".join(one.text for one in last.outputs if one.output_type == "stream")
    assert sorted(printed.split("\n")) == ["", "rank 0 is here", "rank 1 is here"]


def test_error() -> None:
    with pytest.raises(CellExecutionError, match="ZeroDivisionError") as caught:
        execute(FIRST, "mpicoll.spawn(lambda rank: 1 / rank, nprocs=2, timeout=100)")
    assert caught.value.ename == "SpawnError"
