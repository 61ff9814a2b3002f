#!/usr/bin/env bash
# Runs the checks and the tests, but those that need a GPU.
#
#   bash scripts/test.sh [--all] [arguments of pytest]
#
# --all adds the tests marked `long` (databases, soak, sanitizers).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/env.sh

marks="not gpu and not long"
arguments=()
for argument in "$@"; do
  if [ "$argument" = --all ]; then marks="not gpu"; else arguments+=("$argument"); fi
done

ensure_env "[test]"
failed=0
.venv/bin/python -m ruff check . || failed=1
.venv/bin/python -m mypy || failed=1
.venv/bin/python -m pytest -m "$marks" ${arguments[@]+"${arguments[@]}"} || failed=1
exit "$failed"
