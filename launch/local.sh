#!/usr/bin/env bash
# The ranks of one demo on this machine: launch/local.sh [-n RANKS] [--dry-run] [group=choice | key=value ...]
# Default: demo=basic, a rank for each GPU, or 4 ranks where there is none. Ends with the rank's own status.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")"/common.sh
need_python ""
exec "$python" -m ddp_examples.core.node "$@"
