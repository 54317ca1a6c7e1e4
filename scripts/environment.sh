# shellcheck shell=bash
# Sourced by run_train.sh, run_tests.sh and scripts/check.sh. `prepare_environment EXTRAS` (comma-separated, or empty) finds
# a Python that has what pyproject.toml asks for, or makes .venv, and sets ENVIRONMENT_PYTHON to it. `prepare_layer EXTRA`
# sets LAYER_PYTHON to one that has an extra as well, and leaves ENVIRONMENT_PYTHON as it is.

REPOSITORY="$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
VENV="$REPOSITORY/.venv"
INSTALL_LOG="$VENV/install.log"
UNFINISHED="$VENV/unfinished" # exists while pip works in .venv, and if it was killed; scripts/requirements.py reads it
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
    case "${PYTHON:-}" in
    /*) ;;
    */*) PYTHON="$PWD/$PYTHON" ;; # run_tests.sh and scripts/check.sh change the folder
    esac
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

find_base() { # sets BASE_PYTHON, which environments are made with
    for BASE_PYTHON in "${PYTHON:-}" "${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/python}" python3 python3.13 python3.12 python3.11 ""; do
        if is_recent "$BASE_PYTHON"; then return; fi
    done
    fail "there is no Python 3.11 or newer on PATH; install one, or set PYTHON to its path"
}

set_up() { # EXTRAS
    find_base
    { mkdir -p "$VENV" && touch "$VENV/lock"; } 2>/dev/null ||
        fail "cannot write to $VENV; use a writable copy of the repository, or set PYTHON to a complete Python"
    exec 9>>"$VENV/lock" # locked until file descriptor 9 is closed
    "$BASE_PYTHON" -c "$LOCK" >&2 2>/dev/null || true # some file systems have no locks
    judge_unfinished
    if ! is_complete "$VENV/bin/python" "$1"; then # another start may have made it meanwhile
        say "setting up $VENV (minutes, once; $INSTALL_LOG shows how far it is)"
        if is_recent "$VENV/bin/python"; then
            rm -rf "$VENV/replaced" # of a start that was killed
        else
            set_aside "$VENV"
        fi
        touch "$UNFINISHED"
        install "$1" >"$INSTALL_LOG" 2>&1 </dev/null || fail_in_set_up "$VENV" "$INSTALL_LOG"
        rm -rf "$UNFINISHED" "$VENV/replaced"
    fi
    exec 9>&-
}

judge_unfinished() { # keeps the mark of a set-up that failed only if training would miss something
    if [ -e "$UNFINISHED" ] && "$VENV/bin/python" "$REPOSITORY/scripts/requirements.py" --mend >/dev/null 2>&1; then
        rm "$UNFINISHED"
    fi
}

PARTS="pyvenv.cfg lib64 lib bin unfinished" # of an environment; bin works without pyvenv.cfg, elsewhere

set_aside() { # ENVIRONMENT; for `put_back`, until another one is complete
    local part
    mkdir -p "$1/replaced"
    for part in $PARTS; do
        if [ -e "$1/replaced/$part" ]; then # since a start that was killed
            rm -rf "${1:?}/$part"
        elif [ -e "$1/$part" ]; then
            mv "$1/$part" "$1/replaced/$part"
        fi
    done
}

put_back() { # ENVIRONMENT
    local part
    if [ ! -e "$1/replaced" ]; then return; fi
    for part in $PARTS; do
        rm -rf "${1:?}/$part"
        if [ -e "$1/replaced/$part" ]; then mv "$1/replaced/$part" "$1/$part"; fi
    done
    rm -rf "$1/replaced"
}

fail_in_set_up() { # ENVIRONMENT LOG
    put_back "$1"
    if [ "$1" = "$VENV" ]; then judge_unfinished; fi # a layer has no lock
    tail -n 15 "$2" >&2
    fail "setting up $1 failed, as shown above and in $2; correct the cause (network, disk space," \
        "pip's index), and start again, or set PYTHON to a Python that has what pyproject.toml asks for"
}

install() { # EXTRAS
    [ -e "$VENV/bin/python" ] || "$BASE_PYTHON" -m venv --without-pip "$VENV" || return
    choose_pip "$VENV/bin/python" || return
    PIP_USER=0 "${PIP[@]}" install --disable-pip-version-check --no-input \
        -c "$REPOSITORY/constraints.txt" -e "$REPOSITORY${1:+[$1]}"
}

choose_pip() { # PYTHON; sets PIP, a command that installs for it
    PIP=("$1" -m pip)
    # One that ensurepip was interrupted in may start, but is not listed.
    if ! "${PIP[@]}" show pip && ! "$1" -m ensurepip; then # Debian without python3-venv
        PIP=("$BASE_PYTHON" -m pip --python "$1")
        if ! "${PIP[@]}" --version; then
            say "$BASE_PYTHON has neither ensurepip nor pip; install one of them (Debian, Ubuntu: apt install python3-venv)"
            return 1
        fi
    fi
}

prepare_layer() { # EXTRA
    local layer="$VENV/layer-$1"
    local log="$layer.log"
    for LAYER_PYTHON in "$ENVIRONMENT_PYTHON" "$layer/bin/python"; do
        if is_complete "$LAYER_PYTHON" "$1"; then return; fi
    done
    find_base
    mkdir -p "$VENV" || fail "cannot write to $VENV; use a writable copy of the repository"
    say "setting up $layer (once; $log shows how far it is)"
    if is_recent "$layer/bin/python"; then rm -rf "$layer/replaced"; fi # of a start that was killed
    set_aside "$layer"
    install_layer "$layer" "$1" >"$log" 2>&1 </dev/null || fail_in_set_up "$layer" "$log"
    rm -rf "$layer/replaced"
}

install_layer() { # LAYER EXTRA
    local packages requirements
    "$ENVIRONMENT_PYTHON" -m venv --without-pip "$1" || return
    # The layer finds what the environment has, so only the rest is installed.
    packages=("$1"/lib/python*/site-packages)
    "$ENVIRONMENT_PYTHON" -c 'import site; print(*site.getsitepackages(), sep="\n")' >"${packages[0]}/environment.pth" || return
    requirements="$("$ENVIRONMENT_PYTHON" "$REPOSITORY/scripts/requirements.py" --list "$2")" || return
    choose_pip "$1/bin/python" || return
    printf '%s\n' "$requirements" >"$1/requirements.txt"
    PIP_USER=0 "${PIP[@]}" install --disable-pip-version-check --no-input -r "$1/requirements.txt"
}
