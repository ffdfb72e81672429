#!/bin/bash
# Slurm prolog: a node that lost a GPU or a card, or whose GPUDirect RDMA is broken, gets no job.
#
#   slurm.conf:  Prolog=/etc/slurm/slurm_prolog.sh     (on every node, owned by root)
#                PrologFlags=Alloc                     (before the job, not before its first step)
#
# It exits with 1 where the node is unfit: Slurm then drains the node and requeues the job, held unless
# SchedulerParameters has nohold_on_prolog_fail. The cause is in the system's log and in $REPORT. What merely cannot be
# seen, or takes longer than a minute, lets the job start. It calls no command of Slurm, which prologs must not do, and
# takes about a second.
export PATH=${GRADWIRE_BIN:-/opt/gradwire/bin}:/usr/sbin:/usr/bin:/sbin:/bin # a prolog starts without one
EXPECTED_GPUS=${EXPECTED_GPUS:-8}
EXPECTED_NICS=${EXPECTED_NICS:-8}
REPORT=${REPORT:-/var/log/gdr-check.json}

say() { # the log of a machine without syslog is the standard error, which slurmd keeps
    echo "gradwire prolog: $1" >&2
    logger -t gradwire-prolog "$1" 2>/dev/null
}
unfit() {
    say "node unfit: $1"
    exit 1
}
field() { python3 -c 'import json, sys; print(json.load(sys.stdin)[sys.argv[1]])' "$1"; }

if machine=$(timeout 60 gradwire topo --json); then
    gpus=$(field n_gpu <<<"$machine")
    nics=$(field n_nic <<<"$machine")
    [ "$gpus" -ge "$EXPECTED_GPUS" ] || unfit "$gpus of $EXPECTED_GPUS GPUs"
    [ "$nics" -ge "$EXPECTED_NICS" ] || unfit "$nics of $EXPECTED_NICS network cards"
else
    say "gradwire topo did not run; the job starts unchecked"
    exit 0
fi

timeout 60 gradwire gdr-check --json >"$REPORT"
[ $? -ne 2 ] || unfit "gdr-check: $(field cause <"$REPORT")" # 2: a check failed; 1 warns, 3 could not see
exit 0
