#!/usr/bin/env bash
# Run the tests: ./run_tests.sh [pytest arguments]. Without arguments, all tests run on up to four cores.
set -euo pipefail

# shellcheck source=scripts/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/scripts/environment.sh"
prepare_environment test

cd "$REPOSITORY"
if [ $# -eq 0 ]; then # at most four, because a test may start four processes itself
    set -- -n auto --maxprocesses 4 --dist worksteal
fi
exec "$ENVIRONMENT_PYTHON" -m pytest "$@"
