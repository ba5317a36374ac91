"""Transports, which move bytes between ranks: MPI, or the threads of one process."""
