#!/usr/bin/env bash
# Train: ./run_train.sh [--config NAME_OR_PATH] [--section.key value ...]; --help lists the settings that matter most.
# Several nodes, GPUs, another Python: docs/launching.md.
set -euo pipefail

# shellcheck source=scripts/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/scripts/environment.sh"
prepare_environment ""

# Signals must reach Python, and Python must not import files of the current folder.
export PYTHONSAFEPATH=1
export TORCHTITAN_DILOCO_STARTED_BY="$REPOSITORY/run_train.sh" # for hints
# Without -S, Ctrl-C in the first tenths of a second would print a traceback of Python's own start-up.
exec "$ENVIRONMENT_PYTHON" -S -u -c '
import signal, sys
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
import site
site.main()
from runpy import run_module
run_module("torchtitan_diloco.launch", run_name="__main__", alter_sys=True)' "$@"
