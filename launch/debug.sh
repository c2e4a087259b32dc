#!/usr/bin/env bash
# One rank, without torchrun, so that breakpoint() works: launch/debug.sh [--pdb] [group=choice | key=value ...]
# --pdb opens the debugger where an error was raised. debug=true is on: slower, and it tells more.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")"/common.sh
need_python ""
pdb=()
if [[ ${1:-} == --pdb ]]; then
    pdb=(--pdb)
    shift
fi
exec "$python" -m ddp_examples "${pdb[@]+"${pdb[@]}"}" debug=true "$@"
