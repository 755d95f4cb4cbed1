#!/usr/bin/env bash
# Install what is missing and run all tests.
#   ./launch/test.sh                   everything
#   ./launch/test.sh -m unit           the quick tier (also: distributed, sglang)
set -euo pipefail
EXTRAS=dev source "$(dirname "$0")/install.sh"

echo "== testing"
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec python -m pytest "$@"
