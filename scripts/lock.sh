#!/usr/bin/env bash
# Write requirements.lock: the versions of all dependencies, those of every extra included, for Python 3.11 and newer.
# It needs uv (`.venv/bin/python -m pip install uv`), and asks the package index that uv is set up with. The file names no index.
set -euo pipefail

repository="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$repository"
uv="$(command -v uv || echo .venv/bin/uv)"
[ -x "$uv" ] || { echo "error: uv is not installed: .venv/bin/python -m pip install uv" >&2; exit 2; }
UV_CUSTOM_COMPILE_COMMAND="./scripts/lock.sh" "$uv" pip compile pyproject.toml --quiet --universal --python-version 3.11 \
    --all-extras --no-annotate --constraints constraints.txt --output-file requirements.lock "$@"
