#!/usr/bin/env bash
# Style, format and types, in the active environment. Every one runs; fails if one of them does.
cd "$(dirname "$0")/.."
failed=()
check() { echo "== $*"; "$@" || failed+=("$*"); }

check ruff check .
check ruff format --check .
check mypy

if [ ${#failed[@]} -gt 0 ]; then
  printf '!! failed: %s\n' "${failed[@]}" >&2
  exit 1
fi
