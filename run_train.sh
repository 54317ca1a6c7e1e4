#!/usr/bin/env bash
# Train: ./run_train.sh [--config NAME_OR_PATH] [--section.key value ...]; --help lists what can be set.
# Many nodes, GPUs, a Python of your own: docs/launching.md.
set -euo pipefail

# shellcheck source=scripts/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/scripts/environment.sh"
prepare_environment ""

# Signals are to reach Python, and files in the folder of the user are not to be taken for modules.
export PYTHONSAFEPATH=1
exec "$ENVIRONMENT_PYTHON" -u -m torchtitan_diloco.launch "$@"
