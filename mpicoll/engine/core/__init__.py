"""Communicators: their identity, order of operations, requests, shared memory, and comparison of the ranks' calls."""
