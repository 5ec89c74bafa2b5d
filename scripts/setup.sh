#!/usr/bin/env bash
# Installs what is missing and builds the package and the tool into .venv. A second run with nothing changed takes
# about a second: each step leaves a stamp of what it was made from in build/stamps.
source "$(dirname "$0")/common.sh"

APT_PACKAGES=(g++ cmake ninja-build pkg-config libhwy-dev libgtest-dev libbenchmark-dev libcli11-dev libfmt-dev
              nlohmann-json3-dev)
VENV_PYTHON=.venv/bin/python

install_system_packages() {
  local missing=() package
  if ! command -v dpkg-query >/dev/null; then
    say "not a Debian system: trusting that the equivalents of these are there: ${APT_PACKAGES[*]}"
    return
  fi
  for package in "${APT_PACKAGES[@]}"; do
    have_package "$package" || missing+=("$package")
  done
  [ ${#missing[@]} = 0 ] || apt_install "system packages are missing" "${missing[@]}"
}

# Whether $1 is a Python that can make environments and compile extensions.
usable_python() {
  "$1" - 2>/dev/null <<'PY'
import ensurepip, os, sys, sysconfig, venv
ok = sys.version_info >= (3, 11) and os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))
sys.exit(0 if ok else 1)
PY
}

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
    if command -v "$candidate" >/dev/null && usable_python "$candidate"; then
      command -v "$candidate"
      return
    fi
  done
  return 1
}

make_environment() {
  if [ -x $VENV_PYTHON ] && usable_python $VENV_PYTHON; then
    return
  fi
  local python
  if ! python=$(find_python); then
    local found
    found=$(${PYTHON:-python3} --version 2>&1 || true)
    if [[ -z ${PYTHON:-} && $found =~ ^Python\ 3\.(1[1-9]|[2-9][0-9]) || $found == *"not found"* ]]; then
      apt_install "Python lacks its venv module or headers" python3 python3-venv python3-dev
    fi
    python=$(find_python) || die "Python 3.11 or newer with venv and headers is needed, found '$found'; install one
  and name it: make setup PYTHON=python3.12"
  fi
  say "making .venv with $("$python" --version)"
  "$python" -m venv --clear .venv
  rm -f build/stamps/*
}

# step NAME INPUT COMMAND...: runs the command unless it already ran for this input.
step() {
  local stamp=build/stamps/$1 input=$2
  shift 2
  if [ "$(cat "$stamp" 2>/dev/null)" != "$input" ]; then
    "$@"
    mkdir -p build/stamps
    echo "$input" >"$stamp"
  fi
}

install_requirements() {
  say "installing pinned Python packages (requirements.txt)"
  quietly pip-requirements $VENV_PYTHON -m pip install -r requirements.txt
}

install_package() {
  say "building cutloss and installing it into .venv"
  quietly pip-install $VENV_PYTHON -m pip install --no-build-isolation --no-deps --force-reinstall -e .
}

install_system_packages
make_environment
python_id="$($VENV_PYTHON --version) $PWD"
requirements_id="$python_id $(sha256sum <requirements.txt)"
# Python sources are read in place; only what the build reads, and the list of modules, asks for a new one.
sources_id=$( (find include src cmake python/src -type f -not -name '*_test.cc' -not -name '*_bench.cc' -print0 |
               sort -z | xargs -0 sha256sum
               sha256sum CMakeLists.txt python/CMakeLists.txt pyproject.toml
               find python/cutloss -name '*.py' | sort) | sha256sum)
step requirements "$requirements_id" install_requirements
step package "$requirements_id $sources_id" install_package
say "ready: .venv/bin/cutloss ($(.venv/bin/cutloss --version 2>&1))"
