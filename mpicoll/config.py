"""Every environment variable that mpicoll reads, read once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Literal, cast

from mpicoll.errors import SetupError
from mpicoll.named_tuple import NamedTuple

TransportName = Literal["auto", "mpi", "local"]
TuneMode = Literal["exact", "any", "off"]
SharedMemory = Literal["auto", "named", "off"]
Sockets = Literal["auto", "off"]
CudaOrder = Literal["stream", "host"]

CUDA_AWARE = ("send", "move", "reduce")
"""The words of MPICOLL_CUDA_AWARE: messages, collectives that move data, collectives that reduce."""

CHECKS = ("calls", "numerics", "checksum")
"""The words of MPICOLL_CHECK. Each of them includes the first."""

MAX_THREADS = 8
"""Maximum of MPICOLL_THREADS, as in ``csrc/workers.h``: so many cores saturate the memory."""

_NAME_LIMIT = 15
"""Maximum bytes of the name of a network interface in Linux."""

UNCHECKED = "off"
"""The word of MPICOLL_CHECK by which ranks of several nodes compare nothing."""


class Config(NamedTuple):
    """The settings of this process. Each field is an environment variable; in brackets is its default.

    ``MPICOLL_ALGORITHMS`` (none)
        rules that select algorithms, such as ``allreduce:0-64k:native,64k-inf:ring`` or ``bcast:chain/8``;
        ``;`` separates collectives
    ``MPICOLL_CHECK`` (none)
        ``1`` or ``calls``: compare the calls of all ranks before each collective, and messages with their
        receives; ``numerics``: also look for NaN and infinity; ``checksum``: also compare results that must be
        equal on all ranks; several words are separated by commas. ``off`` or ``0``: between nodes, do not even
        compare the first 64 collectives of a communicator and then 64 at once. If one rank sets it, it applies to
        all ranks. If it is not set, ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` means ``1``
    ``MPICOLL_CONTROL_NETWORK`` (``auto``)
        the shape of the network that detects deaths: ``star``; ``tree``: the ranks of each host are connected to the
        lowest of them, and those to rank 0; ``tree/N``: the same with groups of N consecutive ranks; ``auto``: a tree
        in jobs of more than 4,096 ranks, or than rank 0 may have connections (``ulimit -Hn``). The value of rank 0
        applies to all ranks
    ``MPICOLL_CUDA_AWARE`` (``auto``)
        whether the MPI library accepts CUDA memory: ``auto`` (tested once, the result is stored), ``on``,
        ``off``, or some of ``send``, ``move``, ``reduce``, separated by commas
    ``MPICOLL_CUDA_ORDER`` (``host``)
        who waits for collectives on GPUs by ``ipc`` and ``nccl``: ``stream``: the caller's current stream, and the host
        goes on; ``host``: the host. ``stream`` takes effect if all ranks set it
    ``MPICOLL_INTERFACE`` (one that all hosts reach)
        the network interfaces of which the control network and torch's store of a job on several hosts use one: names
        of interfaces, addresses, or networks such as ``10.0.0.0/16``, separated by commas. On each host at least one
        of them must be there. The MPI library's connections by TCP use the same interfaces, unless its own settings
        select others. A job on one host listens at 127.0.0.1 only
    ``MPICOLL_OUTAGE`` (7)
        seconds for which hosts may be unreachable without the job being ended; the value of rank 0 applies to
        all ranks. A host that stays unreachable is reported as lost 5 s later; on Linux before 6.15, after 2 *
        ``MPICOLL_OUTAGE`` + 6 s
    ``MPICOLL_REPORT`` (``.``)
        the folder for reports of failed jobs, or ``off``
    ``MPICOLL_SHARED_MEMORY`` (``auto``)
        ``auto``; ``named``: files in /dev/shm, for processes that can't pass file descriptors to each other,
        such as ranks in separate containers; ``off``: none
    ``MPICOLL_SOCKETS`` (``auto``)
        whether ranks on different hosts make TCP connections of their own, beside those of MPI, for the large messages
        of schedules: ``auto``: where the hosts have no RDMA devices, and each has one network interface, or
        ``MPICOLL_INTERFACE`` selects one; ``off``: never. If one rank sets ``off``, it applies to all ranks
    ``MPICOLL_STUCK_AFTER`` (5)
        seconds for which a rank waits before the states of all ranks are compared; operations that can never
        complete fail then
    ``MPICOLL_THREADS`` (``auto``)
        threads of each rank that work on one large array in shared memory, from 1 to 8; ``auto``: the cores to which
        the rank is bound, divided by the number of ranks that are bound to them too, at most 8
    ``MPICOLL_TIMEOUT`` (1800)
        seconds after which a call that waits times out
    ``MPICOLL_TRACE`` (none)
        the folder for a trace of all operations; if one rank sets it, it applies to all ranks
    ``MPICOLL_TRANSPORT`` (``auto``)
        ``mpi``; ``local``: a world of one rank; ``auto``: MPI if an MPI launcher started the process, TCP if another
        one did, otherwise ``local``
    ``MPICOLL_TUNE`` (``exact``)
        where ranks share no memory, whether the first calls of a kind, from 1 MiB on, try several algorithms, of
        which the fastest stays: ``exact``: where all of them give the same bits; ``any``: also where sums of
        floating-point numbers may differ in the last bits from call to call; ``off``: never. The value of rank 0
        applies to all ranks
    ``MPICOLL_TUNED`` (found)
        the table of ``mpicoll tune`` to use, or ``off``; the value of rank 0 applies to all ranks. By default
        the table in ``~/.cache/mpicoll``, if there is one
    """

    algorithms: str = ""
    check: tuple[str, ...] = ()
    control_network: str = "auto"
    cuda_aware: str = "auto"
    cuda_order: CudaOrder = "host"
    interface: tuple[str, ...] = ()
    outage: float = 7.0
    report: str = "."
    shared_memory: SharedMemory = "auto"
    sockets: Sockets = "auto"
    stuck_after: float = 5.0
    threads: int | Literal["auto"] = "auto"
    timeout: float = 1800.0
    trace: str = ""
    transport: TransportName = "auto"
    tune: TuneMode = "exact"
    tuned: str = ""

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Config:
        """Read `environ`. Raises SetupError that names the variable, its value and what would be accepted."""
        transport = environ.get("MPICOLL_TRANSPORT", "auto")
        if transport not in ("auto", "mpi", "local"):
            raise SetupError(f"MPICOLL_TRANSPORT={transport!r}: must be auto, mpi or local")
        shared = environ.get("MPICOLL_SHARED_MEMORY", "auto")
        if shared not in ("auto", "named", "off"):
            raise SetupError(f"MPICOLL_SHARED_MEMORY={shared!r}: must be auto, named or off")
        sockets = environ.get("MPICOLL_SOCKETS", "auto")
        if sockets not in ("auto", "off"):
            raise SetupError(f"MPICOLL_SOCKETS={sockets!r}: must be auto or off")
        order = environ.get("MPICOLL_CUDA_ORDER", "host")
        if order not in ("stream", "host"):
            raise SetupError(f"MPICOLL_CUDA_ORDER={order!r}: must be stream or host")
        tune = environ.get("MPICOLL_TUNE", "exact")
        if tune not in ("exact", "any", "off"):
            raise SetupError(f"MPICOLL_TUNE={tune!r}: must be exact, any or off")
        return cls(
            algorithms=environ.get("MPICOLL_ALGORITHMS", ""),
            check=_parse_checks(environ.get("MPICOLL_CHECK", ""), environ.get("TORCH_DISTRIBUTED_DEBUG", "")),
            control_network=_parse_shape(environ.get("MPICOLL_CONTROL_NETWORK", "auto")),
            cuda_aware=_parse_cuda_aware(environ.get("MPICOLL_CUDA_AWARE", "auto")),
            cuda_order=cast(CudaOrder, order),
            interface=_parse_interfaces(environ.get("MPICOLL_INTERFACE", "")),
            outage=_read_seconds(environ, "MPICOLL_OUTAGE", 7.0, 3600.0),
            report=environ.get("MPICOLL_REPORT", "."),
            shared_memory=cast(SharedMemory, shared),
            sockets=cast(Sockets, sockets),
            stuck_after=_read_seconds(environ, "MPICOLL_STUCK_AFTER", 5.0),
            threads=_parse_threads(environ.get("MPICOLL_THREADS", "auto")),
            timeout=_read_seconds(environ, "MPICOLL_TIMEOUT", 1800.0),
            trace=environ.get("MPICOLL_TRACE", ""),
            transport=cast(TransportName, transport),
            tune=cast(TuneMode, tune),
            tuned=environ.get("MPICOLL_TUNED", ""),
        )


def _read_seconds(environ: Mapping[str, str], name: str, default: float, most: float = float("inf")) -> float:
    """Return a variable that is a number of seconds: positive, finite and at most `most`."""
    text = environ.get(name)
    if text is None:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf") or seconds > most:
        bound = "" if most == float("inf") else f", at most {most:g}"
        raise SetupError(f"{name}={text!r}: must be a positive number of seconds{bound}")
    return seconds


def _parse_checks(text: str, debug: str) -> tuple[str, ...]:
    """Return the words of MPICOLL_CHECK; if it is empty, torch's own variable may ask for checks."""
    if not text.strip():
        return ("calls",) if debug.strip().upper() == "DETAIL" else ()
    if text.strip() in ("0", UNCHECKED):
        return (UNCHECKED,)
    words = ["calls" if word.strip() in ("1", "on") else word.strip() for word in text.split(",")]
    if not set(words) <= set(CHECKS):
        raise SetupError(f"MPICOLL_CHECK={text!r}: must be 0, 1, or some of {', '.join(CHECKS)}")
    return tuple(word for word in CHECKS if word in words or word == "calls")


def _parse_shape(text: str) -> str:
    """MPICOLL_CONTROL_NETWORK: ``auto``, ``star``, ``tree``, or ``tree/N``."""
    kind, slash, each = text.strip().partition("/")
    is_valid = kind == "tree" and each.isdecimal() and int(each) > 0 if slash else kind in ("auto", "star", "tree")
    if not is_valid:
        raise SetupError(f"MPICOLL_CONTROL_NETWORK={text!r}: must be auto, star, tree, or tree/N with a number N > 0")
    return text.strip()


def _parse_threads(text: str) -> int | Literal["auto"]:
    """MPICOLL_THREADS: ``auto``, or a number."""
    if text.strip() == "auto":
        return "auto"
    if text.strip() not in map(str, range(1, MAX_THREADS + 1)):
        raise SetupError(f"MPICOLL_THREADS={text!r}: must be auto, or a number from 1 to {MAX_THREADS}")
    return int(text)


def _parse_cuda_aware(text: str) -> str:
    """MPICOLL_CUDA_AWARE: ``auto``, ``on``, ``off``, or its words with commas."""
    words = [word.strip() for word in text.split(",")]
    if text.strip() in ("auto", "on", "off"):
        return text.strip()
    if not set(words) <= set(CUDA_AWARE):
        raise SetupError(f"MPICOLL_CUDA_AWARE={text!r}: must be auto, on, off, or some of {', '.join(CUDA_AWARE)}")
    return ",".join(word for word in CUDA_AWARE if word in words)


def _parse_interfaces(text: str) -> tuple[str, ...]:
    """MPICOLL_INTERFACE: names of interfaces, addresses and networks with commas."""
    if not text.strip():
        return ()
    from ipaddress import ip_network
    from socket import if_nameindex

    words = tuple(word.strip() for word in text.split(","))
    for word in words:
        is_network = "/" in word or ":" in word
        with suppress(ValueError):
            ip_network(word, strict=False)
            continue
        if is_network or not word or len(word.encode()) > _NAME_LIMIT:
            raise SetupError(
                f"MPICOLL_INTERFACE={text!r}: {word!r} is neither the name of an interface nor an address or a network"
                f" such as 10.0.0.0/16; interfaces of this host: {', '.join(name for _, name in if_nameindex())}"
            )
    return words


@lru_cache(maxsize=1)
def config() -> Config:
    """Return the configuration of this process."""
    return Config.read(os.environ)


def find_unknown_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that have the prefix of mpicoll and are no settings, each with the one that it resembles, or
    with an empty string."""
    prefix, known = "MPICOLL_", [one.upper() for one in Config._fields]
    unknown = {name: name.removeprefix(prefix) for name in sorted(environ) if name.startswith(prefix)}
    unknown = {name: word for name, word in unknown.items() if word not in known}
    if not unknown:
        return {}
    from difflib import get_close_matches  # late: few programs need it

    # MPICOLL_SHARED resembles MPICOLL_SHARED_MEMORY, and MPICOLL_ROOT none.
    similar = {name: get_close_matches(word, known, 1, 0.62) for name, word in unknown.items()}
    return {name: f"{prefix}{words[0]}" if words else "" for name, words in similar.items()}
