"""Communicators, and how an operation on them is chosen, bound to memory, run, and waited for."""
