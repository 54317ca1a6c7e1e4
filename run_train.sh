#!/usr/bin/env bash
# Train: ./run_train.sh [--config NAME_OR_PATH] [--section.key value ...]; --help lists the settings.
# Several nodes, GPUs, another Python: docs/launching.md.
set -euo pipefail

# shellcheck source=scripts/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/scripts/environment.sh"
prepare_environment ""

# Signals must reach Python, and Python must not import files of the current folder.
export PYTHONSAFEPATH=1
exec "$ENVIRONMENT_PYTHON" -u -m torchtitan_diloco.launch "$@"
