#!/usr/bin/env bash
# bench.sh [options of python -m cutloss.bench]: the kernels, then the whole loss beside its peers. Numbers mean something
# on an idle machine only.
source "$(dirname "$0")/common.sh"

# The kernels alone; not in a smoke test, not when only results are shown.
bench_kernels() {
  say "building (preset release)"
  quietly bench-configure cmake --preset release
  quietly bench-build cmake --build --preset release
  if [ -x build/release/cutloss_bench ]; then
    build/release/cutloss_bench --benchmark_out=build/bench/kernels.json --benchmark_out_format=json >&2
  fi
}

mkdir -p build/bench
case " $* " in
  *" --help "* | *" -h "* | *" --report"* | *" --render"* | *" --quick "*) ;;
  *) bench_kernels ;;
esac
exec .venv/bin/python -m cutloss.bench "$@"
