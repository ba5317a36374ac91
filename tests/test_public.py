"""The public names, pinned: a change here is a change for every user."""

from __future__ import annotations

import ast
import inspect
import re

import pytest

import mpicoll
from mpicoll import errors

NAMES = re.findall(
    r"\w+",
    """
    AlgorithmError ArgumentError CartesianCommunicator Choice CommunicationError Communicator CommunicatorError
    DTypeError DeviceError File FileError GraphCommunicator MismatchError MpicollError NumericsError Op PROC_NULL Plan
    RankError RankFailed Request ScheduleError SetupError ShapeError SpawnError Status Timeout TruncationError Window
    algorithms allgather allgather_init allgather_object allreduce allreduce_init alltoall alltoall_init alltoall_object
    barrier barrier_init bcast bcast_init bcast_object debug dims_create empty exchange_halo explain exscan exscan_init
    gather gather_init gather_object iallgather iallreduce ialltoall ibarrier ibcast iexchange_halo iexscan igather
    ineighbor_allgather ineighbor_alltoall iprobe irecv ireduce ireduce_scatter iscan iscatter isend load
    neighbor_allgather neighbor_alltoall premul_sum probe recv reduce reduce_init reduce_scatter reduce_scatter_init
    resilient run_local save scan scan_init scatter scatter_init scatter_object schedules send sendrecv spawn trace
    waitall waitany world
    """,
)

COMMUNICATOR = re.findall(
    r"\w+",
    """
    agree cart duplicate failed free graph group local_rank local_size members mpi name node node_comm nodes num_nodes
    rank shrink size split timeout
    """,
)


def test_names() -> None:
    assert sorted(mpicoll.__all__) == sorted(NAMES)
    assert len(set(mpicoll.__all__)) == len(mpicoll.__all__)


def test_names_are_found_where_the_type_checker_finds_them() -> None:
    tree = ast.parse(inspect.getsource(mpicoll))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        name.name: node.module.removeprefix("mpicoll.")
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module
        for name in node.names
    }
    assert seen.pop("schedules") == "mpicoll"
    assert seen == mpicoll._HOME
    assert set(seen) == set(NAMES) - {"schedules"}
    assert set(NAMES) <= set(dir(mpicoll))


def test_no_other_name() -> None:
    with pytest.raises(AttributeError, match="module 'mpicoll' has no attribute 'allreduc'"):
        mpicoll.allreduc  # noqa: B018


def test_version() -> None:
    assert re.fullmatch(r"\d+(\.\d+)*((a|b|rc)\d+)?(\.dev\d+)?(\+\w+)?", mpicoll.__version__)


@pytest.mark.parametrize("name", NAMES)
def test_says_what_it_is(name: str) -> None:
    value = getattr(mpicoll, name)
    text = inspect.getdoc(value) if name == "schedules" else value.__doc__
    assert text
    assert not text.startswith(f"{name}(")  # what a dataclass gets that has no docstring of its own


@pytest.mark.parametrize("name", ["Communicator", "Request", "Plan"])
def test_methods_say_what_they_do(name: str) -> None:
    for method, value in vars(getattr(mpicoll, name)).items():
        if not method.startswith("_") and (inspect.isroutine(value) or isinstance(value, property)):
            assert value.__doc__, f"{name}.{method}"


@pytest.mark.parametrize("collective", mpicoll.schedules.collectives())
def test_every_collective_has_three_forms_with_the_same_arguments(collective: str) -> None:
    forms = [
        inspect.signature(getattr(mpicoll, name)).parameters
        for name in (collective, f"i{collective}", f"{collective}_init")
    ]
    blocking = forms[0]
    # Only what blocks has a bound of its own. Overloads state a type of the result that follows from that of `x`.
    assert list(blocking)[-1] == "timeout"
    lists = [[one.replace(annotation=None) if one.name == "x" else one for one in form.values()] for form in forms]
    assert lists[1:] == [lists[0][:-1]] * 2


def test_public_members_of_a_communicator() -> None:
    assert [name for name in dir(mpicoll.world()) if not name.startswith("_")] == sorted(COMMUNICATOR)


def drawn() -> dict[str, tuple[str, list[str]]]:
    """The tree in the docstring of errors: name -> (parent, the built-in classes it names)."""
    tree: dict[str, tuple[str, list[str]]] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.fullmatch(r"    ([│├└─ ]*)(\w+)(.*)", line)
        if match is None:
            continue
        depth = len(match[1]) // 4
        path[depth:] = [match[2]]
        also = re.search(r"\(also an? (\w+)\)", match[3])
        tree[match[2]] = (path[depth - 1] if depth else "Exception", [also[1]] if also else [])
    return tree


def test_the_tree_of_errors_is_as_drawn() -> None:
    tree = drawn()
    assert sorted(tree) == sorted(errors.__all__)
    for name, (parent, also) in tree.items():
        assert [base.__name__ for base in getattr(errors, name).__bases__] == [parent, *also], name


def test_errors_are_public() -> None:
    assert set(errors.__all__) <= set(mpicoll.__all__)
    for name in errors.__all__:
        assert getattr(mpicoll, name) is getattr(errors, name)


def test_a_timeout_can_be_caught_as_pythons_own() -> None:
    with pytest.raises(TimeoutError):
        raise mpicoll.Timeout("late")


def test_rank_failed_names_the_dead() -> None:
    assert mpicoll.RankFailed("gone", (1, 3)).ranks == (1, 3)
    assert mpicoll.RankFailed("somebody is gone").ranks == ()
