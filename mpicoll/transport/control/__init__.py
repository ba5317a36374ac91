"""Connections among the ranks of a job beside MPI, and how processes have ended."""
