"""The descriptor to which a dying process may write text from a signal handler."""

from __future__ import annotations

import os

from mpicoll.transport.control.connection import Connection


class CrashDescriptor:
    """A descriptor that refers to a connection, or to stderr while there is none. Its number never changes.

    Other threads may write to it at any time, so it is closed only when the number can't be used any more.
    """

    def __init__(self) -> None:
        self.fd = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        self.connection: Connection | None = None
        """The connection to which it refers."""
        self.use_stderr()

    @property
    def rank(self) -> int:
        """The rank to which it refers; -1 while it refers to stderr."""
        return -1 if self.connection is None else self.connection.rank

    def prefer(self, client: Connection) -> None:
        """Let the descriptor refer to `client`, unless it refers to the hub or to a client with a lower rank."""
        before = self.connection
        if before is None or (before.role == "client" and client.rank < before.rank):
            self.redirect(client)

    def redirect(self, connection: Connection | None) -> None:
        """Let the descriptor refer to `connection`, or to stderr if it is None."""
        if connection is self.connection:
            return
        if connection is None:
            self.use_stderr()
        else:
            self.connection = connection
            os.dup2(connection.sock.fileno(), self.fd, inheritable=False)

    def use_stderr(self) -> None:
        """Let the descriptor refer to stderr."""
        self.connection = None
        try:
            os.dup2(2, self.fd, inheritable=False)
        except OSError:  # stderr is closed
            null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            os.dup2(null, self.fd, inheritable=False)
            os.close(null)
