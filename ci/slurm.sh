#!/usr/bin/env bash
# The library under Slurm. Makes a cluster of two hosts on this machine, which ends with this script:
#     ci/slurm.sh                                                   run the checks of ci/slurm/checks.sh
#     ci/slurm.sh srun --mpi=pmix -N 2 -n 4 python program.py       run a command in it
# The hosts are namespaces (see ci/hosts.py), so it needs root, and Debian's packages
#     slurmctld slurmd slurm-client munge libpmix-dev iproute2
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source ci/setup.sh

for program in slurmctld slurmd munged srun ip; do
    [[ -n $(PATH=$PATH:/usr/sbin:/sbin type -P "$program") ]] ||
        die "ci/slurm.sh: $program is absent. On Debian and Ubuntu:" \
            "apt-get install slurmctld slurmd slurm-client munge libpmix-dev iproute2"
done
[[ $(id -u) -eq 0 ]] || die "ci/slurm.sh: making hosts needs root"

[[ $# -gt 0 ]] || set -- bash ci/slurm/checks.sh
exec python ci/hosts.py --alone 2 0 bash ci/slurm/cluster.sh "$@"
