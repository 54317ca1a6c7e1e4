#!/usr/bin/env bash
# Check lint, format and types: ./scripts/check.sh [--fix]. With --fix, ruff first mends and formats what it can.
# Ruff and mypy are installed in a layer on the environment of the tests, which stays as it is.
set -uo pipefail

# shellcheck source=scripts/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"
case "${1:-}" in
"" | --fix) ;;
*)
    say "error: $1 is not an option; ./scripts/check.sh [--fix]"
    exit 2
    ;;
esac
prepare_environment test
prepare_layer dev
cd "$REPOSITORY" || exit 1

failed=()
check() { # NAME, which is a command of the layer; one that fails does not stop the others
    printf '\n== %s\n' "$*"
    "$LAYER_PYTHON" -m "$@" || failed+=("$*")
}

if [ "${1:-}" = --fix ]; then
    "$LAYER_PYTHON" -m ruff check --fix-only --quiet
    "$LAYER_PYTHON" -m ruff format --quiet
fi
check ruff check
check ruff format --check
check mypy
if [ "${#failed[@]}" -gt 0 ]; then
    printf '\nfailed: %s\n' "$(IFS=,; echo "${failed[*]}")"
    exit 1
fi
