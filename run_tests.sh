#!/usr/bin/env bash
# Run the tests: ./run_tests.sh [pytest arguments].
set -euo pipefail

# shellcheck source=scripts/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/scripts/environment.sh"
prepare_environment test

cd "$REPOSITORY"
exec "$ENVIRONMENT_PYTHON" -m pytest "$@"
