"""Agreement of all ranks on who serves, on the model, and on the arguments of the servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mpicoll.collectives.objects import allgather_object
from mpicoll.engine.core.communicator import Communicator, core_of
from mpicoll.errors import ArgumentError, MpicollError, RankFailed
from mpicoll.parallel.parameter_server.plan import TensorSpec
from mpicoll.wording import rank_list

MODES = ("sync", "async", "ssp")

_RULE_DTYPES = ("float16", "float32", "float64", "float96", "float128")


class Settings(NamedTuple):
    """Arguments of the servers, which must be the same on all of them."""

    mode: str
    staleness: int
    max_norm: float | None
    reduction: str
    bucket_bytes: int
    whole_tensors: bool
    arrays: bool
    """True with a rule for numpy arrays, False with a torch optimizer."""


class Role(NamedTuple):
    """The statements of a rank about itself: a server its settings, a worker its model."""

    settings: Settings | None = None
    specs: tuple[TensorSpec, ...] | None = None
    error: str | None = None


class Job(NamedTuple):
    """The ranks that take part, and what they have agreed on."""

    comm: Communicator
    servers: tuple[int, ...]
    workers: tuple[int, ...]
    settings: Settings
    specs: tuple[TensorSpec, ...]

    @property
    def survives_deaths(self) -> bool:
        """True if the job continues after the death of a rank."""
        return core_of(self.comm).transport.survives_deaths

    def describe(self) -> str:
        """Describe this rank in a message."""
        rank = self.comm.rank
        return f"{'server' if rank in self.servers else 'worker'} rank {rank} of {self.comm.size}"


def agree(comm: Communicator, operation: str, make_role: Callable[[], Role]) -> Job:
    """Exchange the roles of all ranks of `comm`. Collective. Raises the same kind of error on all ranks if one has an
    invalid argument or they disagree."""
    failure: MpicollError | None = None
    try:
        role = make_role()
    except MpicollError as error:
        failure, role = error, Role(error=str(error))
    except Exception as error:  # noqa: BLE001 - such as TypeError of an argument of another type
        failure = ArgumentError(f"{operation}: an argument is invalid: {type(error).__name__}: {error}")
        failure.__cause__ = error
        role = Role(error=str(failure))
    roles: list[Role] = allgather_object(role, comm=comm)
    if failure is not None:
        raise failure
    where = f"{operation}: rank {comm.rank} of {comm.size}"
    for rank, other in enumerate(roles):
        if other.error is not None:
            raise ArgumentError(f"{where}: rank {rank} has failed: {other.error}")
    servers = tuple(rank for rank, other in enumerate(roles) if other.settings is not None)
    workers = tuple(rank for rank, other in enumerate(roles) if other.specs is not None)
    if not servers or not workers:
        missing, name = ("server", "ParameterServer") if not servers else ("worker", "Worker")
        raise ArgumentError(f"{where}: no rank is a {missing}; at least one rank must make a {name}")
    settings, specs = roles[servers[0]].settings, roles[workers[0]].specs
    assert settings is not None
    assert specs is not None
    for rank, other in enumerate(roles):
        if other.settings is not None and other.settings != settings:
            pairs = zip(Settings._fields, settings, other.settings, strict=True)
            differ = ", ".join(f"{name} {mine!r} and {theirs!r}" for name, mine, theirs in pairs if mine != theirs)
            raise ArgumentError(f"{where}: servers {servers[0]} and {rank} differ in {differ}; pass the same arguments")
        if other.specs is not None and other.specs != specs:
            raise ArgumentError(
                f"{where}: workers {workers[0]} and {rank} have different models: {_compare(specs, other.specs)};"
                " all workers must make the same model, with the same tensors in the same order"
            )
    strange = [spec for spec in specs if settings.arrays and spec.dtype not in _RULE_DTYPES]
    if strange:
        raise ArgumentError(
            f"{where}: a rule for numpy arrays can't update {_describe(strange[0])}; pass optimizer= to ParameterServer"
        )
    return Job(comm, servers, workers, settings, specs)


def _compare(one: Sequence[TensorSpec], other: Sequence[TensorSpec]) -> str:
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            return f"{_describe(mine)} and {_describe(theirs)}"
    return f"{len(one)} and {len(other)} tensors"


def _describe(spec: TensorSpec) -> str:
    return f"{spec.name!r} {spec.dtype}{list(spec.shape)}{' with sparse gradients' if spec.sparse else ''}"


def check_settings(settings: Settings, rule: Any, optimizer: Any, scheduler: Any, timeout: float | None) -> None:
    """Raise ArgumentError if an argument is invalid."""

    def check(condition: bool, what: str) -> None:
        if not condition:
            raise ArgumentError(f"ParameterServer: {what}")

    check((rule is None) != (optimizer is None), "pass either a rule for numpy arrays or optimizer=, one of the two")
    check(callable(rule or optimizer), f"the rule or optimizer must be a function, got {rule or optimizer!r}")
    check(scheduler is None or optimizer is not None, "scheduler= needs optimizer=; a rule takes lr as a function")
    check(settings.mode in MODES, f"mode must be one of {', '.join(MODES)}, got {settings.mode!r}")
    check(isinstance(settings.staleness, int), f"staleness must be an integer, got {settings.staleness!r}")
    check(isinstance(settings.bucket_bytes, int), f"bucket_bytes must be an integer, got {settings.bucket_bytes!r}")
    check(settings.staleness >= 0, f"staleness must be at least 0, got {settings.staleness}")
    check(not settings.staleness or settings.mode == "ssp", 'staleness= needs mode="ssp"')
    check(settings.max_norm is None or settings.max_norm > 0, f"max_norm must be positive, got {settings.max_norm}")
    check(settings.reduction in ("mean", "sum"), f"reduction must be mean or sum, got {settings.reduction!r}")
    check(settings.bucket_bytes >= 16, f"bucket_bytes must be at least 16, got {settings.bucket_bytes}")
    check(timeout is None or timeout > 0, f"timeout must be a positive number of seconds, got {timeout}")


def server_death(job: Job, ranks: Sequence[int], reason: object) -> RankFailed:
    """Return the error of this rank for the death of servers."""
    return RankFailed(
        f"{job.describe()}: server {rank_list(ranks)} has died, and with it its part of the model ({reason}); restart"
        " the job from a checkpoint (ParameterServer.save)",
        tuple(job.comm.members[rank] for rank in ranks),
    )
