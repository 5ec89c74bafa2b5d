#!/usr/bin/env bash
# Formats C++ and Python in place.
source "$(dirname "$0")/common.sh"

command -v clang-format >/dev/null || die "clang-format is missing (Debian: sudo apt-get install clang-format)"
find include src tests python -name '*.cc' -o -name '*.h' -o -name '*.hpp' | xargs -r clang-format -i
if [ -x .venv/bin/ruff ]; then
  .venv/bin/ruff format python
fi
