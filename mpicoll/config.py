"""Every environment variable that mpicoll reads, read once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, cast

from mpicoll.errors import SetupError

Transport = Literal["auto", "mpi", "local"]


@dataclass(frozen=True, slots=True)
class Config:
    """What the environment asks for.

    ========================  =======================================================================  ========
    variable                  meaning                                                                  default
    ========================  =======================================================================  ========
    ``MPICOLL_ALGORITHMS``    which algorithm to take, such as ``allreduce:0-64k:native,64k-inf:ring``  (empty)
                              or ``bcast:chain/8``; several collectives are separated by ``;``
    ``MPICOLL_TIMEOUT``       seconds after which a call that waits is given up                         1800
    ``MPICOLL_TRANSPORT``     ``mpi``, ``local`` (a world of one), or ``auto``: MPI under a launcher,    auto
                              a world of one otherwise
    ========================  =======================================================================  ========
    """

    algorithms: str = ""
    timeout: float = 1800.0
    transport: Transport = "auto"

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Config:
        """Read `environ`. Raises SetupError that names the variable, its value and what would be accepted."""
        transport = environ.get("MPICOLL_TRANSPORT", "auto")
        if transport not in ("auto", "mpi", "local"):
            raise SetupError(f"MPICOLL_TRANSPORT={transport!r}: must be auto, mpi or local")
        text = environ.get("MPICOLL_TIMEOUT", "1800")
        try:
            timeout = float(text)
        except ValueError:
            timeout = -1.0
        if not 0 < timeout < float("inf"):
            raise SetupError(f"MPICOLL_TIMEOUT={text!r}: must be a positive number of seconds")
        return cls(
            algorithms=environ.get("MPICOLL_ALGORITHMS", ""),
            timeout=timeout,
            transport=cast(Transport, transport),
        )


@lru_cache(maxsize=1)
def config() -> Config:
    """The configuration of this process."""
    return Config.read(os.environ)
