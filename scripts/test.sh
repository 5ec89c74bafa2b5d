#!/usr/bin/env bash
# test.sh short|long: all tests, then one summary. Logs stay in build/logs.
source "$(dirname "$0")/common.sh"

size=${1:-short}
failed=()

# record NAME COMMAND...: runs it with its output on the screen and in build/logs/NAME.log, and goes on if it fails.
record() {
  local name=$1
  shift
  say "$*"
  "$@" 2>&1 | tee "build/logs/$name.log" || failed+=("$name")
}

sanitized_tests() {
  cmake --preset "$1" && cmake --build --preset "$1" && ctest --preset "$1" -j "$JOBS"
}

# Into a folder of its own: in .venv JAX would look for a TPU in every program. Without it python/tests/jax/test_tpu.py
# skips, so a failure to install is one of the run.
install_tpu_compiler() {
  local wanted
  wanted=$(sed -n 's/.*"\(libtpu==[^"]*\)".*/\1/p' pyproject.toml)
  if [ "$(cat build/libtpu/installed 2>/dev/null)" != "$wanted" ]; then
    rm -rf build/libtpu
    .venv/bin/python -m pip install --quiet --no-deps --target build/libtpu "$wanted" && echo "$wanted" >build/libtpu/installed
  fi
}

mkdir -p build/logs
rm -f build/logs/{ctest,pytest,install,asan,tsan,fuzz,libtpu,jax-cce}.log
say "building the C++ tests (preset dev)"
quietly cmake-configure cmake --preset dev
quietly cmake-build cmake --build --preset dev

if [ "$size" = long ]; then
  record install tests/install/run.sh
  for sanitizer in asan tsan; do
    record $sanitizer sanitized_tests $sanitizer
  done
  record fuzz scripts/fuzz.sh 60
  record ctest ctest --preset long -j "$JOBS"
  record libtpu install_tpu_compiler
  record pytest .venv/bin/python -m pytest -q python/tests
  record jax-cce scripts/jax_cce_tests.sh
else
  record ctest ctest --preset dev -j "$JOBS"
  # A file a process: most of the time is one thread of XLA's compiler.
  record pytest .venv/bin/python -m pytest -q -m "not long" -n "$JOBS" --dist loadfile python/tests
fi

echo
say "summary (full logs: build/logs)"
for log in asan tsan ctest; do
  if [ -f build/logs/$log.log ]; then
    grep -hE '^\s+[0-9]+ - .*\((Failed|Timeout|SEGFAULT|Subprocess aborted|Not Run)' build/logs/$log.log || true
  fi
done
grep -hE '^(FAILED|ERROR) ' build/logs/pytest.log || true
grep -hE '^[0-9]+% tests passed' build/logs/ctest.log || true
grep -hE '^=*\s*([0-9]+ (passed|failed|errors?|skipped|xfailed|xpassed|deselected)|no tests ran).* in [0-9.]+s' \
  build/logs/pytest.log | tail -n 1 || true
if [ ${#failed[@]} != 0 ]; then
  die "failed: ${failed[*]}"
fi
