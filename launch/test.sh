#!/usr/bin/env bash
# Install what is missing, check style and types, and run tests (tests/README.md says what each tier shows).
#   ./launch/test.sh                          everything
#   ./launch/test.sh -m "unit or quick"       the quick tier, under three minutes
#   ./launch/test.sh -m unit -n 2             without processes, on two cores (also: distributed, sglang)
set -euo pipefail
EXTRAS=dev source "$(dirname "$0")/install.sh"

launch/checks.sh

echo "== testing"
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec python -m pytest "$@"
