"""Built-in rules."""

DEFAULT_RULES = (
    "allreduce:0-8k:native,0-64k:slots,0-8m:pieces,8m-inf:cma,0-inf:pieces,2m-inf:hierarchical,2m-inf:ring,0-inf:native;"
    "reduce:0-2m:native,0-64k:slots,0-inf:pieces,0-inf:native;"
    "reduce_scatter:0-32k:native,0-128k:pieces,128k-inf:cma,0-inf:pieces,0-inf:native;"
    "bcast:native,pieces;gather:native,pieces;scatter:native,pieces;allgather:native,pieces;alltoall:native,pieces;"
    "scan:native;exscan:native;barrier:native"
)
"""Rules for data on the host, unless others are forced or tuned."""

DEVICE_RULES = (
    "allreduce:0-4k:slots,0-1m:ipc,0-inf:nccl,0-inf:ipc,0-64k:slots,0-inf:pieces,0-inf:hierarchical,2m-inf:ring;"
    "reduce:0-4k:slots,0-1m:ipc,0-inf:nccl,0-inf:ipc,0-64k:slots,0-inf:pieces,0-inf:hierarchical;"
    "reduce_scatter:0-1m:ipc,0-inf:nccl,0-inf:ipc,0-inf:pieces,0-inf:hierarchical;"
    "bcast:0-1m:ipc,0-inf:nccl,0-inf:ipc,0-inf:native,0-inf:pieces;"
    "gather:0-1m:ipc,0-inf:nccl,0-inf:ipc,0-inf:native,0-inf:pieces;"
    "scatter:0-1m:ipc,0-inf:nccl,0-inf:ipc,0-inf:native,0-inf:pieces;"
    "allgather:0-1m:ipc,0-inf:nccl,0-inf:ipc,0-inf:native,0-inf:pieces;"
    "alltoall:0-1m:ipc,0-inf:nccl,0-inf:ipc,0-inf:native,0-inf:pieces"
)
"""Rules for data on a device. MPI's own reductions of device memory are taken only when asked for: libraries that have
them are known to copy to the host."""

FALLBACK_RULES = (
    "allreduce:0-16k:recursive_doubling,16k-inf:halving_doubling;"
    "reduce:0-64k:binomial,64k-inf:reduce_scatter_gather;"
    "bcast:0-64k:binomial,64k-inf:scatter_allgather;"
    "gather:binomial;"
    "scatter:binomial;"
    "allgather:0-64k:bruck,64k-inf:ring;"
    "reduce_scatter:0-64k:recursive_halving,64k-inf:pairwise;"
    "alltoall:0-4k:bruck,4k-inf:pairwise;"
    "scan:recursive_doubling;"
    "exscan:recursive_doubling;"
    "barrier:dissemination"
)
"""Schedules for requests that the MPI library can't serve, or where there is none."""
