#!/usr/bin/env bash
# Islands as an array of preemptible jobs, one on each node, which meet in a folder of the shared file system.
# Submit the syncer and the islands from the repository's folder, which has been set up:
#
#     mkdir -p outputs
#     sbatch --cpus-per-task=4 --time=7-0 --requeue --wrap '.venv/bin/torchtitan-diloco islands sync outputs/store --threads 4'
#     sbatch --array=0-3 examples/recipes/slurm-islands.sh --config 1b --islands.begin 4 [--section.key value ...]
#
# JOIN is the folder of the run, or the join file of a bucket (docs/islands.md).
# A job that is preempted, or at the end of its time, leaves the run and is queued again.
#
#SBATCH --job-name=islands
#SBATCH --nodes=1
#SBATCH --gpus-per-node=8        # without GPUs: delete this line, and set NPROC below
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@180      # to this script, before the end of --time
#SBATCH --output=island-%A_%a.log
set -euo pipefail

# Adapt: what your cluster needs before training.
# export PYTHON=/path/to/python3
# export NPROC=2
JOIN="${JOIN:-outputs/store}"
NAME="island-$SLURM_ARRAY_TASK_ID"

cd "${TORCHTITAN_DILOCO:-$SLURM_SUBMIT_DIR}"
# Slurm signals this script, which passes the signal on: the island sends its work, and leaves.
child=""
is_stopped=""
pass_on() {
    is_stopped=1
    if [ -n "$child" ]; then
        kill -TERM "$child" 2>/dev/null || true
        is_stopped=""
    fi
}
trap pass_on TERM
./run_train.sh --islands.join "$JOIN" --islands.name "$NAME" --run.folder "outputs/$SLURM_ARRAY_JOB_ID/$NAME" "$@" &
child=$!
if [ -n "$is_stopped" ]; then # the signal came before the child had a number
    pass_on
fi
code=0
wait "$child" || code=$?
while kill -0 "$child" 2>/dev/null; do # a signal has interrupted the wait
    code=0
    wait "$child" || code=$?
done
if [ "$code" = 143 ]; then # stopped by a signal or a notice, before the end of the run
    scontrol requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
fi
exit "$code"
