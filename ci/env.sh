# shellcheck shell=bash
# To be sourced: what Open MPI needs on a small machine, in a container and as root. A variable that is already set stays.
# MPICH ignores all of it.

# Ranks are the parallelism here; a thread pool in each of them would only fight over the same cores.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# Without these, mpirun refuses to start as root, which is what containers often are.
if [[ $(id -u) -eq 0 ]]; then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi

# "There are not enough slots available": 4 ranks on fewer than 4 cores. Open MPI then also yields while it waits.
export PRTE_MCA_rmaps_default_mapping_policy=${PRTE_MCA_rmaps_default_mapping_policy:-:oversubscribe}
# The same for Open MPI 4.
export OMPI_MCA_rmaps_base_oversubscribe=${OMPI_MCA_rmaps_base_oversubscribe:-1}

# The PyPI wheel contains UCX; where UCX finds no device, every shared window prints "OSC UCX component priority set
# inside component query failed" to stderr.
export OMPI_MCA_osc=${OMPI_MCA_osc:-^ucx}

# Where the component ofi finds no device, it sleeps for a second in each MPI_Init.
export OMPI_MCA_btl=${OMPI_MCA_btl:-^ofi}
