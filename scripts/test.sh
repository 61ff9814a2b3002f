#!/usr/bin/env bash
# Runs the checks and the tests, but those that need a GPU.
#
#   bash scripts/test.sh [--all | --published] [arguments of pytest]
#
# --all adds the tests marked `long` (databases, soak, sanitizers). --published adds those too that plan every published cell
# at effort "high" and with every amount of host memory (ten minutes and more): for changes of the planner.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/env.sh

marks="not gpu and not long and not published"
arguments=()
for argument in "$@"; do
  case "$argument" in
    --all) marks="not gpu and not published" ;;
    --published) marks="not gpu" ;;
    *) arguments+=("$argument") ;;
  esac
done

ensure_env "[test]"
failed=0
.venv/bin/python -m ruff check . || failed=1
.venv/bin/python -m mypy || failed=1
.venv/bin/python -m pytest -m "$marks" ${arguments[@]+"${arguments[@]}"} || failed=1
exit "$failed"
