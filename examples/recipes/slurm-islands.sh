#!/usr/bin/env bash
# Islands as an array of preemptible jobs, one on each node. Submit from the repository's folder:
#
#     sbatch --array=0-3 examples/recipes/slurm-islands.sh --config 1b --islands.begin 4 [--section.key value ...]
#
# The server runs where all nodes reach it (docs/islands.md), and JOIN is its join file.
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
JOIN="${JOIN:-islands/join.txt}"
NAME="island-$SLURM_ARRAY_TASK_ID"

cd "${TORCHTITAN_DILOCO:-$SLURM_SUBMIT_DIR}"
./run_train.sh --islands.join "$JOIN" --islands.name "$NAME" --run.folder "outputs/$SLURM_ARRAY_JOB_ID/$NAME" "$@" &
child=$!
# Slurm signals this script, which passes the signal on: the island sends its work, and leaves.
trap 'kill -TERM "$child"' TERM
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
