#!/usr/bin/env bash
# Run by ci/slurm.sh on the first of two hosts of ci/hosts.py: start the daemons of Slurm on both, then the command.
# The daemons end with the namespaces of the hosts.
set -euo pipefail

cores=$(env -u OMP_NUM_THREADS nproc)
folder=$(mktemp -d)
export SLURM_CONF=$folder/slurm.conf PATH=$PATH:/usr/sbin
mkdir -p "$folder"/{munge,controller,h0,h1}
chmod 700 "$folder/munge"
head -c 64 /dev/urandom >"$folder/munge/key"
chmod 400 "$folder/munge/key"

# Time limits are enforced when they have passed, and signals are sent early, by up to a minute: Slurm counts in minutes.
cat >"$SLURM_CONF" <<CONFIGURATION
ClusterName=hosts
SlurmctldHost=h0
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge/socket
CredType=cred/munge
StateSaveLocation=$folder/controller
SlurmdSpoolDir=$folder/%n
TmpFS=/dev/shm
SlurmctldPidFile=$folder/controller.pid
SlurmdPidFile=$folder/%n.pid
SlurmctldLogFile=$folder/controller.log
SlurmdLogFile=$folder/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
ReturnToService=2
KillWait=10
MpiDefault=none
NodeName=h[0-1] CPUs=$cores State=UNKNOWN
PartitionName=main Nodes=h[0-1] Default=YES MaxTime=30 PriorityTier=1 GraceTime=10
PartitionName=urgent Nodes=h[0-1] MaxTime=30 PriorityTier=10
CONFIGURATION

fail() {
    printf '%s\n' "$@" >&2
    tail -n 20 "$folder"/*.log "$folder"/munge/log >&2 2>/dev/null || true
    exit 1
}

# The folder of a temporary directory may be writable by all, which munged refuses without --force.
munged --force --key-file="$folder/munge/key" --socket="$folder/munge/socket" --pid-file="$folder/munge/pid" \
    --log-file="$folder/munge/log" --seed-file="$folder/munge/seed" || fail "munged has not started"
slurmctld -f "$SLURM_CONF" || fail "slurmctld has not started"
for host in h0 h1; do
    "$ON_HOST" "$host" slurmd -f "$SLURM_CONF" -N "$host" || fail "slurmd has not started on $host"
done
for ((tenth = 0; $(sinfo --noheader --states=idle --partition=main --format=%D 2>/dev/null || echo 0) != 2; tenth++)); do
    ((tenth < 300)) || fail "the hosts are not idle after 30 s" "$(sinfo -R 2>&1)"
    sleep 0.1
done
"$@"
