# shellcheck shell=bash
# Sourced by the other scripts: finds or makes a Python that has this project. Sets `root` and, by need_python, `python`.
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=$root/.venv # use_site may name another

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

# Install into $venv: with pinned versions, and where a pin can't be had, without.
install_project() {
    local extras=$1 pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)
    echo "ddp-examples: installing into $venv (once; a minute or a few)" >&2
    if ! "${pip[@]}" --constraint "$root/launch/constraints.txt" --editable "$root$extras"; then
        echo "ddp-examples: that did not work with the versions in launch/constraints.txt; trying without them" >&2
        "${pip[@]}" --editable "$root$extras" ||
            fail "pip could not install (see above). Without a network, use a Python that has torch and omegaconf: PYTHON=... $0"
    fi
}

# find_python MODULE...: sets `python` to an absolute interpreter that has the project and these modules; installs nothing.
find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 "$venv/bin/python"; do
        python=$(command -v "$candidate") && has_project "$python" "$@" && return
    done
    return 1
}

# need_python EXTRA MODULE...: as find_python, and where there is none makes one in $venv.
need_python() {
    local extra=$1
    shift
    find_python "$@" && return
    exec 9>"$venv.lock" # two at once on one machine: the second waits until the first has installed
    if command -v flock >/dev/null; then flock 9; fi
    python=$venv/bin/python
    if ! has_project "$python" "$@"; then
        [[ -x $python ]] || "$(base_python)" -m venv "$venv"
        install_project "${extra:+[$extra]}"
    fi
    exec 9>&-
    has_project "$python" "$@" || fail "$venv is damaged; remove it and start again: rm -r '$venv'"
}

# site_value SITE KEY: the value on the key's line in the site's file, without comment, brackets and quotes.
site_value() {
    local file value
    for file in ${DDP_EXAMPLES_CONF:+"$DDP_EXAMPLES_CONF/site/$1.yaml"} "$root/conf/site/$1.yaml" "$root/conf/site/slurm.yaml"; do
        [[ -f $file ]] && value=$(sed -n "s/^$2: *//p" "$file") && [[ -n $value ]] && break
    done
    sed 's/ #.*//; s/[][",]/ /g; s/^ *//; s/ *$//' <<<"${value:-}"
}

# use_site SITE: load its modules, and take the Python environment in its folder.
use_site() {
    local folder
    if type module >/dev/null 2>&1; then
        set +u # Lmod's functions use variables that are not set
        # shellcheck disable=SC2046  # each word is a module
        [[ -z $(site_value "$1" modules) ]] || module load $(site_value "$1" modules)
        set -u
    fi
    folder=$(site_value "$1" folder)
    case $folder in
        . | "") ;;
        \$SCRATCH*) [[ -z ${SCRATCH:-} ]] || venv=$SCRATCH${folder#\$SCRATCH}/venv ;;
        \$WORK*) [[ -z ${WORK:-} ]] || venv=$WORK${folder#\$WORK}/venv ;;
        *) venv=${folder/#\~/$HOME}/venv ;;
    esac
}
