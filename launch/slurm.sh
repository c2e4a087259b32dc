#!/usr/bin/env bash
# The ranks of one demo on the nodes of a Slurm cluster: launch/slurm.sh [-N NODES] [-n RANKS_PER_NODE] [-p QUEUE]
#   [-t HH:MM:SS] [-A ACCOUNT] [--wait] [--dry-run] [site=NAME] [group=choice | key=value ...]
# On a login node it submits itself with sbatch; in a job (sbatch, salloc, idev) it starts on all its nodes at once.
# launch/slurm.sh [site=NAME] --setup makes the site's Python environment, once. Sites: conf/site/*.yaml.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")"/common.sh
site=slurm setup=
for argument in "$@"; do
    case $argument in
        site=*) site=${argument#site=} ;;
        --setup) setup=1 ;;
    esac
done
use_site "$site"
if [[ $setup ]]; then
    mkdir -p "$(dirname "$venv")"
    need_python ""
    echo "ddp-examples: ready, with $python"
    exit
fi
find_python || fail "no Python here has torch, omegaconf and this project. Make one, once, in $venv: $0 site=$site --setup"
exec "$python" -m ddp_examples.core.submit "$root/launch/slurm.sh" site=slurm "$@"
