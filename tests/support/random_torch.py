"""Long random programs on torch.distributed, on the backend mpicoll; see random_programs, whose sibling this is.

What is called and compared are the bodies of tests/torch/test_collectives.py, with choices drawn instead of listed, and
any number of operations under way at once.
"""

from __future__ import annotations

import importlib.util
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from support.process_group import ORDERED
from support.random_programs import OPERATIONS, REPEATABLE, ROWS

LONG = (1021, 4099, 20_001, 65_537, 300_007)


def _load(name: str, path: Path) -> Any:
    """A module of tests/torch, a folder which must not be searched for modules: it is called as torch itself."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


cases = _load("collectives_of_torch", Path(__file__).parents[1] / "torch" / "test_collectives.py")
BODIES = cases.MOVES | cases.REDUCTIONS


@dataclass
class Place:
    """A group by its ranks, in their order, and what this rank passes as ``group``."""

    members: tuple[int, ...]
    group: Any


@dataclass
class Later(cases.Case):
    """A case that may be waited for later."""

    work: Any = field(default=None)

    def launch(self, function: Any) -> None:
        if self.row["way"] != "later":
            super().launch(function)
            return
        for one in (*self.inputs, *(laid for laid, _ in self.outputs)):
            one.keep()
        self.work = function(True)

    def finish(self) -> None:
        with self.mode():
            self.work.wait()
            self.check()


@dataclass
class Message:
    """A message under way: its works, and on the receiver's side the tensor and what must be in it."""

    works: Sequence[Any]
    tensor: torch.Tensor
    want: np.ndarray | None

    def finish(self) -> None:
        for work in self.works:
            work.wait()
        if self.want is not None:
            got = cases.array_of(self.tensor)
            np.testing.assert_array_equal(got, self.want.astype(got.dtype))


def run(seed: object, number: int, operations: int = OPERATIONS, *, sleeps: bool = False) -> Counter[str]:
    """Carry out program `number` of `seed` on this rank, and say what was done. All ranks call it alike.

    Makes the default process group if there is none. Raises AssertionError at the first wrong result.
    """
    if not dist.is_initialized():
        dist.init_process_group("mpicoll")
        torch.set_num_threads(1)
    with warnings.catch_warnings():
        # torch 2.13 has new names for some collectives; the old ones are called as well
        warnings.simplefilter("ignore", FutureWarning)
        return Program(seed, number, sleeps=sleeps).run(operations)


