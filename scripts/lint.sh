#!/usr/bin/env bash
# clang-tidy over the C++ (a few minutes) and ruff over the Python; changes nothing.
source "$(dirname "$0")/common.sh"

command -v clang-tidy >/dev/null || die "clang-tidy is missing (Debian: sudo apt-get install clang-tidy)"
quietly lint-configure cmake --preset dev
find src -name '*.cc' -print0 | xargs -0 -n 1 -P "$JOBS" clang-tidy -quiet -p build/dev
if [ -x .venv/bin/ruff ]; then
  .venv/bin/ruff check python
fi
