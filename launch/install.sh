#!/usr/bin/env bash
# Make the virtual environment .venv in this clone and install mppo into it. Sourced by the other scripts.
#   EXTRAS   comma-separated extras of pyproject.toml (default: none)
# Idempotent: nothing is installed again while pyproject.toml and EXTRAS stay the same.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-$(command -v python3.11 || command -v python3.12 || command -v python3)}
if [ ! -x .venv/bin/python ]; then
  echo "== making .venv with $("$python" --version)"
  "$python" -m venv .venv
fi

stamp=".venv/installed-$(echo "${EXTRAS:-none}" | tr ',' '-')"
if [ ! -f "$stamp" ] || [ pyproject.toml -nt "$stamp" ]; then
  # Without a GPU take a CPU build of torch first, so that no CUDA build comes in as a dependency.
  if ! command -v nvidia-smi >/dev/null && ! .venv/bin/python -c 'import torch' 2>/dev/null; then
    echo "== installing torch (CPU)"
    .venv/bin/pip install -q "torch==2.13.0"
  fi
  echo "== installing mppo${EXTRAS:+ with $EXTRAS}"
  .venv/bin/pip install -q -e ".${EXTRAS:+[$EXTRAS]}"
  touch "$stamp"
fi
source .venv/bin/activate
