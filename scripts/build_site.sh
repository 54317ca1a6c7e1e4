#!/usr/bin/env bash
# Build the documentation as a site: ./scripts/build_site.sh [FOLDER]; by default build/site. It sets up what is missing.
set -euo pipefail

# shellcheck source=scripts/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"
prepare_environment docs

exec "$ENVIRONMENT_PYTHON" "$REPOSITORY/scripts/build_site.py" "$@"
