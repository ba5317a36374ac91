"""The verifier finds what is wrong: with algorithms broken by hand, and with ours after any small change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError, replace

import pytest

from mpicoll.errors import AlgorithmError, RankError, ScheduleError
from mpicoll.schedules import (
    Algorithm,
    Copy,
    Recv,
    Reduce,
    Report,
    Round,
    Send,
    algorithms_of,
    collectives,
    verify,
)
from mpicoll.schedules.model import Generator


def make(
    collective: str,
    generate: Generator,
    *,
    chunks: int = 1,
    scratch: int = 0,
    uneven: bool = True,
    ordered: bool = False,
    any_root: bool = False,
) -> Algorithm:
    """An algorithm that is not registered."""
    return Algorithm(
        collective=collective,
        name="broken",
        generate=generate,
        chunks=lambda size, segments: chunks,
        scratch=lambda size, segments: scratch,
        segmented=False,
        uneven=uneven,
        ordered=ordered,
        any_root=any_root,
        rounds="0",
        sent="0",
        doc="",
    )


def script(*ranks: list[Round]) -> Generator:
    """What each rank does, spelled out."""
    return lambda rank, size, *root: iter(ranks[rank])


def fails(algorithm: Algorithm, size: int, *words: str, root: int = 0) -> None:
    with pytest.raises(ScheduleError) as caught:
        verify(algorithm, size, root)
    message = str(caught.value)
    assert message.startswith(f"{algorithm.collective}/{algorithm.name}, size {size}, root {root}: ")
    for word in words:
        assert word in message


A = range(1)


def test_report() -> None:
    report = verify("allreduce/ring", 4)
    assert report == Report(
        collective="allreduce", algorithm="ring", size=4, root=0, segments=1, rounds=6, messages=24, ordered=False
    )
    with pytest.raises(FrozenInstanceError):
        report.rounds = 0  # type: ignore[misc]


def test_segments_default_to_a_pipeline_where_there_is_one() -> None:
    assert verify("bcast/chain", 4).segments == 3
    assert verify("bcast/chain", 4, segments=1).segments == 1
    assert verify("bcast/binomial", 4, segments=5).segments == 1


def test_wrong_arguments() -> None:
    with pytest.raises(AlgorithmError, match="allreduce has no algorithm 'rnig'; there are native, double_tree"):
        verify("allreduce/rnig", 4)
    with pytest.raises(AlgorithmError, match="write collective/name"):
        verify("ring", 4)
    with pytest.raises(RankError, match="root 4 must be in"):
        verify("bcast/chain", 4, root=4)
    with pytest.raises(AlgorithmError, match="segments must be at least 1, got 0"):
        verify("bcast/chain", 4, segments=0)


def test_deadlock_in_a_circle() -> None:
    def generate(rank: int, size: int) -> Iterator[Round]:
        yield Round(sends=(Send((rank + 1) % size),))
        yield Round(recvs=(Recv((rank - 1) % size),))

    fails(
        make("barrier", generate),
        3,
        "deadlock when sends are synchronous",
        "rank 0 in round 0 waits to send a token to rank 1",
        "rank 1 in round 0 waits to send a token to rank 2",
        "rank 2 in round 0 waits to send a token to rank 0",
    )


def test_deadlock_of_receives() -> None:
    def generate(rank: int, size: int) -> Iterator[Round]:
        yield Round(recvs=(Recv(1 - rank, A, reduce=True),))
        yield Round(sends=(Send(1 - rank, A),))

    fails(make("allreduce", generate), 2, "deadlock", "rank 0 in round 0 waits for chunk 0 from rank 1")


def test_long_lists_of_waiting_ranks_are_cut() -> None:
    def generate(rank: int, size: int) -> Iterator[Round]:
        yield Round(recvs=(Recv((rank + 1) % size),))

    fails(make("barrier", generate), 100, "rank 7 in round 0", "; and 92 more")


def test_message_that_no_rank_receives() -> None:
    broken = script(
        [Round(sends=(Send(1, A),)), Round(sends=(Send(1, A),))],
        [Round(recvs=(Recv(0, A),))],
    )
    fails(
        make("bcast", broken),
        2,
        "a message without counterpart",
        "rank 0 in round 1 waits to send chunk 0 to rank 1, which is done",
    )


def test_message_that_no_rank_sends() -> None:
    broken = script([Round(sends=(Send(1, A),))], [Round(recvs=(Recv(0, A),))], [Round(recvs=(Recv(1, A),))])
    fails(
        make("bcast", broken),
        3,
        "without counterpart",
        "rank 2 in round 0 waits for chunk 0 from rank 1, which is done",
    )


def test_different_numbers_of_chunks() -> None:
    broken = script([Round(sends=(Send(1, range(2)),))], [Round(recvs=(Recv(0, range(1)),))])
    fails(
        make("bcast", broken, chunks=2),
        2,
        "rank 1, round 0, chunk 0: receives 1 chunks from rank 0, which sends 2 in round 0",
    )


def test_different_extents_of_blocks() -> None:
    broken = script([Round(sends=(Send(1, (0,)),))], [Round(recvs=(Recv(0, (2,)),))], [])
    fails(
        make("allgather", broken),
        3,
        "rank 1, round 0, chunk 2: differs in extent from chunk 0 of rank 0, which goes there",
    )


def test_different_extents_of_pieces() -> None:
    broken = script([Round(sends=(Send(1, (0, 1)),))], [Round(recvs=(Recv(0, (1, 0)),))])
    fails(make("bcast", broken, chunks=2), 2, "rank 1, round 0, chunk 1: differs in extent from chunk 0 of rank 0")


def test_messages_of_different_size_in_the_wrong_order() -> None:
    broken = script(
        [Round(sends=(Send(1, (0,)), Send(1, (1,))))],
        [Round(recvs=(Recv(0, (1,)), Recv(0, (0,))))],
    )
    fails(make("bcast", broken, chunks=2), 2, "rank 1, round 0, chunk 1: differs in extent from chunk 0")


def test_scratch_has_the_extent_of_its_piece() -> None:
    right = script(
        [Round(sends=(Send(1, (0, 1)),))],
        [Round(recvs=(Recv(0, (4, 3)),), then=(Copy(4, 0), Copy(3, 1)))],
    )
    assert verify(make("bcast", right, chunks=2, scratch=3), 2).messages == 1
    wrong = script([Round(sends=(Send(1, (0, 1)),))], [Round(recvs=(Recv(0, (2, 4)),))])
    fails(make("bcast", wrong, chunks=2, scratch=3), 2, "chunk 4: differs in extent from chunk 1 of rank 0")


def test_scratch_of_uneven_alltoall_fits_nothing() -> None:
    broken = script([Round(then=(Copy(0, 2),))])
    fails(make("alltoall", broken, scratch=1), 1, "rank 0, round 0, chunk 2: differs in extent from chunk 0")


def test_sends_what_it_does_not_have() -> None:
    broken = script([], [Round(sends=(Send(0, A),))])
    fails(make("bcast", broken), 2, "rank 1, round 0, chunk 0: holds nothing yet, but sends to rank 0")


def test_sends_what_only_arrives_in_the_same_round() -> None:
    broken = script(
        [Round(sends=(Send(1, A),))],
        [Round(sends=(Send(2, A),), recvs=(Recv(0, A),))],
        [Round(recvs=(Recv(1, A),))],
    )
    fails(make("bcast", broken), 3, "rank 1, round 0, chunk 0: ")


def test_counts_twice() -> None:
    def generate(rank: int, size: int) -> Iterator[Round]:
        for _ in range(2):
            yield Round((Send(1 - rank, A),), (Recv(1 - rank, A, reduce=True),))

    fails(make("allreduce", generate), 2, "round 1, chunk 0: counts ranks 0 and 1 twice")


def test_combines_different_blocks() -> None:
    broken = script(
        [Round(sends=(Send(1, (0,)),))],
        [Round(recvs=(Recv(0, (1,), reduce=True),))],
    )
    fails(
        make("reduce_scatter", broken, uneven=False),
        2,
        "rank 1, round 0, chunk 1: holds piece 1, but piece 0 is reduced into it",
    )


def test_reduces_into_nothing() -> None:
    broken = script([Round(sends=(Send(1, A),))], [Round(recvs=(Recv(0, A, reduce=True),))])
    fails(
        make("bcast", broken), 2, "rank 1, round 0, chunk 0: holds nothing yet, but something is to be reduced into it"
    )


def test_chunk_sent_and_replaced_in_one_round() -> None:
    def generate(rank: int, size: int) -> Iterator[Round]:
        yield Round((Send(1 - rank, A),), (Recv(1 - rank, A),))

    fails(make("allreduce", generate), 2, "rank 0, round 0, chunk 0: is sent and replaced by rank 1 in one round")


@pytest.mark.parametrize("reduces", [(False, False), (True, False), (False, True)])
def test_chunk_received_twice_in_one_round(reduces: tuple[bool, bool]) -> None:
    broken = script(
        [Round(recvs=(Recv(1, A, reduces[0]), Recv(2, A, reduces[1])))],
        [Round(sends=(Send(0, A),))],
        [Round(sends=(Send(0, A),))],
    )
    fails(make("reduce", broken), 3, "rank 0, round 0, chunk 0: is received twice in one round")


def test_chunk_received_twice_in_one_message() -> None:
    broken = script([Round(sends=(Send(1, (0, 0)),))], [Round(recvs=(Recv(0, (0, 0)),))])
    fails(make("bcast", broken), 2, "rank 1, round 0, chunk 0: is received twice in one round")


def test_chunk_reduced_twice_in_one_round_is_fine() -> None:
    right = script(
        [Round(recvs=(Recv(1, A, reduce=True), Recv(2, A, reduce=True)))],
        [Round(sends=(Send(0, A),))],
        [Round(sends=(Send(0, A),))],
    )
    assert verify(make("reduce", right, ordered=True), 3).ordered


@pytest.mark.parametrize(
    ("collective", "peer", "chunk"), [("bcast", 0, 0), ("scatter", 0, 1), ("gather", 0, 0), ("allgather", 1, 1)]
)
def test_writes_what_is_read_only(collective: str, peer: int, chunk: int) -> None:
    rounds: list[list[Round]] = [[], []]
    rounds[peer] = [Round(recvs=(Recv(1 - peer, (chunk,)),))]
    rounds[1 - peer] = [Round(sends=(Send(peer, (chunk,)),))]
    if collective in ("bcast", "scatter"):
        rounds[1] = []
    if collective in ("gather", "allgather"):
        rounds[1 - peer] = []
    fails(make(collective, script(*rounds)), 2, f"rank {peer}, round 0, chunk {chunk}: is read-only, but written")


def test_local_step_writes_what_is_read_only() -> None:
    broken = script([Round(then=(Copy(2, 0),))], [])
    fails(make("alltoall", broken, uneven=False), 2, "rank 0, round 0, chunk 0: is read-only, but written")


@pytest.mark.parametrize("chunk", [-1, 3])
def test_chunk_out_of_range(chunk: int) -> None:
    broken = script([Round(sends=(Send(1, (0, chunk)),))], [])
    fails(
        make("bcast", broken, chunks=2, scratch=1), 2, f"rank 0, round 0, chunk {chunk}: is out of range, there are 3"
    )


@pytest.mark.parametrize("local", [Copy(0, 1), Copy(1, 0), Reduce(0, 1)])
def test_chunk_of_a_local_step_out_of_range(local: Copy | Reduce) -> None:
    fails(make("allreduce", script([Round(then=(local,))])), 1, "chunk 1: is out of range, there are 1")


@pytest.mark.parametrize("peer", [-1, 2])
def test_peer_that_does_not_exist(peer: int) -> None:
    fails(make("barrier", script([Round(sends=(Send(peer),))], [])), 2, f"rank 0, round 0: rank {peer} does not exist")
    fails(make("barrier", script([], [Round(recvs=(Recv(peer),))])), 2, f"rank 1, round 0: rank {peer} does not exist")


def test_message_to_itself() -> None:
    broken = script([Round((Send(0, A),), (Recv(0, A, reduce=True),))])
    fails(make("allreduce", broken), 1, "rank 0, round 0: sends to or receives from itself")


@pytest.mark.parametrize(
    ("local", "what"),
    [
        (Copy(1, 0), "chunk 1: holds nothing yet, but goes into chunk 0"),
        (Reduce(1, 0), "chunk 1: holds nothing yet, but goes into chunk 0"),
        (Reduce(0, 1), "chunk 1: holds nothing yet, but something is to be reduced into it"),
        (Copy(0, 0), "chunk 0: is copied or reduced into itself"),
    ],
)
def test_local_steps_on_nothing(local: Copy | Reduce, what: str) -> None:
    fails(make("allreduce", script([Round(then=(local,))]), scratch=1), 1, what)


def test_local_step_between_different_extents() -> None:
    broken = script([Round(then=(Copy(0, 1),))])
    fails(make("allreduce", broken, chunks=2), 1, "chunk 1: differs in extent from chunk 0")


def test_local_step_counts_twice() -> None:
    broken = script([Round(then=(Copy(0, 1),)), Round(then=(Reduce(1, 0),))])
    fails(make("allreduce", broken, scratch=1), 1, "rank 0, round 1, chunk 0: counts rank 0 twice")


def test_contribution_missing_in_the_end() -> None:
    broken = script([Round(recvs=(Recv(1, A, reduce=True),))], [Round(sends=(Send(0, A),))], [])
    fails(make("reduce", broken), 3, "rank 0, round 0, chunk 0: lacks the contribution of rank 2 in the end")


def test_contribution_too_much_in_the_end() -> None:
    def generate(rank: int, size: int) -> Iterator[Round]:
        yield Round((Send(1 - rank, A),), (Recv(1 - rank, A, reduce=True),))

    fails(make("scan", generate), 2, "rank 0, round 0, chunk 0: has the contribution of rank 1 too much in the end")


def test_nothing_in_the_end() -> None:
    fails(make("bcast", script([], [])), 2, "rank 1, chunk 0: holds nothing in the end")


def test_wrong_block_in_the_end() -> None:
    def generate(rank: int, size: int) -> Iterator[Round]:
        yield Round((Send(1 - rank, (rank,)),), (Recv(1 - rank, (3 - rank,)),), then=(Copy(rank, 2 + rank),))

    broken = make("alltoall", generate, uneven=False)
    fails(broken, 2, "rank 0, round 0, chunk 3: holds piece (1, 1) in the end instead of (1, 0)")


def test_result_of_exscan_in_the_wrong_place() -> None:
    broken = script([Round(sends=(Send(1, A),))], [Round(recvs=(Recv(0, A),))])
    fails(make("exscan", broken, scratch=1), 2, "rank 1, round 0, chunk 1: holds nothing in the end")


def test_barrier_without_word_of_all() -> None:
    def generate(rank: int, size: int) -> Iterator[Round]:
        yield Round((Send((rank + 1) % size),), (Recv((rank - 1) % size),))

    fails(make("barrier", generate), 3, "rank 0, round 0: leaves before a chain of messages from rank 1")


def test_word_that_arrives_is_not_passed_on_in_the_same_round() -> None:
    def generate(rank: int, size: int) -> Iterator[Round]:
        others = [peer for peer in range(size) if abs(peer - rank) == 1]
        yield Round(tuple(map(Send, others)), tuple(map(Recv, others)))

    fails(make("barrier", generate), 3, "rank 0, round 0: leaves before a chain of messages from rank 2")


def test_claims_order_but_has_none() -> None:
    broken = script(
        [Round(recvs=(Recv(2, A, reduce=True),)), Round(recvs=(Recv(1, A, reduce=True),))],
        [Round(sends=(Send(0, A),))],
        [Round(sends=(Send(0, A),))],
    )
    assert not verify(make("reduce", broken), 3).ordered
    fails(make("reduce", broken, ordered=True), 3, "rank 0, round 0, chunk 0: the algorithm claims to keep the order")


def test_claims_order_on_the_wrong_side_of_a_local_step() -> None:
    def generate(rank: int, size: int) -> Iterator[Round]:
        if rank:
            yield Round(sends=(Send(0, A),))
        else:
            yield Round(recvs=(Recv(1, (1,)),), then=(Reduce(1, 0),))

    fails(make("reduce", lambda rank, size, root: generate(rank, size), scratch=1, ordered=True), 2, "claims to keep")


def test_claim_for_any_root_is_checked_for_other_roots() -> None:
    binomial = algorithms_of("reduce")["binomial"]
    assert not verify(binomial, 4, root=1).ordered
    fails(replace(binomial, any_root=True), 4, "claims to keep the order of ranks", root=1)


Change = Callable[[Round], Iterator[Round]]


def without_a_message(step: Round) -> Iterator[Round]:
    for i in range(len(step.sends)):
        yield replace(step, sends=step.sends[:i] + step.sends[i + 1 :])
    for i in range(len(step.recvs)):
        yield replace(step, recvs=step.recvs[:i] + step.recvs[i + 1 :])


def with_a_flipped_reduce(step: Round) -> Iterator[Round]:
    for i, recv in enumerate(step.recvs):
        if recv.chunks:
            flipped = replace(recv, reduce=not recv.reduce)
            yield replace(step, recvs=(*step.recvs[:i], flipped, *step.recvs[i + 1 :]))


def with_another_chunk(step: Round) -> Iterator[Round]:
    for i, recv in enumerate(step.recvs):
        if recv.chunks:
            moved = replace(recv, chunks=(recv.chunks[0] + 1, *recv.chunks[1:]))
            yield replace(step, recvs=(*step.recvs[:i], moved, *step.recvs[i + 1 :]))


def without_a_local_step(step: Round) -> Iterator[Round]:
    for i in range(len(step.then)):
        yield replace(step, then=step.then[:i] + step.then[i + 1 :])


@pytest.mark.parametrize("size", [2, 5, 8])
@pytest.mark.parametrize("change", [without_a_message, with_a_flipped_reduce, with_another_chunk, without_a_local_step])
@pytest.mark.parametrize("collective", collectives())
def test_any_small_change_is_found(collective: str, change: Change, size: int) -> None:
    for algorithm in algorithms_of(collective).values():
        for at in range(size):
            rounds = tuple(algorithm.steps(at, size, segments=2))
            for number, step in enumerate(rounds):
                for changed in change(step):
                    own = (*rounds[:number], changed, *rounds[number + 1 :])

                    def generate(
                        rank: int, *more: int, own: tuple[Round, ...] = own, at: int = at, was: Algorithm = algorithm
                    ) -> Iterator[Round]:
                        return iter(own if rank == at else was.steps(rank, more[0], segments=2))

                    segments = 2 if algorithm.segmented else 1
                    chunks, scratch = algorithm.slots(size, segments)
                    broken = replace(
                        algorithm,
                        generate=generate,
                        chunks=lambda size, segments, chunks=chunks: chunks,
                        scratch=lambda size, segments, scratch=scratch: scratch,
                        segmented=False,
                    )
                    with pytest.raises(ScheduleError):
                        verify(broken, size)


@pytest.mark.parametrize("size", [2, 4, 5, 8])
@pytest.mark.parametrize("collective", [name for name in collectives() if name != "barrier"])
def test_no_message_is_superfluous(collective: str, size: int) -> None:
    for algorithm in algorithms_of(collective).values():
        for source in range(size):
            sent = [send for step in algorithm.steps(source, size) for send in step.sends]
            for to in {send.to for send in sent}:
                between = sum(send.to == to for send in sent)
                for number in range(between):

                    def generate(
                        rank: int,
                        *more: int,
                        was: Algorithm = algorithm,
                        lost: tuple[int, int, int] = (source, to, number),
                        **options: int,
                    ) -> Iterator[Round]:
                        return without(was.steps(rank, more[0]), rank, *lost)

                    with pytest.raises(ScheduleError, match=r"holds nothing|holds piece|lacks the|counts"):
                        verify(replace(algorithm, generate=generate), size, segments=1)


def without(steps: Iterator[Round], rank: int, source: int, to: int, number: int) -> Iterator[Round]:
    """The rounds of `rank` without message `number` from `source` to `to`, at whichever end `rank` is."""
    seen = 0
    for step in steps:
        sends, recvs = [], []
        for send in step.sends:
            mine = rank == source and send.to == to
            if not mine or seen != number:
                sends.append(send)
            seen += mine
        for recv in step.recvs:
            mine = rank == to and recv.source == source
            if not mine or seen != number:
                recvs.append(recv)
            seen += mine
        yield replace(step, sends=tuple(sends), recvs=tuple(recvs))
