#!/usr/bin/env bash
# Run the tests: ./run_tests.sh [pytest arguments]. Without arguments, all tests run, up to four at once.
set -euo pipefail

# shellcheck source=scripts/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/scripts/environment.sh"
prepare_environment test

cd "$REPOSITORY"
if [ $# -eq 0 ]; then # one more than cores as tests often wait, at most four as a test may start four processes itself
    cores="$(nproc 2>/dev/null || echo 2)"
    set -- -n "$((cores < 3 ? cores + 1 : 4))" --dist worksteal
fi
exec "$ENVIRONMENT_PYTHON" -m pytest "$@"
