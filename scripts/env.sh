# Sourced by the other scripts: makes .venv with everything in it, and again what has changed since.
#
#   ensure_env ""        the library
#   ensure_env "[test]"  the library and what its tests need
#   use_torch VERSION    before that: with this torch, in an environment of its own inside .venv
#
# A torch that the system's Python already has is used as it is; otherwise the one below is installed first, so that the
# library's own requirement does not pull in a build for CUDA where a CPU build of that version is to be had.

TORCH_VERSION=2.13.0
ENV_DIR=.venv
may_use_system_torch=1

use_torch() {
  TORCH_VERSION=$1
  ENV_DIR=.venv/torch-$1
  may_use_system_torch=0
}

find_python() {
  local name
  for name in python3 python3.13 python3.12 python3.11; do
    if "$name" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
      echo "$name"
      return
    fi
  done
  echo "expected Python 3.11, 3.12 or 3.13 as python3 or under its own name, found none" >&2
  return 1
}

has_torch() {
  "$1" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' 2>/dev/null
}

# What an installation depends on: the build files, the native sources, and whether liburing is there.
fingerprint() {
  {
    cat pyproject.toml setup.py tests/gds/requirements.txt tests/parity/quantized/requirements.txt
    find native -type f -print0 | sort -z | xargs -0 cat
    find /usr/include /usr/local/include -maxdepth 1 -name liburing.h || true
  } 2>/dev/null | sha256sum | cut -d' ' -f1
}

is_installed() {
  [ -f "$ENV_DIR/.installed$1" ] && [ "$(cat "$ENV_DIR/.installed$1")" = "$(fingerprint)" ]
}

ensure_env() {
  local extra=$1 python
  if [ ! -x "$ENV_DIR/bin/python" ]; then
    python=$(find_python)
    if [ "$may_use_system_torch" = 1 ] && has_torch "$python"; then
      "$python" -m venv --system-site-packages "$ENV_DIR"
    else
      "$python" -m venv "$ENV_DIR"
    fi
  fi
  python=$ENV_DIR/bin/python
  if is_installed "$extra" || is_installed "[test]"; then
    return
  fi
  echo "installing into $ENV_DIR" >&2
  if ! has_torch "$python"; then
    "$python" -m pip install --quiet --disable-pip-version-check "torch==$TORCH_VERSION"
  fi
  "$python" -m pip install --quiet --disable-pip-version-check -e ".$extra"
  if [ "$extra" = "[test]" ]; then
    "$python" -m pip install --quiet --disable-pip-version-check --no-deps \
      -r tests/gds/requirements.txt -r tests/parity/quantized/requirements.txt
  fi
  fingerprint > "$ENV_DIR/.installed$extra"
}
