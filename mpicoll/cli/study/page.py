"""The page of a study, for readers who are new to the subject, as Markdown and as HTML."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from mpicoll.cli import formatting
from mpicoll.cli.study import report
from mpicoll.cli.study.figures import draw_all
from mpicoll.cli.study.laws import LAWS
from mpicoll.cli.study.methods import Method

_NAME = "synchronisation"

_INTRODUCTION = """\
# Parameter server or all-reduce?

In data-parallel training, each worker has the whole model and computes gradients on its own part of the data. Before
the next step all workers need the same new weights, so their gradients must be summed. There are two ways to do that.
With a parameter server, some ranks are servers: workers push their gradients to the servers, which update the weights,
and pull the new weights. With an all-reduce there are no servers: the workers sum the gradients among themselves, and
each updates its own copy of the weights.

On this page N is the size of the model in bytes, P the number of ranks, and S the number of servers among them.

![Which ranks exchange data: each worker with each server; rank 0 with all others; a tree; a ring]({patterns})

- **Parameter server**: each server holds a part of the model, N / S bytes. Each worker sends N bytes and receives N
  bytes, however many workers there are. A server does so for all P - S workers: N (P - S) / S bytes each way. More
  servers relieve each one, but they compute no gradients.
- **Master-worker**: rank 0 sums all gradients and sends the sum back. It is the simplest all-reduce, and all data
  passes through one link.
- **Tree**: pairs of ranks sum, then pairs of pairs, and so on; the sum takes the same way back.
- **Ring**: the gradients are cut into P chunks, which pass from neighbour to neighbour. All links are busy all the
  time, and each carries less than 2 N bytes, however many ranks there are. But 2 (P - 1) messages follow one another,
  which takes long for small models.
- **Halving-doubling**: the ranks exchange a half, a quarter and so on with partners at growing distances. If P is a
  power of two, these are the bytes of a ring in only 2 log2 P messages.
- **Native** is the all-reduce of the MPI library. With **shared memory** the ranks of one node read and write the same
  memory, without messages. **Hierarchical** is shared memory inside the nodes, and messages between them.

## The laws: bytes through a link

How long a step of a large model takes depends on the busiest link. This is what the busiest rank sends in one step; it
receives as many bytes.

{laws}

![The bytes of each law over the number of ranks]({bytes})
"""

_METHOD = """\
## How it was measured

A step is what lies between the gradients and the new weights: the sum of the gradients of all workers, and the update.
The first step of each method is compared with the exact result. Methods take turns in blocks of steps, of which the
first one is not timed; a time is the median over the blocks of the time of the slowest rank. Bytes are counted in the
schedules and, where each rank has a host of its own, by the counters of the network interfaces, which include the
headers of all protocols. A parameter server has fewer workers than ranks, so its sum has fewer gradients.
`mpicoll study sync --page DIR` writes this page.
"""

_OUTLOOK = """\
Native, shared memory and hierarchical are left out of the prediction: the MPI library chooses the algorithm of native
itself, shared memory ends at the node, and the simulator follows one schedule at a time, while hierarchical is several
collectives. No cluster of these sizes was measured.

