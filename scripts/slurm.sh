#!/usr/bin/env bash
# Train on several nodes under Slurm. Submit from the repository's folder, which all nodes must see:
#
#     sbatch --nodes 4 scripts/slurm.sh --config 1b [--section.key value ...]
#
# Adapt the lines below. sbatch's own flags, given before the script's name, override them.
#
#SBATCH --job-name=torchtitan_diloco
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1      # one launcher on each node starts a process for each GPU
#SBATCH --gpus-per-node=8        # without GPUs: delete this line, and set NPROC below
#SBATCH --cpus-per-task=64       # all cores of a node, shared by its processes
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@180        # or USR1; seconds before the end of --time: training finishes its step and saves
#SBATCH --output=slurm-%j.log
set -euo pipefail

# Adapt: what your cluster needs before training.
# module load cuda
# export PYTHON=/path/to/python3                                    # a Python that has torch
# export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0            # the network between nodes
# export NPROC=2                                                    # processes of each node

# Slurm runs a copy of this file, so the repository is where the job was submitted.
REPOSITORY="${TORCHTITAN_DILOCO:-$SLURM_SUBMIT_DIR}"
if [ ! -x "$REPOSITORY/run_train.sh" ]; then
    echo "error: $REPOSITORY has no run_train.sh; submit from the repository's folder, or set TORCHTITAN_DILOCO to it" >&2
    exit 1
fi

export NNODES="$SLURM_JOB_NUM_NODES"
read -r first_node < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export RDZV_ENDPOINT="$first_node:$((20000 + SLURM_JOB_ID % 10000))" # two jobs may share a node
if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"; fi

# A job that is queued again goes on in this folder. Settings of the command line come later, and count.
set -- --run.folder "outputs/slurm-$SLURM_JOB_ID" "$@"

# Set up once, not on all nodes at the same time. A mistake in the config, or a missing file, ends the job here.
"$REPOSITORY/run_train.sh" "$@" --print-config

# shellcheck disable=SC2016 # each node expands its own variable
exec srun --nodes="$NNODES" --ntasks="$NNODES" --ntasks-per-node=1 --kill-on-bad-exit=1 \
    bash -c 'NODE_RANK="$SLURM_NODEID" exec "$0" "$@"' "$REPOSITORY/run_train.sh" "$@"
