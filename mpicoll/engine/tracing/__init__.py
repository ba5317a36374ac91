"""Traces: the operations of all ranks on one clock, in a file for trace viewers."""
