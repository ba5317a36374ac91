#!/usr/bin/env bash
# Run in the image mpicoll:MPI-tests: a sample of the multi-rank tests, as an ordinary user, with the limits of the
# container. RANKS is their number (default: 3).
set -euo pipefail

[[ $(id -u) -ne 0 ]] || { echo "not as root" >&2; exit 1; }
df -h /dev/shm | tail -n 1
grep -E '^(CapEff|Seccomp|NoNewPrivs)' /proc/self/status
cat /proc/sys/kernel/yama/ptrace_scope 2>/dev/null || true
mpicoll doctor || true
# The launchers' own: the tests call mpirun by themselves, which `mpicoll run` does for programs.
export OMP_NUM_THREADS=1 OMPI_MCA_mpi_yield_when_idle=1 MPIR_CVAR_CH4_PROGRESS_THROTTLE=1
for folders in "tests/collectives" "tests/buffers tests/transport"; do
    # shellcheck disable=SC2086 # folders
    timeout --kill-after=10 420 mpicoll run -np "${RANKS:-3}" --no-tag python -m pytest --with-mpi -q -p no:cacheprovider \
        --tier quick -m mpi $folders
done
