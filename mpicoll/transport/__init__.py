"""How bytes get from rank to rank: MPI, or threads of one process."""
