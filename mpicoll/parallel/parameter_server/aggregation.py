"""Updates of the weights of a server with the gradients of workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpicoll.collectives.allgather import allgather
from mpicoll.engine.core.communicator import Communicator
from mpicoll.parallel.parameter_server.agreement import Settings
from mpicoll.parallel.parameter_server.messages import Array
from mpicoll.parallel.parameter_server.plan import Bucket
from mpicoll.parallel.parameter_server.worker_state import WorkerState


class Aggregation:
    """Sums and clips gradients, and has the updater apply them. `servers` is the communicator of the servers.

    Attributes:
        versions: the number of updates of each bucket.
    """

    def __init__(
        self, settings: Settings, buckets: Sequence[Bucket], updater: Any, servers: Communicator | None
    ) -> None:
        self._settings = settings
        self._sync = settings.mode == "sync"
        self._buckets = buckets
        self._updater = updater
        self._servers = servers
        self.versions = [0] * len(buckets)

    def apply(self, indices: Sequence[int], workers: Sequence[WorkerState]) -> None:
        """Update buckets with the gradients of `workers`, which have arrived."""
        averaged = self._sync and self._settings.reduction == "mean"
        gradients = {index: self._add(index, workers, 1 / len(workers) if averaged else 1.0) for index in indices}
        max_norm = self._settings.max_norm
        if max_norm is not None:
            # As torch.nn.utils.clip_grad_norm_ does it.
            factor = max_norm / (self._find_norm(gradients, workers) + 1e-6)
            if factor < 1:
                for _, values in gradients.values():
                    self._updater.scale(values, factor)
        for index, (rows, values) in gradients.items():
            bucket = self._buckets[index]
            if _is_short(bucket):
                values = self._updater.cast(values, bucket.dtype)
            if rows is None:
                self._updater.update(index, values)
            else:
                # Without rows, too: the number of the update does not depend on which server has the rows.
                self._updater.update_rows(index, rows, values)
            self.versions[index] += 1
            for state in workers:
                state.take_gradient(index)

    def _add(self, index: int, workers: Sequence[WorkerState], factor: float) -> tuple[Array | None, Any]:
        """Return the rows of a sparse bucket, or None, and the gradient: the sum in the order of the workers' ranks."""
        bucket = self._buckets[index]
        values = [self._updater.view(state.gradients[index], bucket.dtype) for state in workers]
        if _is_short(bucket):
            values = [self._updater.cast(one, "float32") for one in values]
        rows: Array | None = None
        if bucket.sparse:
            pieces = [(state.rows[index], one) for state, one in zip(workers, values, strict=True)]
            rows, total = self._updater.add_rows(index, pieces)
        else:
            total = values[0]
            for one in values[1:]:
                self._updater.add(total, one)
        if factor != 1:
            self._updater.scale(total, factor)
        return rows, total

    def _find_norm(self, gradients: dict[int, tuple[Array | None, Any]], workers: Sequence[WorkerState]) -> float:
        if not self._sync:
            assert workers[0].push is not None
            return workers[0].push.norm
        mine = sum(self._updater.sum_of_squares(values) for _, values in gradients.values())
        # The other servers have the same step: none of them waits for this one to receive it.
        squares = allgather(np.array([mine]), comm=self._servers)
        return float(np.sqrt(squares.sum()))


def _is_short(bucket: Bucket) -> bool:
    """Return True if gradients are added, scaled and clipped in float32: a sum of float16 may exceed its range although
    the mean does not."""
    return bucket.itemsize < 4
