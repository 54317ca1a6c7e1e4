# shellcheck shell=bash
# A Python that has what pyproject.toml asks for: found, or made in .venv. Sourced by run_train.sh, run_tests.sh, .ci/run.
#
# `prepare_environment EXTRAS` (comma-separated, or empty) sets ENVIRONMENT_PYTHON to its path and lets it import the
# package from any folder. In this order it takes: $PYTHON or the active virtual environment, where complete; .venv, where
# complete; `python3`, where complete; .venv, made or completed. It writes only to stderr.

REPOSITORY="$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
VENV="$REPOSITORY/.venv"
INSTALL_LOG="$VENV/install.log"
UNFINISHED="$VENV/torchtitan_diloco.unfinished" # as in torchtitan_diloco/tools/requirements.py
LEAST_FREE_MB=2500 # what torch for the CPU and the rest take, with some room; torch for CUDA takes more

say() { printf '%s\n' "$*" >&2; }

fail() {
    say "error: $*"
    exit 1
}

prepare_environment() {
    local extras="$1" chosen
    check_python_setting
    for chosen in "${PYTHON:-}" "${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/python}"; do
        if [ -z "$chosen" ] || [ "$chosen" = "$VENV/bin/python" ]; then continue; fi
        if has_everything "$chosen" "$extras"; then
            use_python "$chosen"
            return
        fi
        say "$chosen lacks ${LACKS:-Python 3.11 or newer}; taking $VENV"
    done
    if venv_is_complete "$extras"; then
        use_python "$VENV/bin/python"
    elif [ -z "${PYTHON:-}" ] && has_everything python3 "$extras"; then
        use_python python3
    else
        make_venv "$extras"
        use_python "$VENV/bin/python"
    fi
}

use_python() {
    ENVIRONMENT_PYTHON="$1"
    export PYTHONPATH="$REPOSITORY${PYTHONPATH:+:$PYTHONPATH}"
}

check_python_setting() {
    if [ -z "${PYTHON:-}" ]; then return; fi
    command -v -- "$PYTHON" >/dev/null || fail "PYTHON=$PYTHON is not a program; set it to a Python >= 3.11, or unset it"
    is_recent "$PYTHON" || fail "PYTHON=$PYTHON is older than Python 3.11; set it to a newer one, or unset it"
}

is_recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

requirements() { # PYTHON COMMAND EXTRAS; -P keeps the modules beside that file from standing in for the library's
    "$1" -P "$REPOSITORY/torchtitan_diloco/tools/requirements.py" "$2" "$VENV" "$3"
}

has_everything() { # PYTHON EXTRAS; what is missing goes to LACKS
    LACKS=""
    is_recent "$1" || return 1
    LACKS="$(requirements "$1" missing "$2" 2>&1)"
}

venv_is_complete() { [ -x "$VENV/bin/python" ] && requirements "$VENV/bin/python" current "$1" >/dev/null 2>&1; }

make_venv() {
    local extras="$1" base started=$SECONDS
    base="$(find_base_python)" || exit 1
    take_lock "$base"
    RUNNING_GROUP=""
    trap 'stop_set_up 130' INT
    trap 'stop_set_up 143' TERM
    if ! venv_is_complete "$extras"; then # another start may have made it while this one waited
        fill_venv "$base" "$extras"
        say "set up in $((SECONDS - started)) s; later starts skip this"
    fi
    trap - INT TERM
    exec 9>&-
}

fill_venv() { # BASE EXTRAS
    local base="$1" extras="$2"
    check_free_space
    if [ -e "$VENV" ] && [ ! -e "$VENV/pyvenv.cfg" ] && [ ! -e "$UNFINISHED" ]; then
        fail "$VENV is in the way: it is not a virtual environment; move it elsewhere and start again"
    fi
    say "setting up $VENV with $("$base" --version 2>&1) (first start, or its requirements changed; minutes)"
    mkdir -p "$VENV"
    touch "$UNFINISHED"
    : >"$INSTALL_LOG"
    if [ -x "$VENV/bin/python" ] && is_recent "$VENV/bin/python"; then
        extras="$(requirements "$VENV/bin/python" extras "$extras")"
    fi
    rm -f "$VENV/torchtitan_diloco.stamp"
    create_or_mend_venv "$base"
    install_requirements "$base" "$extras"
    requirements "$VENV/bin/python" stamp "$extras" >>"$INSTALL_LOG" 2>&1 || explain_install_failure 1
    rm -f "$UNFINISHED"
}

find_base_python() { # the first Python that is new enough and can make virtual environments
    local candidate recent="" seen=""
    for candidate in "${PYTHON:-}" "${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/python}" \
        python3 python3.13 python3.12 python3.11 python; do
        if [ -z "$candidate" ] || ! "$candidate" --version >/dev/null 2>&1; then continue; fi
        seen="$seen${seen:+, }$candidate is $("$candidate" --version 2>&1)"
        if ! is_recent "$candidate"; then continue; fi
        if can_make_venv "$candidate"; then
            printf '%s\n' "$candidate"
            return
        fi
        recent="${recent:-$candidate}"
    done
    if [ -n "$recent" ]; then
        fail "$recent can make no virtual environment, for want of its venv or ensurepip module, and of pip;" \
            "install them (Debian, Ubuntu: apt install python3-venv), or set PYTHON to another Python >= 3.11"
    fi
    fail "no Python 3.11 or newer (${seen:-there is none on PATH}); install one, or set PYTHON to its path"
}

