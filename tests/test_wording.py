"""Lists of ranks and plurals in messages."""

from __future__ import annotations

import pytest

from mpicoll import wording


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], "no rank"),
        ([3], "rank 3"),
        ([3, 3], "rank 3"),
        ([1, 0], "ranks 0 and 1"),
        ([7, 2, 0, 3, 5, 4], "ranks 0, 2-5 and 7"),
        (range(64), "ranks 0-63"),
        (range(0, 40, 2), "20 ranks (0, 2, 4, 6, 8, 10, 12, 14, …)"),
    ],
)
def test_rank_list(ranks: list[int], text: str) -> None:
    assert wording.rank_list(ranks) == text


def test_numbers_and_verbs() -> None:
    assert wording.number_list("chunk", [2, 0, 1]) == "chunks 0-2"
    assert [wording.count(n, "row") for n in (0, 1, 2)] == ["0 rows", "1 row", "2 rows"]
    assert [wording.count(n, "batch", "batches") for n in (1, 2)] == ["1 batch", "2 batches"]
    assert wording.ranks_and_verb([4], "has", "have") == "rank 4 has"
    assert wording.ranks_and_verb([4, 5], "has", "have") == "ranks 4 and 5 have"
    assert [wording.inflect_phrase("is late", ranks) for ranks in ([1], [1, 2])] == ["is late", "are late"]


def test_lists_of_words() -> None:
    words = ["a", "b", "c", "d"]
    assert [wording.join_and(words[:n]) for n in range(4)] == ["", "a", "a and b", "a, b and c"]
    assert wording.shorten(words, most=3) == words
    assert wording.shorten(words, "ranks", most=2) == ["a", "b", "and 2 more ranks"]
