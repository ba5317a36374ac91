"""Every environment variable that mpicoll reads, read once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, cast

from mpicoll.errors import SetupError

Transport = Literal["auto", "mpi", "local"]
SharedMemory = Literal["auto", "named", "off"]


@dataclass(frozen=True, slots=True)
class Config:
    """What the environment asks for.

    ========================  =======================================================================  ========
    variable                  meaning                                                                  default
    ========================  =======================================================================  ========
    ``MPICOLL_ALGORITHMS``    which algorithm to take, such as ``allreduce:0-64k:native,64k-inf:ring``  (empty)
                              or ``bcast:chain/8``; several collectives are separated by ``;``
    ``MPICOLL_SHARED_MEMORY`` ``auto``; ``named``: files in /dev/shm, where nameless memory can't be passed  auto
                              on; ``off``: none
    ``MPICOLL_TIMEOUT``       seconds after which a call that waits is given up                         1800
    ``MPICOLL_TRANSPORT``     ``mpi``, ``local`` (a world of one), or ``auto``: MPI under a launcher,    auto
                              a world of one otherwise
    ``MPICOLL_TUNED``         the table of ``mpicoll tune`` to go by, or ``off``; rank 0's counts for    (found)
                              all. By default the one in ``~/.cache/mpicoll``, if there is one
    ========================  =======================================================================  ========
    """

    algorithms: str = ""
    shared_memory: SharedMemory = "auto"
    timeout: float = 1800.0
    transport: Transport = "auto"
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
        text = environ.get("MPICOLL_TIMEOUT", "1800")
        try:
            timeout = float(text)
        except ValueError:
            timeout = -1.0
        if not 0 < timeout < float("inf"):
            raise SetupError(f"MPICOLL_TIMEOUT={text!r}: must be a positive number of seconds")
        return cls(
            algorithms=environ.get("MPICOLL_ALGORITHMS", ""),
            shared_memory=cast(SharedMemory, shared),
            timeout=timeout,
            transport=cast(Transport, transport),
            tuned=environ.get("MPICOLL_TUNED", ""),
        )


@lru_cache(maxsize=1)
def config() -> Config:
    """The configuration of this process."""
    return Config.read(os.environ)
