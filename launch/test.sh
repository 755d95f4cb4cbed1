#!/usr/bin/env bash
# Install what is missing, check style and types, and run tests (tests/README.md says what each tier shows).
#   ./launch/test.sh                          everything
#   ./launch/test.sh -m "unit or quick"       the quick tier, under three minutes
#   ./launch/test.sh -m unit -n 2             without processes, on two cores (also: distributed, sglang)
#   MPPO_SGLANG_ENV=FOLDER ./launch/test.sh   with this environment for SGLang (default: makes sglang-env)
set -euo pipefail
EXTRAS=dev source "$(dirname "$0")/install.sh"

# Tests marked sglang run unless -m says nothing of sglang, or "not sglang".
expression=sglang previous=
for word in "$@"; do
  if [ "$previous" = -m ]; then expression=$word; fi
  if [[ $word == -m?* ]]; then expression=${word#-m}; fi
  previous=$word
done
if [[ $expression == *sglang* && $expression != *"not sglang"* ]]; then
  if [ -z "${MPPO_SGLANG_ENV:-}" ]; then
    launch/sglang.sh sglang-env
    export MPPO_SGLANG_ENV=$PWD/sglang-env
  elif [ ! -x "$MPPO_SGLANG_ENV/serve.sh" ]; then
    echo "!! MPPO_SGLANG_ENV=$MPPO_SGLANG_ENV has no serve.sh: make it with launch/sglang.sh" >&2
    exit 1
  fi
  source launch/model.sh
fi

launch/checks.sh

echo "== testing"
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec python -m pytest "$@"
