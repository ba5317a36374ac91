"""Built-in rules."""

DEFAULT_RULES = (
    "allreduce:0-64k:shm_flat,64k-inf:shm_or_cma,0-inf:shm_pipelined,0-8k:native,"
    "2m-inf:hierarchical,2m-inf:ring,0-inf:native;"
    "reduce:0-64k:shm_flat,64k-inf:shm_or_cma,0-inf:shm_pipelined,0-inf:native;"
    "reduce_scatter:0-64k:shm_pipelined,64k-inf:shm_or_cma,0-inf:shm_pipelined,2m-inf:hierarchical,2m-inf:ring,"
    "0-inf:native;"
    "bcast:0-64k:shm_pipelined,64k-inf:shm_or_cma,0-inf:shm_pipelined,4m-inf:hierarchical,0-inf:native;"
    "gather:0-64k:shm_pipelined,64k-inf:shm_or_cma,0-inf:shm_pipelined,0-inf:native;"
    "scatter:0-64k:shm_pipelined,64k-inf:shm_or_cma,0-inf:shm_pipelined,0-inf:native;"
    "allgather:0-64k:shm_pipelined,64k-inf:shm_or_cma,0-inf:shm_pipelined,2m-inf:hierarchical,"
    "2m-inf:ring,0-inf:native;"
    "alltoall:0-64k:shm_pipelined,64k-inf:shm_or_cma,0-inf:shm_pipelined,0-inf:native;"
    "scan:0-64k:shm_pipelined,64k-inf:shm_or_cma,0-inf:shm_pipelined,native;"
    "exscan:0-64k:shm_pipelined,64k-inf:shm_or_cma,0-inf:shm_pipelined,native;barrier:shm_flat,native"
)
"""Rules for data on the host, unless others are forced or tuned."""

TCP_RULES = (
    "allreduce:256k-inf:hierarchical,1m-inf:ring;"
    "reduce:4m-inf:hierarchical,512k-inf:chain,512k-inf:reduce_scatter_gather;"
    "reduce_scatter:256k-inf:hierarchical,512k-2m:pairwise,2m-inf:ring;"
    "bcast:256k-inf:hierarchical,64k-inf:chain/1,64k-inf:scatter_allgather;"
    "allgather:1m-inf:hierarchical,1m-inf:ring;"
    "gather:2m-inf:linear;"
    "scatter:2m-inf:linear;"
    "alltoall:512k-inf:pairwise;"
    "scan:512k-inf:linear;"
    "exscan:512k-inf:linear"
)
"""Rules for data on the host between three and more nodes that only TCP joins: they come before DEFAULT_RULES. MPI
libraries announce large messages there, and take algorithms that send more than necessary between the nodes."""

TCP_PAIR_RULES = (
    "allreduce:2m-inf:hierarchical,1m-inf:ring;"
    "reduce:8m-inf:hierarchical,1m-inf:chain;"
    "reduce_scatter:512k-inf:hierarchical,256k-2m:pairwise,2m-inf:ring;"
    "bcast:2m-inf:hierarchical,1m-inf:chain/1;"
    "allgather:1m-inf:hierarchical,1m-inf:ring;"
    "gather:2m-inf:linear;"
    "scatter:2m-inf:linear;"
    "alltoall:512k-inf:pairwise;"
    "scan:1m-inf:linear;"
    "exscan:1m-inf:linear"
)
"""The same between two nodes, where most algorithms send as much."""

TCP_BLOCKS = {"chain": 128 * 1024, "chain/1": 128 * 1024, "linear": 128 * 1024, "scatter_allgather": 8 * 1024}
"""Bytes of each rank's block from which a schedule of these rules is taken, if not from DEFAULT_TCP_BLOCK. The last
rank of a chain, and of a linear scan, waits until a piece of up to 256 KiB has passed through all others."""

DEFAULT_TCP_BLOCK = 32 * 1024
"""With smaller blocks the number of rounds counts, each of which takes longer than one of the MPI library."""

DEVICE_RULES = (
    "allreduce:0-1m:ipc,0-inf:nccl,0-inf:ipc,0-64k:shm_flat,0-inf:shm_pipelined,"
    "0-inf:hierarchical,2m-inf:ring;"
    "reduce:0-1m:ipc,0-inf:nccl,0-inf:ipc,0-64k:shm_flat,0-inf:shm_pipelined,0-inf:hierarchical;"
    "reduce_scatter:0-1m:ipc,0-inf:nccl,0-inf:ipc,0-inf:shm_pipelined,0-inf:hierarchical;"
    "bcast:0-1m:ipc,0-inf:nccl,0-inf:ipc,0-inf:native,0-inf:shm_pipelined;"
    "gather:0-1m:ipc,0-inf:nccl,0-inf:ipc,0-inf:native,0-inf:shm_pipelined;"
    "scatter:0-1m:ipc,0-inf:nccl,0-inf:ipc,0-inf:native,0-inf:shm_pipelined;"
    "allgather:0-1m:ipc,0-inf:nccl,0-inf:ipc,0-inf:native,0-inf:shm_pipelined;"
    "alltoall:0-1m:ipc,0-inf:nccl,0-inf:ipc,0-inf:native,0-inf:shm_pipelined"
)
"""Rules for data on a device. MPI's own reductions of device memory are used only if they are forced: libraries that
have them are known to copy to the host."""

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
