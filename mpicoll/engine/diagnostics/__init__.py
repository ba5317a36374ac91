"""Diagnostics: positions and last operations of the ranks, deadlocks, and the end of processes."""
