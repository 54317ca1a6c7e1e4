# shellcheck shell=bash
# Sourced by run_train.sh, run_tests.sh and .ci/run. `prepare_environment EXTRAS` (comma-separated, or empty) finds a
# Python that has what pyproject.toml asks for, or makes .venv, and sets ENVIRONMENT_PYTHON to it.

REPOSITORY="$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
VENV="$REPOSITORY/.venv"
INSTALL_LOG="$VENV/install.log"
UNFINISHED="$VENV/unfinished" # exists while pip works in .venv; scripts/requirements.py reads it
LOCK='import fcntl
try:
    fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print("another start is setting up .venv; waiting for it", flush=True)
    fcntl.flock(9, fcntl.LOCK_EX)' # macOS has no flock command

say() { printf '%s\n' "$*" >&2; }

fail() {
    say "error: $*"
    exit 1
}

prepare_environment() { # EXTRAS
    local pythons=("${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/python}" "$VENV/bin/python")
    if [ -z "${PYTHON:-}" ]; then
        pythons+=(python3)
    elif is_recent "$PYTHON"; then
        pythons=("$PYTHON" "${pythons[@]}")
    else
        fail "PYTHON=$PYTHON is not Python 3.11 or newer; set it to one, or unset it"
    fi
    export PYTHONPATH="$REPOSITORY${PYTHONPATH:+:$PYTHONPATH}"
    for ENVIRONMENT_PYTHON in "${pythons[@]}"; do
        if is_complete "$ENVIRONMENT_PYTHON" "$1"; then return; fi
        case "$ENVIRONMENT_PYTHON" in
        "" | python3 | "$VENV/bin/python") ;;
        *) say "$ENVIRONMENT_PYTHON lacks $MISSING; using $VENV" ;;
        esac
    done
    ENVIRONMENT_PYTHON="$VENV/bin/python"
    set_up "$1"
}

is_recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

is_complete() { MISSING="$("$1" "$REPOSITORY/scripts/requirements.py" "$2" 2>&1)"; } # PYTHON EXTRAS

set_up() { # EXTRAS
    local base
    for base in "${PYTHON:-}" "${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/python}" python3 python3.13 python3.12 python3.11 ""; do
        if is_recent "$base"; then break; fi
    done
    [ -n "$base" ] || fail "there is no Python 3.11 or newer on PATH; install one, or set PYTHON to its path"
    { mkdir -p "$VENV" && touch "$VENV/lock"; } 2>/dev/null ||
        fail "cannot write to $VENV; use a writable copy of the repository, or set PYTHON to a complete Python"
    exec 9>>"$VENV/lock" # locked until file descriptor 9 is closed
    "$base" -c "$LOCK" >&2 2>/dev/null || true # some file systems have no locks
    if ! is_complete "$VENV/bin/python" "$1"; then # another start may have made it meanwhile
        say "setting up $VENV (minutes, once; $INSTALL_LOG shows how far it is)"
        # A package that pip was interrupted in looks installed, so an unfinished set-up begins again.
        if [ -e "$UNFINISHED" ] || ! is_recent "$VENV/bin/python"; then
            rm -rf "$VENV/bin" "$VENV/lib" "$VENV/lib64" "$VENV/pyvenv.cfg"
        fi
        touch "$UNFINISHED"
        if ! install "$base" "$1" >"$INSTALL_LOG" 2>&1 </dev/null; then
            tail -n 15 "$INSTALL_LOG" >&2
            fail "setting up $VENV failed, as shown above and in $INSTALL_LOG; correct the cause (network, disk space," \
                "pip's index), and start again, or set PYTHON to a Python that has what pyproject.toml asks for"
        fi
        rm "$UNFINISHED"
    fi
    exec 9>&-
}

install() { # BASE EXTRAS
    local pip=("$VENV/bin/python" -m pip)
    [ -e "$VENV/bin/python" ] || "$1" -m venv --without-pip "$VENV" || return
    if ! "${pip[@]}" --version && ! "$VENV/bin/python" -m ensurepip; then # Debian without python3-venv
        pip=("$1" -m pip --python "$VENV/bin/python")
        if ! "${pip[@]}" --version; then
            say "$1 has neither ensurepip nor pip; install one of them (Debian, Ubuntu: apt install python3-venv)"
            return 1
        fi
    fi
    PIP_USER=0 "${pip[@]}" install --disable-pip-version-check --no-input \
        -c "$REPOSITORY/constraints.txt" -e "$REPOSITORY${2:+[$2]}"
}
