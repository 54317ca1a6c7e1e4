#!/usr/bin/env bash
# Train on many nodes under Slurm:
#
#     sbatch --nodes 4 scripts/slurm.sh --config 1b [--section.key value ...]
#
# Submit it from the repository's folder, which all nodes must see. To adapt: the lines below (sbatch's own flags, given
# before the script's name, go before them), and what your cluster needs loaded before training.
#
#SBATCH --job-name=torchtitan_diloco
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1      # one launcher on each node, which starts one process for each GPU
#SBATCH --gpus-per-node=8        # leave it out on nodes without GPUs, and set NPROC below
#SBATCH --cpus-per-task=64       # all cores of a node: they are shared out among its processes
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@180        # seconds before the end of --time: training finishes its step and saves
#SBATCH --output=slurm-%j.log
set -euo pipefail

# To adapt: modules, a container, a Python that has torch (then nothing is installed; see docs/launching.md).
# module load cuda
# export PYTHON=/path/to/python3
# To adapt: the network between the nodes, where the default is the wrong one (`ip -brief address` lists the names).
# export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0
# To adapt: processes on each node, where they are not to be one for each GPU.
# export NPROC=2

# Slurm runs a copy of this file from a folder of its own, so the repository is where the job was submitted.
REPOSITORY="${TORCHTITAN_DILOCO:-$SLURM_SUBMIT_DIR}"
if [ ! -x "$REPOSITORY/run_train.sh" ]; then
    echo "error: $REPOSITORY has no run_train.sh; submit from the repository's folder, or set TORCHTITAN_DILOCO to it" >&2
    exit 1
fi

export NNODES="$SLURM_JOB_NUM_NODES"
# `read` takes the first line; `head` would end scontrol by SIGPIPE on large jobs.
read -r first_node < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
# A port of the job's own, for two jobs may share a node.
export RDZV_ENDPOINT="$first_node:$((20000 + SLURM_JOB_ID % 10000))"
export RDZV_ID="$SLURM_JOB_ID"
# srun does not take over --cpus-per-task by itself.
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-}"
if [ -z "$SRUN_CPUS_PER_TASK" ]; then unset SRUN_CPUS_PER_TASK; fi

# A mistake in the config ends the job here, and what is to be installed is installed once, not on all nodes at once.
"$REPOSITORY/run_train.sh" "$@" --print-config

# shellcheck disable=SC2016 # the variable is each node's own
exec srun --nodes="$NNODES" --ntasks="$NNODES" --ntasks-per-node=1 --kill-on-bad-exit=1 \
    bash -c 'NODE_RANK="$SLURM_NODEID" exec "$0" "$@"' "$REPOSITORY/run_train.sh" "$@"