In the prediction, with a fixed number of servers the time grows in proportion to the number of workers, as it does with
master-worker. It stays nearly the same if the number of servers grows too, but then a part of all ranks computes no
gradients. The bytes of a ring hardly grow with P, but the number of its messages does; those of a tree and of
halving-doubling follow one another only log2 P and 2 log2 P times.
"""


def write_page(folder: Path, study: dict[str, Any]) -> list[Path]:
    """Write the figures of a study, and the page as Markdown and HTML, to `folder`; return the files of the page.

    Raises SetupError without matplotlib.
    """
    formatting.require_matplotlib()
    folder.mkdir(parents=True, exist_ok=True)
    text = _compose(study, draw_all(folder, study))
    markdown, html = folder / f"{_NAME}.md", folder / f"{_NAME}.html"
    markdown.write_text(text)
    html.write_text(_make_html(text, folder))
    return [markdown, html]


def _compose(study: dict[str, Any], figures: dict[str, str]) -> str:
    """Return the page as Markdown."""
    parts = [_INTRODUCTION.format(laws=_tabulate_laws(), **figures).strip()]
    if "time" in figures:
        parts += ["## Measured", f"![The time of a step over the size of the model]({figures['time']})"]
        for run in study["runs"]:
            parts += _describe_run(run)
    if "prediction" in figures:
        parts += _describe_prediction(study["prediction"], figures["prediction"])
    parts.append(_METHOD.strip())
    return "\n\n".join(map(_wrap, parts)) + "\n"


def _wrap(part: str) -> str:
    """Return a paragraph in lines of 120 characters; other parts as they are."""
    return part if "\n" in part or part.startswith("!") else textwrap.fill(part, 120, break_on_hyphens=False)


def _tabulate(columns: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1) -> str:
    """Return a table of Markdown whose columns after the first `words` are aligned right."""
    rule = ["---" if place < words else "---:" for place in range(len(columns))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (columns, rule, *rows))


def _tabulate_laws() -> str:
    ranks = (4, 16, 64)
    rows = []
    for name, law in LAWS.items():
        for servers in (1, 4) if name == "parameter_server" else (0,):
            shares = [f"{float(law.busiest(one, servers)):.4g} N" if one > servers else "-" for one in ranks]
            rows.append([Method(name, servers).label, law.formula, law.source, *shares])
    return _tabulate(["method", "law", "source", *(f"P = {one}" for one in ranks)], rows, words=3)


def _describe_run(run: dict[str, Any]) -> list[str]:
    """Return the table of the largest model, and a sentence for each size."""
    sizes = report.sizes_of(run["points"])
    if not sizes:
        return []
    machine = run["machine"]
    columns, rows = report.rows_of(run, sizes[-1])
    cores = f"{machine['processor']}, {machine['cores']} cores for all ranks of a node"
    return [
        (
            f"**{report.describe(run)}, N = {formatting.nbytes(sizes[-1])}** ({cores}). Bytes are those of the busiest"
            " rank, each way."
        ),
        _tabulate(columns, rows),
        "\n".join(f"- {_find_fastest(run, nbytes)}" for nbytes in sizes),
    ]


def _find_fastest(run: dict[str, Any], nbytes: int) -> str:
    points = sorted((p for p in run["points"] if p["nbytes"] == nbytes), key=lambda point: point["seconds"])
    first, last = ({"label": Method(p["method"], p["servers"]).label, **p} for p in (points[0], points[-1]))
    return (
        f"N = {formatting.nbytes(nbytes)}: the fastest is {first['label']}, {formatting.seconds(first['seconds'])}; the"
        f" slowest is {last['label']}, which takes {last['seconds'] / first['seconds']:.1f} times as long."
    )


def _describe_prediction(prediction: dict[str, Any], figure: str) -> list[str]:
    ranks, cluster = report.shown_ranks(prediction), prediction["cluster"]
    nbytes = report.sizes_of(prediction["points"])[-1]
    rows = report.prediction_rows(prediction, nbytes, ranks)
    each = cluster["ranks_per_node"]
    alpha, links, sums = formatting.seconds(cluster["net_alpha"]), 1 / cluster["net_beta"], 1 / cluster["gamma"]
    return [
        "## Predicted for more ranks",
        (
            "The simulator follows the schedule of each method on a cluster that is described by a few numbers:"
            f" {'one rank' if each == 1 else f'{each} ranks'} on each node, {alpha} for each message between nodes,"
            f" links of {formatting.rate(links)} GB/s each way, and sums of {formatting.rate(sums)} GB/s."
            f" The model has N = {formatting.nbytes(nbytes)}."
        ),
        f"![The simulated time of a step over the number of ranks]({figure})",
        _tabulate(["method", *(f"P = {one}" for one in ranks)], rows),
        _OUTLOOK.strip(),
    ]


_STYLE = """\
body { font: 16px/1.55 system-ui, "DejaVu Sans", sans-serif; color: #222; max-width: 60rem; margin: 2rem auto;
       padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { border-bottom: 1px solid #ddd; padding: .3rem .8rem; text-align: left; }
.number { text-align: right; white-space: nowrap; }
figure { margin: 1.5rem 0; }
figure svg { max-width: 100%; height: auto; }
code { background: #f2f2f2; padding: 0 .25rem; }
"""


def _make_html(text: str, folder: Path) -> str:
    """Return the page as one file of HTML, with the figures in it."""
    blocks = text.strip().split("\n\n")
    body = "\n".join(_make_block(block, folder) for block in blocks)
    title = blocks[0].lstrip("# ")
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        f"<style>\n{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _make_block(block: str, folder: Path) -> str:
    """Return a heading, figure, list, table or paragraph of the page as HTML."""
    if heading := re.fullmatch(r"(#+) (.*)", block):
        level = len(heading[1])
        return f"<h{level}>{_mark_up(heading[2])}</h{level}>"
    if figure := re.fullmatch(r"!\[(.*)\]\((.*)\)", block):
        svg = (folder / figure[2]).read_text()
        return f'<figure role="img" aria-label="{escape(figure[1])}">\n{svg[svg.index("<svg") :]}</figure>'
    if block.startswith("- "):
        return "<ul>\n" + "\n".join(f"<li>{_mark_up(item)}</li>" for item in block[2:].split("\n- ")) + "\n</ul>"
    if block.startswith("| "):
        head, rule, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines())
        kinds = [' class="number"' if cell.endswith(":") else "" for cell in rule]
        lines = []
        for tag, cells in (("th", head), *(("td", row) for row in rows)):
            filled = (f"<{tag}{kind}>{_mark_up(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))
            lines.append(f"<tr>{''.join(filled)}</tr>")
        return "<table>\n" + "\n".join(lines) + "\n</table>"
    return f"<p>{_mark_up(block)}</p>"


def _mark_up(text: str) -> str:
    """Return text as HTML, with its bold words and code."""
    bold = re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", escape(text, quote=False))
    return re.sub(r"`(.+?)`", r"<code>\1</code>", bold)
