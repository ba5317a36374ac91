#!/usr/bin/env bash
# Run by ci/slurm.sh in its cluster: jobs of srun and of sbatch, a sample of the tests, and the ends of jobs.
# A job that Slurm ends must leave no process on a host, and its output must say what ended it.
set -euo pipefail
# As on a cluster, where ranks get the cores of their allocation. ci/env.sh serves one small machine.
unset PRTE_MCA_rmaps_default_mapping_policy OMPI_MCA_rmaps_base_oversubscribe

job=(--nodes=2 --ntasks-per-node=2)
export logs=${logs:-$(mktemp -d)}

# ended NAME PATTERN: the job of this name is over, its log matches, and none of its processes is left.
ended() {
    local name=$1 pattern=$2 tenth
    for ((tenth = 0; tenth < 300; tenth++)); do
        [[ -n $(squeue --noheader --name="$name") ]] || break
        sleep 0.1
    done
    cat "$logs/$name.log"
    if [[ $tenth -eq 300 ]]; then
        echo "the job $name has not ended"
        return 1
    fi
    grep -qE "$pattern" "$logs/$name.log" || { echo "no line of $name matches $pattern" && return 1; }
    sleep 1
    if pgrep -f "ci/slurm/program.py work $logs/$name"; then
        echo "processes of $name are left" && return 1
    fi
}

# submit NAME OPTIONS...: submit a job of ranks that work until something ends them, and wait until they do.
submit() {
    local name=$1 tenth
    shift
    mkdir "$logs/$name"
    sbatch --quiet "${job[@]}" --job-name="$name" --output="$logs/$name.log" "$@" ci/slurm/program.py work "$logs/$name" \
        $victim
    for ((tenth = 0; tenth < 300; tenth++)); do
        [[ ! -e $logs/$name/started ]] || return 0
        sleep 0.1
    done
    cat "$logs/$name.log"
    echo "the ranks of $name have not started"
    return 1
}

batch() {
    local status=0
    sbatch --quiet --wait "${job[@]}" --output="$logs/batch.log" "$@" || status=$?
    cat "$logs/batch.log"
    return $status
}

cancel() {
    victim='' submit "cancel-$1" "examples/slurm/$1.sbatch"
    scancel --name="cancel-$1"
    ended "cancel-$1" SIGTERM
}

preempt() {
    victim='' submit preempt examples/slurm/srun.sbatch
    srun --partition=urgent "${job[@]}" true
    ended preempt "SIGTERM"
}

exceed() {
    victim='' submit exceed --time=1 --signal=TERM@50 examples/slurm/srun.sbatch
    local tenth
    for ((tenth = 0; tenth < 900; tenth++)); do
        [[ -n $(squeue --noheader --name=exceed) ]] || break
        sleep 0.1
    done
    ended exceed "SIGTERM"
}

die() {
    victim=3 submit "die-$1" "examples/slurm/$1.sbatch"
    ended "die-$1" "rank 3.*(died|killed|SIGKILL)"
}

# A stage runs a function of this script in a process of its own.
if [[ $# -gt 0 ]]; then
    "$@"
    exit
fi
self=(bash ci/slurm/checks.sh)
source ci/stages.sh

check places 60 srun --mpi=pmix "${job[@]}" python ci/slurm/program.py places
for example in hello ddp_digits parameter_server; do
    check "srun-$example" 120 "${self[@]}" batch examples/slurm/srun.sbatch "examples/$example.py"
    check "mpirun-$example" 120 "${self[@]}" batch examples/slurm/mpirun.sbatch "examples/$example.py"
done
for start in srun mpirun; do
    check "cancel-$start" 60 "${self[@]}" cancel "$start"
    check "die-$start" 60 "${self[@]}" die "$start"
done
check preempt 60 "${self[@]}" preempt
check exceed 150 "${self[@]}" exceed
tests sample 300 srun --mpi=pmix "${job[@]}" python -m pytest --with-mpi -q -m mpi -p no:cacheprovider --tier quick \
    tests/collectives/test_{allreduce,scatter,p2p,objects}.py tests/torch/unchanged/test_ddp.py

sum_up
