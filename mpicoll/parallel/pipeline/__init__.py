"""Pipelines: a model cut into stages that work on different micro-batches at the same time."""
