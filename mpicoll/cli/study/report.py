"""Output of the study: tables and JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mpicoll.cli import formatting
from mpicoll.cli.study.methods import Method
from mpicoll.errors import ArgumentError


def read(path: Path) -> dict[str, Any]:
    """Return the study in a file of ``mpicoll study sync --json``. Raises ArgumentError if the file is another one."""
    try:
        study: dict[str, Any] = json.loads(path.read_text())
        for run in study["runs"]:
            _check(run)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise ArgumentError(f"study sync: {path} is not what `mpicoll study sync --json` writes: {error!r}") from error
    return study


_KINDS = {"ranks": int, "nodes": int, "points": list, "absent": dict, "machine": dict}
"""Keys of a run that tables, figures and pages need, and the kinds of their values."""


def _check(run: dict[str, Any]) -> None:
    """Raise an exception if something that is shown of `run` is missing or of another kind."""
    for key, kind in _KINDS.items():
        if not isinstance(run[key], kind):
            raise TypeError(f"{key} is {run[key]!r}")
    if run["ranks"] < 1:
        raise ValueError(f"there are {run['ranks']} ranks")
    if absent := {"processor", "cores"} - run["machine"].keys():
        raise KeyError(*absent)
    for point in run["points"]:
        Method(point["method"], point["servers"]).law(run["ranks"])
        formatting.nbytes(point["nbytes"])
        formatting.seconds(point["seconds"])
        if point["wire"]:
            busiest(point)


COLUMNS = ("method", "time", "counted", "law")
"""The columns of a table of one size; ``wire`` is added where it was measured."""


def rows_of(run: dict[str, Any], nbytes: int) -> tuple[list[str], list[list[str]]]:
    """Return the columns and the rows of the table of one size of the model."""
    points = [point for point in run["points"] if point["nbytes"] == nbytes]
    wired = any(point["wire"] for point in points)
    rows = []
    for point in points:
        method = Method(point["method"], point["servers"])
        row = [method.label, formatting.seconds(point["seconds"])]
        row += [_amount(share, nbytes) for share in (method.count_bytes(run["ranks"]), method.law(run["ranks"]))]
        if wired:
            row.append(formatting.nbytes(busiest(point)))
        rows.append(row)
    return [*COLUMNS, *(["on the wire"] if wired else [])], rows


def busiest(point: dict[str, Any]) -> float:
    """Return the bytes per step on the wire of the busiest rank, in its busier direction."""
    return float(max(max(pair) for pair in point["wire"]))


def _amount(share: Any, nbytes: int) -> str:
    return "-" if share is None else formatting.nbytes(float(share * nbytes))


def sizes_of(points: list[dict[str, Any]]) -> list[int]:
    """Return the sizes of the model among some points, in ascending order."""
    return sorted({point["nbytes"] for point in points})


def describe(run: dict[str, Any]) -> str:
    """Return the ranks and nodes of a run as text, with its label."""
    nodes, label = run["nodes"], run.get("label")
    text = f"{run['ranks']} ranks on {'one node' if nodes == 1 else f'{nodes} nodes'}"
    return f"{text}, {label}" if label else text


def prediction_rows(prediction: dict[str, Any], nbytes: int, ranks: list[int]) -> list[list[str]]:
    """Return a row for each predicted line, with its label and the times at `ranks`."""
    found = {(p["label"], p["ranks"]): p["seconds"] for p in prediction["points"] if p["nbytes"] == nbytes}
    labels = dict.fromkeys(label for label, _ in found)
    return [
        [label, *(formatting.seconds(found[label, one]) if (label, one) in found else "-" for one in ranks)]
        for label in labels
    ]


def shown_ranks(prediction: dict[str, Any]) -> list[int]:
    """Return the numbers of ranks that the table of a prediction shows."""
    every = sorted({point["ranks"] for point in prediction["points"]})
    return every[::-2][:4][::-1]


def show(study: dict[str, Any]) -> None:
    """Print the tables."""
    console = formatting.console()
    for run in study["runs"]:
        for nbytes in sizes_of(run["points"]):
            columns, rows = rows_of(run, nbytes)
            title = f"{describe(run)}, a model of N = {formatting.nbytes(nbytes)}: one step"
            console.print(formatting.table(title, columns, rows))
        for name, reason in run["absent"].items():
            console.print(f"without {name}: {reason.partition(';')[0]}")
    prediction = study["prediction"]
    if prediction is not None and prediction["points"]:
        nbytes, ranks = sizes_of(prediction["points"])[-1], shown_ranks(prediction)
        title = f"simulated, a model of N = {formatting.nbytes(nbytes)}: time of one step on P ranks"
        columns = ["method", *(f"P = {one}" for one in ranks)]
        console.print(formatting.table(title, columns, prediction_rows(prediction, nbytes, ranks)))
    console.print(
        "counted, law: bytes that the busiest rank sends (it receives as many),\n"
        "counted in the schedule, and in closed form"
    )
