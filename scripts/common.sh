# Sourced by the other scripts.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

JOBS=${JOBS:-$(nproc)}
export CMAKE_BUILD_PARALLEL_LEVEL=$JOBS

say() { if [ -t 1 ]; then printf '\033[1m==>\033[0m %s\n' "$*"; else printf '==> %s\n' "$*"; fi; }

die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# Runs a command with its output in a file under build/logs; shows the file only when the command fails.
quietly() {
  local log=build/logs/$1.log
  shift
  mkdir -p build/logs
  if ! "$@" >"$log" 2>&1; then
    tail -n 80 "$log" >&2
    die "'$*' failed; all of its output is in $log"
  fi
}
