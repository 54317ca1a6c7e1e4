#!/usr/bin/env bash
# Train: ./run_train.sh [--config NAME_OR_PATH] [--section.key value ...]; --help lists the settings that matter most.
# Several nodes, GPUs, another Python: docs/launching.md.
set -euo pipefail

# shellcheck source=scripts/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/scripts/environment.sh"
prepare_environment ""

export PYTHONSAFEPATH=1 # Python must not import files of the current folder
export TORCHTITAN_DILOCO_STARTED_BY="$REPOSITORY/run_train.sh" # for hints
exec "$ENVIRONMENT_PYTHON" -u -m torchtitan_diloco train "$@"
