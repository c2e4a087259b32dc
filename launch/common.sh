# shellcheck shell=bash
# Sourced by the other scripts: finds or makes a Python that has this project. Sets `root` and, by need_python, `python`.
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)

fail() {
    echo "ddp-examples: $*" >&2
    exit 1
}

# Does this Python have the project (this checkout, not another), torch, and what else is asked for? Imports nothing: 0.05 s.
has_project() {
    "$1" - "$root" "${@:2}" 2>/dev/null <<'PYTHON'
import os, sys
from importlib.util import find_spec
root, names = sys.argv[1], ["omegaconf", "torch", *sys.argv[2:]]
sys.path[:] = [path for path in sys.path if path]  # "" is the current folder; installed is what counts
spec = find_spec("ddp_examples")
here = spec is not None and os.path.realpath(os.path.dirname(os.path.dirname(spec.origin))) == os.path.realpath(root)
sys.exit(not (here and sys.version_info >= (3, 9) and all(map(find_spec, names))))
PYTHON
}

# A Python >= 3.9 to make .venv with: $PYTHON, else the first that is new enough.
base_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python python3.{14,13,12,11,10,9}; do
        if "$candidate" -c 'import sys, venv; sys.exit(sys.version_info < (3, 9))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    fail "no Python >= 3.9 with venv in PATH. Name one: PYTHON=/path/to/python3 $0"
}

# Install into .venv: with pinned versions, and where a pin can't be had, without.
install_project() {
    local extras=$1 pip=("$root/.venv/bin/python" -m pip install --quiet --disable-pip-version-check)
    echo "ddp-examples: installing into $root/.venv (once; a minute or a few)" >&2
    if ! "${pip[@]}" --constraint "$root/launch/constraints.txt" --editable "$root$extras"; then
        echo "ddp-examples: that did not work with the versions in launch/constraints.txt; trying without them" >&2
        "${pip[@]}" --editable "$root$extras" ||
            fail "pip could not install (see above). Without a network, use a Python that has torch and omegaconf: PYTHON=... $0"
    fi
}

# need_python EXTRA MODULE...: sets `python` to an absolute interpreter that has the project and these modules.
need_python() {
    local extra=$1
    shift
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 "$root/.venv/bin/python"; do
        python=$(command -v "$candidate") && has_project "$python" "$@" && return
    done
    exec 9>"$root/.venv.lock" # two at once on one machine: the second waits until the first has installed
    if command -v flock >/dev/null; then flock 9; fi
    python=$root/.venv/bin/python
    if ! has_project "$python" "$@"; then
        [[ -x $python ]] || "$(base_python)" -m venv "$root/.venv"
        install_project "${extra:+[$extra]}"
    fi
    exec 9>&-
    has_project "$python" "$@" || fail "$root/.venv is damaged; remove it and start again: rm -r '$root/.venv'"
}