class Program:
    """One rank that carries out a program."""

    def __init__(self, seed: object, number: int, *, sleeps: bool) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.name = f"program {number} of seed {seed}"
        self.draw = Random(f"torch {seed} {number}")
        self.own = Random(f"torch {seed} {number} {self.rank}")
        self.sleeps = sleeps
        self.places = [Place(tuple(range(self.size)), None)]
        self.waiting: list[tuple[Later | Message, Place, str]] = []
        self.kinds: list[tuple[Place, str, dict[str, Any]]] = []
        self.done: Counter[str] = Counter()
        self.line = 0
        self.where = ""

    def run(self, operations: int) -> Counter[str]:
        try:
            for self.line in range(operations):
                self.step()
            self.wait(len(self.waiting))
            while len(self.places) > 1:
                self.destroy(self.places.pop())
        except Exception as error:
            raise AssertionError(
                f"{self.name}, operation {self.line}, rank {self.rank} of {self.size}: {self.where}: {error!r}"
            ) from error
        return self.done

    def step(self) -> None:
        kinds = {self.collective: 70, self.pair: 5, self.permutation: 6, self.objects: 4, self.barrier: 3}
        kinds |= {self.make_place: 4, self.destroy_one: 3}
        kind = self.draw.choices(list(kinds), list(kinds.values()))[0]
        if self.sleeps and self.own.random() < 0.1:
            time.sleep(self.own.uniform(0, 2e-3))
        kind()
        if self.own.random() < 0.3:
            self.wait(self.own.randint(0, 3))

    # --- groups

    def place(self) -> Place:
        return self.places[0] if self.draw.random() < 0.3 else self.draw.choice(self.places)

    def member(self, place: Place) -> bool:
        return self.rank in place.members

    def make_place(self) -> None:
        if len(self.places) > 6:
            return
        members = self.draw.sample(range(self.size), self.draw.randint(1, self.size))
        ordered = self.draw.random() < 0.5 or not ORDERED
        self.where = f"new_group {members}, sort_ranks={ordered}"
        self.done["groups: made"] += 1
        group = dist.new_group(members) if ordered else dist.new_group(members, sort_ranks=False)
        self.places.append(Place(tuple(sorted(members) if ordered else members), group))

    def destroy_one(self) -> None:
        if len(self.places) > 1:
            place = self.places.pop(self.draw.randrange(1, len(self.places)))
            self.kinds = [one for one in self.kinds if one[0] is not place]
            self.destroy(place)

    def destroy(self, place: Place) -> None:
        for one in [one for one in self.waiting if one[1] is place]:
            self.finish(one)
        self.where = f"destroy_process_group {place.members}"
        if self.member(place):
            dist.destroy_process_group(place.group)

    # --- waiting

    def finish(self, one: tuple[Later | Message, Place, str]) -> None:
        self.waiting.remove(one)
        self.where = one[2]
        one[0].finish()

    def wait(self, count: int) -> None:
        for one in self.own.sample(self.waiting, min(count, len(self.waiting))):
            self.finish(one)

    # --- collectives

    def collective(self) -> None:
        if self.kinds and self.draw.random() < 0.65:
            # Of the kind of an earlier one, for which something was prepared.
            place, operation, row = self.draw.choice(self.kinds)
            row = row | self.form(row["shape"])
        else:
            place, operation = self.place(), self.draw.choice(list(BODIES))
            row = self.row(operation)
            self.kinds = [*self.kinds, (place, operation, row)][-REPEATABLE:]
        row["line"] = f"{self.name} {self.line}"
        if not self.member(place):
            return
        self.where = f"{operation} {row} on {place.members}"
        for kind in ("dtype", "layout", "way", "face", "mode"):
            self.done[f"{kind}: {row[kind]}"] += 1
        if operation in cases.REDUCTIONS:
            self.done[f"op: {row['op']}"] += 1
        self.done[f"collective: {operation}"] += 1
        case = Later(operation, row, place.group)
        with case.mode():
            BODIES[operation](case)
            if case.work is None:
                case.check()
            else:
                self.waiting.append((case, place, self.where))

    def row(self, operation: str) -> dict[str, Any]:
        draw = self.draw
        row: dict[str, Any] = {"op": "sum"}
        row["dtype"] = draw.choice(
            cases.REDUCIBLE if operation in cases.REDUCTIONS else (*cases.REDUCIBLE, *cases.FLOAT8)
        )
        if operation in cases.REDUCTIONS:
            row["op"] = draw.choice([op for op in cases.OPS if cases.means(op, row["dtype"])])
        row["shape"] = self.shape()
        row |= self.form(row["shape"])
        row["root"] = draw.choice(("first", "last", "last of group"))
        row["sizes"] = draw.choice(("even", "even", "uneven", "zeros"))
        row["stack"] = draw.random() < 0.5
        return row

    def form(self, shape: tuple[int, ...]) -> dict[str, Any]:
        """Draw how a collective is called, and how its tensors lie."""
        draw = self.draw
        return {
            "layout": draw.choice([layout for layout in cases.LAYOUTS if cases.fits(layout, shape)]),
            "way": draw.choice(("sync", "sync", "sync", "wait", "future", "drop", "later", "later")),
            "face": draw.choice(("stock", "drop-in")),
            "mode": draw.choice(("plain", "plain", "grad", "no_grad", "inference")),
        }

    def shape(self) -> tuple[int, ...]:
        draw, kind = self.draw, self.draw.random()
        if kind < 0.08:
            return ()
        if kind < 0.6:
            return (draw.choice(ROWS),)
        if kind < 0.97:
            return tuple(draw.choice(ROWS[:7]) for _ in range(draw.randint(2, 4)))
        return (draw.choice(LONG),)

    def barrier(self) -> None:
        place = self.place()
        if self.member(place):
            self.where = f"barrier on {place.members}"
            self.done["collective: barrier"] += 1
            dist.barrier(place.group)

    def objects(self) -> None:
        """Objects of different sizes, of all and of one."""
        place, root = self.place(), self.draw.random()
        if not self.member(place):
            return
        self.where = f"objects on {place.members}"
        self.done["collective: objects"] += 1
        got: list[Any] = [None] * len(place.members)
        dist.all_gather_object(got, (self.line, "x" * 10 * self.rank, self.rank), place.group)
        assert got == [(self.line, "x" * 10 * other, other) for other in place.members]
        source = place.members[int(root * len(place.members))]
        one = [{"from": self.rank, "line": self.line}]
        dist.broadcast_object_list(one, src=source, group=place.group)
        assert one == [{"from": source, "line": self.line}]

    # --- messages

    def message(self, what: str, rank: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
        return cases.values((self.name, self.line, what, rank), name, shape)

    def pair(self) -> None:
        """One sends, another one receives, maybe from anybody."""
        place, shape, name = self.place(), self.shape(), self.draw.choice(cases.REDUCIBLE)
        known = self.draw.random() < 0.6
        if len(place.members) < 2:
            return
        source, dest = self.draw.sample(place.members, 2)
        tag = self.line % 30_000
        self.where = f"send {name} {shape} from {source} to {dest} on {place.members}"
        values = self.message("pair", source, name, shape)
        if self.rank == source:
            self.done["messages: send"] += 1
            dist.send(cases.tensor_of(name, values), dest, group=place.group, tag=tag)
        elif self.rank == dest:
            tensor = torch.empty_like(cases.tensor_of(name, values))
            assert dist.recv(tensor, source if known else None, group=place.group, tag=tag) == source
            Message((), tensor, values).finish()

    def permutation(self) -> None:
        """Everybody sends to another one and receives from another one, in the background."""
        place, shape, name = self.place(), self.shape(), self.draw.choice(cases.REDUCIBLE)
        order = self.draw.sample(place.members, len(place.members))
        batch = self.draw.random() < 0.4
        if len(order) < 2 or not self.member(place):
            return
        here = order.index(self.rank)
        dest, source = order[(here + 1) % len(order)], order[here - 1]
        tag = self.line % 30_000
        self.where = f"isend and irecv {name} {shape} in the ring {order} of {place.members}"
        self.done[f"messages: {'batch_isend_irecv' if batch else 'isend'}"] += 1
        want = self.message("ring", source, name, shape)
        leaving = cases.tensor_of(name, self.message("ring", self.rank, name, shape))
        arriving = torch.empty_like(leaving)
        if batch:
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, leaving, dest, place.group, tag),
                    dist.P2POp(dist.irecv, arriving, source, place.group, tag),
                ]
            )
        else:
            works = [
                dist.isend(leaving, dest, place.group, tag),
                dist.irecv(arriving, source, place.group, tag),
            ]
        self.waiting.append((Message(works, arriving, want), place, self.where))
