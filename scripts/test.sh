#!/usr/bin/env bash
# Runs the checks and the tests, but those that need a GPU.
#
#   bash scripts/test.sh [--quick | --all | --published] [--coverage] [--workers N] [arguments of pytest]
#
# --quick      the checks, and the tests of the layers without torch (at most 3 minutes on 2 cores)
#              (default: every test that is not marked `long`; 14 minutes on 2 cores, 17 with the installation)
# --all        the tests marked `long` too: databases, soak, sanitizers, 2,000 programs of users (three quarters of an hour)
# --published  those too that plan every published cell at effort "high" and with every amount of host memory, and search the
#              shardings of a contest (half an hour more): for changes of the planner
# --coverage   measures which lines and branches of tieroff the tests ran, and prints the sum
# --workers N  processes that the tests are shared among (2)
#
# Tests marked `alone` run in a second phase, one after the other. The exit status is 1 when anything failed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/env.sh

quick=(tests/tidy tests/golden tests/unit/core tests/unit/planner tests/unit/planner_search tests/unit/storage)
marks="not gpu and not long and not published"
workers=2
arguments=()
while [ $# -gt 0 ]; do
  case "$1" in
    --quick) arguments+=("${quick[@]}") ;;
    --all) marks="not gpu and not published" ;;
    --published) marks="not gpu" ;;
    --coverage) arguments+=(--cov --cov-append --cov-report=term:skip-covered) ;;
    --workers) workers=$2 && shift ;;
    *) arguments+=("$1") ;;
  esac
  shift
done

ensure_env "[test]"
export OMP_NUM_THREADS=1 # a worker a core; small models are slower on several threads
unset PYTHONDONTWRITEBYTECODE # the tests start hundreds of processes: each would compile the library, and rewrite its tests, anew
failed=0
check() { "$@" || failed=1; }

# Runs pytest. Arguments may select no test for one of the two phases (pytest's status 5), but not for both.
empty=0
test_phase() {
  local status=0
  .venv/bin/python -m pytest ${arguments[@]+"${arguments[@]}"} "$@" || status=$?
  case "$status" in
    0) ;;
    5) empty=$((empty + 1)) ;;
    *) failed=1 ;;
  esac
  [ "$empty" -lt 2 ] || failed=1
}

check .venv/bin/python -m ruff check .
check .venv/bin/python -m ruff format --check --quiet .
check .venv/bin/python -m codespell_lib
check .venv/bin/python -m mypy
rm -f .coverage
test_phase -m "$marks and not alone" --numprocesses "$workers" --dist worksteal
test_phase -m "$marks and alone"
exit "$failed"
