#!/bin/bash
@settings@
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out

# Some time before the end Slurm sends SIGUSR1 to all processes of the step. They write a checkpoint and end with 138, and the job goes
# back into the queue, from where the same script continues. 0: done. 1 and 2: failed, a person must look. 130 and 143: stopped, as by scancel.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# Two jobs may share a machine, so each has its port.
port=$((20000 + SLURM_JOB_ID % 10000))

# Each machine ends by itself, so that none is stopped before its exit code says why; a minute after the first one at the latest.
srun --kill-on-bad-exit=0 --wait=60 ${SLURM_CPUS_PER_TASK:+"--cpus-per-task=$SLURM_CPUS_PER_TASK"} \
    @command@ \
    --rendezvous="$first:$port" @overrides@
code=$?
if [ "$code" = 138 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
