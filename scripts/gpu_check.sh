#!/usr/bin/env bash
# Checks the library on a machine with a CUDA GPU, its own torch, and no network.
#
#   bash scripts/gpu_check.sh [--wheels DIR] [--out DIR]
#
# DIR holds wheels of what the tests need (as `pip download "tieroff[test]"` gives them, without torch) and of pybind11.
#
# Installs what is missing from DIR into a scratch folder, builds the native module in place, runs the accelerator's tests, those
# marked `gpu` (with PyTorch's sanitizer of CUDA among them) and three short benchmarks, in at most 8 minutes. Writes
# gpu_check.json to --out (default: runs/gpu_check), and prints a table last.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
wheels=""
out="$root/runs/gpu_check"
while [ $# -gt 0 ]; do
  case "$1" in
    --wheels) wheels=$(cd "$2" && pwd); shift 2 ;;
    --out) mkdir -p "$2"; out=$(cd "$2" && pwd); shift 2 ;;
    *) echo "usage: gpu_check.sh [--wheels DIR] [--out DIR]" >&2; exit 2 ;;
  esac
done
mkdir -p "$out"
scratch=$(mktemp -d)
trap 'rm -r -- "$scratch"' EXIT
cd "$root"
export PYTHONPATH="$scratch/site:$root:$root/scripts"

if [ -n "$wheels" ]; then
  # Only what this Python cannot import yet: a wheel must not take the place of the machine's own torch or numpy.
  python3 - "$wheels" > "$scratch/missing" <<'PYTHON'
import re, sys
from importlib import metadata
from pathlib import Path

have = {re.sub(r"[-_.]+", "-", d.metadata["Name"]).lower() for d in metadata.distributions() if d.metadata["Name"]}
names = {re.sub(r"[-_.]+", "-", path.name.split("-")[0]).lower() for path in Path(sys.argv[1]).glob("*.whl")}
print("\n".join(sorted(names - have)))
PYTHON
  while read -r name; do
    [ -z "$name" ] && continue
    python3 -m pip install --quiet --disable-pip-version-check --no-index --no-deps --find-links "$wheels" \
      --target "$scratch/site" "$name" || echo "no wheel of $name fits this Python" >&2
  done < "$scratch/missing"
fi

python3 setup.py --quiet build_ext --inplace --build-temp "$scratch/build"
python3 scripts/gpu_check.py --out "$out"