can_make_venv() { # where ensurepip is missing, as on Debian without python3-venv, an installed pip can do its part
    "$1" -c 'import venv' >/dev/null 2>&1 && { has_ensurepip "$1" || has_pip "$1"; }
}

has_ensurepip() { "$1" -c 'import ensurepip' >/dev/null 2>&1; }

has_pip() { "$1" -m pip --version >/dev/null 2>&1; }

take_lock() { # until file descriptor 9 is closed; one start at a time sets up .venv
    local lock="$REPOSITORY/.cache/environment.lock"
    if ! { mkdir -p "$REPOSITORY/.cache" && : >>"$lock"; } 2>/dev/null; then
        fail "cannot write to $REPOSITORY; copy the repository to a folder that you may write to, or set PYTHON to a" \
            "Python that has what pyproject.toml asks for"
    fi
    exec 9>>"$lock"
    # Python's flock: macOS has no flock command.
    "$1" -c '
import fcntl, sys
try:
    fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    sys.stderr.write("another start is setting up .venv; waiting for it\n")
    try:
        fcntl.flock(9, fcntl.LOCK_EX)
    except KeyboardInterrupt:
        sys.exit(1)
except OSError:
    pass  # a file system without locks
' || exit 130
}

check_free_space() {
    local free_mb
    if [ -d "$VENV" ]; then return; fi
    free_mb="$(df -Pk "$REPOSITORY" 2>/dev/null | awk 'NR == 2 { print int($4 / 1024) }')"
    if [ -n "$free_mb" ] && [ "$free_mb" -lt "$LEAST_FREE_MB" ]; then
        fail "$REPOSITORY has $free_mb MB of free disk space, and setting up needs at least $LEAST_FREE_MB MB; free some," \
            "or set PYTHON to a Python that has what pyproject.toml asks for"
    fi
}

create_or_mend_venv() { # BASE
    local half_installed
    if [ -x "$VENV/bin/python" ] && is_recent "$VENV/bin/python"; then
        # pip writes INSTALLER last, and takes a package without it for installed.
        for half_installed in "$VENV"/lib/python*/site-packages/*.dist-info; do
            if [ -d "$half_installed" ] && [ ! -e "$half_installed/INSTALLER" ]; then rm -rf "$half_installed"; fi
        done
        if has_pip "$VENV/bin/python" || ! has_ensurepip "$1"; then return; fi
    fi
    # Its Python is gone, too old, or was never finished: nothing in it can be used.
    rm -rf "${VENV:?}"/bin "${VENV:?}"/lib "${VENV:?}"/lib64 "${VENV:?}"/include "${VENV:?}"/pyvenv.cfg
    if has_ensurepip "$1"; then
        run_logged "$1" -m venv "$VENV" || explain_install_failure $?
    else
        run_logged "$1" -m venv --without-pip "$VENV" || explain_install_failure $?
    fi
}

install_requirements() { # BASE EXTRAS
    local target="$REPOSITORY${2:+[$2]}"
    set -- "$1" install --disable-pip-version-check --no-input -c "$REPOSITORY/constraints.txt" -e "$target"
    if has_pip "$VENV/bin/python"; then
        run_logged "$VENV/bin/python" -m pip "${@:2}" || explain_install_failure $?
    else
        run_logged "$1" -m pip --python "$VENV/bin/python" "${@:2}" || explain_install_failure $?
    fi
}

run_logged() { # in the background and a process group of its own, so that a signal ends all of it, and at once
    set -m
    PIP_USER=0 "$@" >>"$INSTALL_LOG" 2>&1 </dev/null &
    set +m
    RUNNING_GROUP=$!
    local code=0
    wait "$RUNNING_GROUP" || code=$?
    RUNNING_GROUP=""
    return "$code"
}

stop_set_up() { # EXIT_CODE
    if [ -n "$RUNNING_GROUP" ]; then
        kill -- "-$RUNNING_GROUP" 2>/dev/null || true
        wait "$RUNNING_GROUP" 2>/dev/null || true
    fi
    say "set-up stopped; the next start completes it"
    exit "$1"
}

explain_install_failure() { # EXIT_CODE
    local own_python="or set PYTHON to a Python that has what pyproject.toml asks for"
    log_says() { grep -qiE "$1" "$INSTALL_LOG" 2>/dev/null; }
    if log_says 'no space left on device|disk quota exceeded'; then
        fail "no disk space left while setting up $VENV; free some there and in ${TMPDIR:-/tmp}, and start again"
    fi
    if log_says 'name resolution|name or service not known|nodename nor servname|failed to resolve|newconnectionerror|failed to establish|network is unreachable|max retries exceeded|connecttimeout|proxyerror|certificate_verify_failed'; then
        fail "pip cannot reach its package index, which the first start needs; connect, set pip's index or proxy," \
            "$own_python (pip's output: $INSTALL_LOG)"
    fi
    if log_says 'read-only file system|permission denied'; then
        fail "cannot write to $VENV; copy the repository to a folder that you may write to, $own_python"
    fi
    if log_says 'no matching distribution found|resolutionimpossible'; then
        fail "pip's index has no versions for $("$VENV/bin/python" --version 2>&1) on this machine that fit" \
            "pyproject.toml and constraints.txt; set PYTHON to one from 3.11 to 3.13, or pip's index" \
            "(pip's output: $INSTALL_LOG)"
    fi
    tail -n 15 "$INSTALL_LOG" >&2
    fail "setting up $VENV failed (exit code $1), as shown above; all of pip's output is in $INSTALL_LOG"
}
