#!/usr/bin/env bash
# Everything that needs a GPU, in one go of under 8 minutes, without a network.
#
#   bench/gpu.sh [--device cuda:0] [--out DIR] [--only STAGE ...] [--dry]   measure; --dry goes as far as a CPU can
#   bench/gpu.sh --pack [PYTHON_VERSION [PACKAGE ...]]                       beforehand, where there is a network:
#                                                                            fetch wheels into bench/wheels/, all or
#                                                                            those that the machine lacks
#
# torch, triton and transformers are used as they are found; what else is missing is taken from bench/wheels/. The
# results are written after every stage: DIR/results.json, DIR/results.txt, DIR/logs/.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
if [[ ${1:-} == --pack ]]; then
  shift
  exec "$PYTHON" bench/gpu_wheels.py pack "$@"
fi
site=$("$PYTHON" bench/gpu_wheels.py unpack)
export PYTHONPATH="$PWD/src:$PWD/bench:$PWD/bench/sides:$PWD${site:+:$site}${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 OMP_WAIT_POLICY=passive TOKENIZERS_PARALLELISM=false
exec "$PYTHON" bench/gpu.py "$@"
