#!/usr/bin/env bash
# The whole test suite: launch/test.sh [arguments of pytest]
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")"/common.sh
need_python test pytest
cd "$root"
exec "$python" -m pytest "$@"
