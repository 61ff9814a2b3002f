#!/usr/bin/env bash
# Trains a small GPT plain and within a quarter of its memory, and compares the two.
#
#   bash scripts/train.sh [--config C] [--data TEXT] [--steps N] [--out DIR] [--layers N] [--width N] [--batch N] ...
#
# --help lists all options.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
(cd "$root" && ensure_env "")
exec "$root/.venv/bin/python" "$root/scripts/train.py" "$@"
