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

have_package() { dpkg-query -W -f='${Status}' "$1" 2>/dev/null | grep -q '^install ok installed$'; }

# apt_install WHY PACKAGE...
apt_install() {
  local why=$1
  shift
  command -v apt-get >/dev/null || die "$why: install the equivalents of these Debian packages: $*"
  [ "$(id -u)" = 0 ] || die "$why; run this, then 'make setup' again:
  sudo apt-get install --no-install-recommends $*"
  say "installing $*"
  quietly apt-update apt-get update
  DEBIAN_FRONTEND=noninteractive quietly apt-install apt-get install -y --no-install-recommends "$@"
}
