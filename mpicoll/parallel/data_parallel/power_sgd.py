"""PowerSGD: gradients as products of matrices of low rank.

Vogels et al. 2019, "PowerSGD: practical low-rank gradient compression for distributed optimization". torch has a hook
of DistributedDataParallel for it, which takes DDP's bucket and a process group; the gradients here have neither.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mpicoll.collectives.allreduce import allreduce_init
from mpicoll.engine.core.communicator import Communicator
from mpicoll.parallel.data_parallel.buckets import Bucket
from mpicoll.parallel.data_parallel.exchange import DenseExchange, Waits


class PowerSGDExchange:
    """All-reduces of two thin factors for each matrix M of the bucket, instead of M.

    P = M·Q is averaged and orthogonalised, then Q = Mᵀ·P is averaged, and the result is P·Qᵀ. Q is the starting point
    of the next step. Parameters that this does not make smaller, and flags, are sent with P as they are. The products
    are computed on each rank from the same factors; results are equal on all ranks if these have the same processors
    and number of threads.
    """

    def __init__(self, bucket: Bucket, op: str, comm: Communicator, rank: int, start: int) -> None:
        self._dense = DenseExchange(bucket, op, comm)
        self._bucket = bucket
        self._steps_left = start
        self._share = 1.0 if op == "avg" else 1 / comm.size
        parts = bucket.gradients.split([one.numel() for one in bucket.parameters])
        self._rest: list[Tensor] = [bucket.flags]
        self._matrices: list[Tensor] = []
        ranks = []
        self._numbers: list[int] = []
        for number, (part, view) in enumerate(zip(parts, bucket.views, strict=True)):
            # Rows in the order of memory, which differs from that of dimensions in a transposed parameter.
            rows = view.shape[view.stride().index(max(view.stride()))] if view.dim() > 1 else 0
            columns = part.numel() // rows if rows else 0
            low = min(rank, rows, columns)
            if 0 < low * (rows + columns) < part.numel() and not part.is_complex():
                self._matrices.append(part.view(rows, columns))
                self._numbers.append(number)
                ranks.append(low)
            else:
                self._rest.append(part)
        sizes = [(one.shape, low) for one, low in zip(self._matrices, ranks, strict=True)]
        wide = torch.promote_types(bucket.flat.dtype, torch.float32)
        self._errors = [torch.zeros_like(one, dtype=wide) for one in self._matrices]
        num_rest = sum(one.numel() for one in self._rest)
        self._sent = bucket.flat.new_empty(num_rest + sum(n * low for (n, _), low in sizes), dtype=wide)
        self._rest_sent, self._ps = self._sent[:num_rest], []
        start_of = num_rest
        for (n, _), low in sizes:
            self._ps.append(self._sent[start_of : start_of + n * low].view(n, low))
            start_of += n * low
        # The same random numbers on all ranks.
        random = torch.Generator().manual_seed(1)
        self._q = torch.randn(sum(m * low for (_, m), low in sizes), generator=random).to(self._sent)
        q_parts = self._q.split([m * low for (_, m), low in sizes])
        self._qs = [part.view(-1, low) for part, low in zip(q_parts, ranks, strict=True)]
        self._first = allreduce_init(self._sent, op, out=self._sent, comm=comm)
        self._second = allreduce_init(self._q, op, out=self._q, comm=comm)

    @property
    def nbytes(self) -> int:
        """Bytes that this rank passes to collectives in the next step."""
        return self._dense.nbytes if self._steps_left > 0 or not self._matrices else self._sent.nbytes + self._q.nbytes

    @torch.no_grad()
    def start(self) -> Waits:
        if self._steps_left > 0 or not self._matrices:
            self._steps_left -= 1
            yield from self._dense.start()
            return
        for matrix, error, p, q in zip(self._matrices, self._errors, self._ps, self._qs, strict=True):
            error.add_(matrix)
            torch.matmul(error, q, out=p)
        torch.cat([one.to(self._sent.dtype) for one in self._rest], out=self._rest_sent)
        self._first.start()
        yield self._first.wait
        for error, p, q in zip(self._errors, self._ps, self._qs, strict=True):
            p.copy_(_orthogonalise(p))
            torch.matmul(error.t(), p, out=q)
        parts = self._rest_sent.split([one.numel() for one in self._rest])
        for one, part in zip(self._rest, parts, strict=True):
            one.copy_(part)
        self._second.start()
        yield self._second.wait
        unused = self._bucket.list_unused()
        for number, matrix, error, p, q in zip(
            self._numbers, self._matrices, self._errors, self._ps, self._qs, strict=True
        ):
            product = p @ q.t()
            matrix.copy_(product)
            # Where no rank has a gradient, the product is dropped.
            if number not in unused:
                error.sub_(product, alpha=self._share)
            # What is not finite would stay so in all later steps.
            error.nan_to_num_(0, 0, 0)
            q.nan_to_num_(0, 0, 0)


def _orthogonalise(p: Tensor) -> Tensor:
    """Return orthonormal columns of the same span. A matrix of zeros is all right: its product with Q is zero."""
    q: Tensor = torch.linalg.qr(p).Q
    return q
