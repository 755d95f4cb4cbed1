#!/usr/bin/env bash
# Make the virtual environment .venv in this clone and install mppo into it. Sourced by the other scripts.
#   EXTRAS   comma-separated extras of pyproject.toml (default: none)
#   TORCH    what pip is to install for torch on a machine without a GPU (default: torch==2.13.0)
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
  # torch first and pinned, so that no other build comes in as a dependency. Where the package index serves the CUDA
  # build under this name, point pip at an index of CPU builds (PIP_EXTRA_INDEX_URL) to save some gigabytes.
  if ! command -v nvidia-smi >/dev/null && ! .venv/bin/python -c 'import torch' 2>/dev/null; then
    echo "== installing ${TORCH:=torch==2.13.0}"
    .venv/bin/pip install -q "$TORCH"
  fi
  echo "== installing mppo${EXTRAS:+ with $EXTRAS}"
  .venv/bin/pip install -q -e ".${EXTRAS:+[$EXTRAS]}"
  touch "$stamp"
fi
source .venv/bin/activate
