#!/usr/bin/env bash
# Runs the checks and the tests, but those that need a GPU.
#
#   bash scripts/test.sh [--quick | --all | --published] [--minutes N] [--coverage] [--workers N] [--torch VERSION]
#                        [arguments of pytest]
#
# --quick      the checks, and the tests of the layers without torch (at most 3 minutes on 2 cores)
#              (default: every test that is not marked `long`: each behaviour in some of its settings, which are backends, tiers,
#              budgets)
# --all        the tests marked `long` too: all settings, databases, soak, sanitizers, 2,000 programs of users (three quarters of
#              an hour)
# --published  those too that plan every published cell at effort "high" and with every amount of host memory, and search the
#              shardings of a contest (half an hour more): for changes of the planner
# --coverage   measures which lines and branches of tieroff the tests ran, and prints the sum
# --minutes N  of --all and --published: no long test begins later than that after the start of this script; those left out
#              are named as skipped. Machines of one kind differ by more than twice
# --workers N  processes that the tests are shared among (2)
# --torch VERSION  with another PyTorch than the usual one, in an environment of its own; the tests alone
#
# Tests marked `long` or `published` run after all others, and those marked `alone` at last, one after the other. The exit status
# is 1 when anything failed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/env.sh

started_s=$(date +%s)
quick=(tests/tidy tests/golden tests/unit/core tests/unit/planner tests/unit/planner_search tests/unit/storage)
# Marks, by the tier: of the long tests, and of those that run alone.
long=""
alone="not long and not published"
workers=2
arguments=()
while [ $# -gt 0 ]; do
  case "$1" in
    --quick) arguments+=("${quick[@]}") ;;
    --all) long="long and not published" && alone="not published" ;;
    --published) long="(long or published)" && alone="" ;;
    --minutes) export TIEROFF_TEST_UNTIL=$((started_s + 60 * $2)) && shift ;;
    --coverage) arguments+=(--cov --cov-append --cov-report=term:skip-covered) ;;
    --workers) workers=$2 && shift ;;
    --torch) use_torch "$2" && shift ;;
    *) arguments+=("$1") ;;
  esac
  shift
done

ensure_env "[test]"
unset PYTHONDONTWRITEBYTECODE # the tests start hundreds of processes: each would compile the library, and rewrite its tests, anew
failed=0
check() { "$@" || failed=1; }

# Runs pytest. Arguments may select no test for one of the phases (pytest's status 5), but not for all of them.
phases=0
empty=0
test_phase() {
  local status=0
  phases=$((phases + 1))
  "$ENV_DIR/bin/python" -m pytest ${arguments[@]+"${arguments[@]}"} "$@" || status=$?
  case "$status" in
    0) ;;
    5) empty=$((empty + 1)) ;;
    *) failed=1 ;;
  esac
}

if [ "$ENV_DIR" = .venv ]; then # once, and by the types of the usual PyTorch
  check "$ENV_DIR/bin/python" -m ruff check .
  check "$ENV_DIR/bin/python" -m ruff format --check --quiet .
  check "$ENV_DIR/bin/python" -m codespell_lib
  check "$ENV_DIR/bin/python" -m mypy
fi
rm -f .coverage
several=(--numprocesses "$workers" --dist worksteal)
[ -z "$long" ] || arguments+=(--hypothesis-profile tieroff) # all examples of each property
test_phase -m "not gpu and not long and not published and not alone" "${several[@]}"
[ -z "$long" ] || test_phase -m "not gpu and not alone and $long" "${several[@]}"
test_phase -m "not gpu and alone${alone:+ and $alone}"
[ "$empty" -lt "$phases" ] || failed=1
exit "$failed"
