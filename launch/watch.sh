#!/usr/bin/env bash
# What each GPU of a job does, or each rank where there is none, every 5 s until the job ends:
# launch/watch.sh [JOB] [site=NAME]   (default: your newest job; on Frontera the site is found by $TACC_SYSTEM)
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")"/common.sh
site=slurm
[[ ! -f $root/conf/site/${TACC_SYSTEM:-}.yaml ]] || site=$TACC_SYSTEM
for argument in "$@"; do
    case $argument in
        site=*) site=${argument#site=} ;;
        -*)
            sed -n '2,3s/^# //p' "$0"
            exit
            ;;
    esac
done
use_site "$site"
find_python || fail "no Python here has torch, omegaconf and this project. Make one, once, in $venv: $root/launch/slurm.sh site=$site --setup"
exec "$python" -m ddp_examples.core.usage watch site="$site" "$@"
