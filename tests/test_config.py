"""The environment variables."""

from __future__ import annotations

import pytest

from mpicoll.config import Config, config, find_unknown_settings
from mpicoll.errors import SetupError


def test_nothing_set() -> None:
    assert Config.read({}) == Config(algorithms="", timeout=1800.0, transport="auto")


def test_everything_set() -> None:
    environ = {
        "MPICOLL_ALGORITHMS": "allreduce:ring",
        "MPICOLL_STUCK_AFTER": "0.5",
        "MPICOLL_TIMEOUT": "2.5",
        "MPICOLL_TRANSPORT": "local",
        "OTHER": "ignored",
    }
    assert Config.read(environ) == Config(algorithms="allreduce:ring", stuck_after=0.5, timeout=2.5, transport="local")


@pytest.mark.parametrize("transport", ["auto", "mpi", "local"], ids="transport-{}".format)
def test_transports(transport: str) -> None:
    assert Config.read({"MPICOLL_TRANSPORT": transport}).transport == transport


@pytest.mark.parametrize("value", ["", "MPI", "tcp", " local"])
def test_malformed_transport(value: str) -> None:
    with pytest.raises(SetupError) as caught:
        Config.read({"MPICOLL_TRANSPORT": value})
    assert str(caught.value) == f"MPICOLL_TRANSPORT={value!r}: must be auto, mpi or local"


@pytest.mark.parametrize("shape", ["auto", "star", "tree", "tree/2", " tree "])
def test_shapes_of_the_control_network(shape: str) -> None:
    assert Config.read({"MPICOLL_CONTROL_NETWORK": shape}).control_network == shape.strip()


@pytest.mark.parametrize("value", ["", "ring", "star/2", "tree/", "tree/0", "tree/-1", "tree/two", "tree/2/2"])
def test_malformed_shape(value: str) -> None:
    with pytest.raises(SetupError) as caught:
        Config.read({"MPICOLL_CONTROL_NETWORK": value})
    problem = "must be auto, star, tree, or tree/N with a number N > 0"
    assert str(caught.value) == f"MPICOLL_CONTROL_NETWORK={value!r}: {problem}"


@pytest.mark.parametrize("name", ["MPICOLL_TIMEOUT", "MPICOLL_STUCK_AFTER"])
@pytest.mark.parametrize("value", ["", "soon", "0", "-1", "inf", "nan", "1s", "-inf"])
def test_malformed_seconds(value: str, name: str) -> None:
    with pytest.raises(SetupError) as caught:
        Config.read({name: value})
    assert str(caught.value) == f"{name}={value!r}: must be a positive number of seconds"


@pytest.mark.parametrize("value", ["", "0", "-1", "3601", "nan", "7s"])
def test_malformed_outage(value: str) -> None:
    assert Config.read({"MPICOLL_OUTAGE": "2.5"}).outage == 2.5
    with pytest.raises(SetupError, match="must be a positive number of seconds, at most 3600"):
        Config.read({"MPICOLL_OUTAGE": value})


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("", ()),
        (" ", ()),
        ("eth0", ("eth0",)),
        ("ib0, 10.0.0.0/8,fd00::/8,192.0.2.1", ("ib0", "10.0.0.0/8", "fd00::/8", "192.0.2.1")),
    ],
)
def test_interfaces(value: str, words: tuple[str, ...]) -> None:
    assert Config.read({"MPICOLL_INTERFACE": value}).interface == words


@pytest.mark.parametrize("value", [",", "eth0,", "10.0.0.0/33", "eth0/8", "fd00:::1", "a" * 16])
def test_malformed_interfaces(value: str) -> None:
    with pytest.raises(SetupError, match=r"^MPICOLL_INTERFACE='.*interfaces of this host: .*\blo\b"):
        Config.read({"MPICOLL_INTERFACE": value})


def test_frozen() -> None:
    with pytest.raises(AttributeError):
        Config().timeout = 1.0  # type: ignore[misc]


def test_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    before = config()
    monkeypatch.setenv("MPICOLL_TIMEOUT", str(before.timeout + 1))
    assert config() is before


def test_every_variable_is_documented() -> None:
    for field in Config._fields:
        assert f"``MPICOLL_{field.upper()}``" in (Config.__doc__ or "")


def test_torchs_detail_asks_for_checks() -> None:
    assert Config.read({"TORCH_DISTRIBUTED_DEBUG": "detail"}).check == ("calls",)
    assert Config.read({"TORCH_DISTRIBUTED_DEBUG": "INFO"}).check == ()
    assert Config.read({"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "MPICOLL_CHECK": "0"}).check == ("off",)
    assert Config.read({"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "MPICOLL_CHECK": "numerics"}).check == (
        "calls",
        "numerics",
    )


@pytest.mark.parametrize(
    ("name", "similar"),
    [
        ("MPICOLL_TIMOUT", "MPICOLL_TIMEOUT"),
        ("MPICOLL_SHARED", "MPICOLL_SHARED_MEMORY"),
        ("MPICOLL_ALGORITHM", "MPICOLL_ALGORITHMS"),
        ("MPICOLL_ROOT", ""),
        ("MPICOLL_VERSION", ""),
        ("MPICOLL_", ""),
    ],
)
def test_unknown_settings(name: str, similar: str) -> None:
    environ = {"MPICOLL_CHECK": "calls", "PATH": "", "_MPICOLL_CHEKC": "", name: "1"}
    assert find_unknown_settings(environ) == {name: similar}
