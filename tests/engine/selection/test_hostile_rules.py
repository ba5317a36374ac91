"""Rules and tuned tables that were changed in any way: an error of ours, and no other exception."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.hostile_json import FUZZING, VALUES, places, replaced

from mpicoll.engine.selection import tuned_table
from mpicoll.engine.selection.layout import NodeLayout
from mpicoll.engine.selection.rules import format_rules, parse_rules
from mpicoll.errors import AlgorithmError

WORDS = st.sampled_from(
    [
        "allreduce",
        "bcast",
        "chain",
        "ring",
        "native",
        "inf",
        "0",
        "1",
        "64k",
        "1g",
        "9" * 30,
        "²",
        ":",
        "-",
        ",",
        ";",
        "/",
    ]
)


@pytest.mark.parametrize("examples", [300, FUZZING])
def test_any_rules_are_parsed_or_refused(examples: int) -> None:
    @settings(max_examples=examples, database=None)
    @given(st.one_of(st.text(max_size=40), st.lists(WORDS, max_size=12).map("".join)))
    def parse(text: str) -> None:
        try:
            rules = parse_rules(text)
        except AlgorithmError:
            return
        assert parse_rules(format_rules(rules)) == rules

    parse()


@pytest.mark.parametrize("examples", [150, FUZZING])
def test_any_change_of_a_table_is_read_or_refused(tmp_path: Path, examples: int) -> None:
    costs = {"node": [1e-6, 1e-10], "network": None, "gamma": 1e-10}
    rules = {"float": parse_rules("allreduce:0-64k:native,64k-inf:ring;bcast:chain/8")}
    entry = tuned_table.make_entry("Open MPI", NodeLayout(2, 1, 2), rules, costs, "2026-01-01")
    whole = {"format": tuned_table.FORMAT, "version": tuned_table.VERSION, "entries": [entry]}
    path = tmp_path / "tuned.json"

    @settings(max_examples=examples, database=None)
    @given(st.data())
    def change(data: st.DataObject) -> None:
        place = data.draw(st.sampled_from(places(whole)))
        path.write_text(json.dumps(replaced(whole, place, data.draw(VALUES | st.just(...)))))
        try:
            entries = tuned_table.load(path)
        except tuned_table.InvalidTable:
            return
        tuned_table.make_table(entries, str(path))

    change()
