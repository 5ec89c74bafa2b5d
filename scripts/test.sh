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

mkdir -p build/logs
rm -f build/logs/{ctest,pytest,install,asan,ubsan,tsan,fuzz}.log
say "building the C++ tests (preset dev)"
quietly cmake-configure cmake --preset dev
quietly cmake-build cmake --build --preset dev

if [ "$size" = long ]; then
  record install tests/install/run.sh
  for sanitizer in asan ubsan tsan; do
    record $sanitizer sanitized_tests $sanitizer
  done
  record fuzz scripts/fuzz.sh 60
  record ctest ctest --preset long -j "$JOBS"
  if [ ! -d build/libtpu ]; then
    say "installing the compiler for TPUs into build/libtpu"
    quietly libtpu .venv/bin/python -m pip install --no-deps --target build/libtpu "$(sed -n 's/.*"\(libtpu==[^"]*\)".*/\1/p' pyproject.toml)"
  fi
  record pytest .venv/bin/python -m pytest -q python/tests
else
  record ctest ctest --preset dev -j "$JOBS"
  record pytest .venv/bin/python -m pytest -q -m "not long" python/tests
fi

echo
say "summary (full logs: build/logs)"
for log in asan ubsan tsan ctest; do
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
