"""Communicators: their identity, order of operations, requests, and memory that the ranks of a node share."""
