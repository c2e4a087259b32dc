#!/usr/bin/env bash
# launch/slurm.sh for Frontera at TACC, the same options: launch/frontera.sh -N 2 demo=basic
# First, once: launch/frontera.sh --setup
set -euo pipefail
exec "$(dirname -- "${BASH_SOURCE[0]}")"/slurm.sh site=frontera "$@"
