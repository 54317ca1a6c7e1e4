#!/usr/bin/env bash
# Run the tests: ./run_tests.sh [pytest arguments]. All of them run on several cores at once, chosen ones as pytest would.
set -euo pipefail

# shellcheck source=scripts/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/scripts/environment.sh"
prepare_environment test

cd "$REPOSITORY"
if [ $# -eq 0 ]; then # four at most: a test may start as many processes itself
    set -- -n auto --maxprocesses 4 --dist worksteal
fi
exec "$ENVIRONMENT_PYTHON" -m pytest "$@"
