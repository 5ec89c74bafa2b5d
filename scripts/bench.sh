#!/usr/bin/env bash
# Kernels, then the whole loss at a few shapes. Numbers mean something on an idle machine only.
source "$(dirname "$0")/common.sh"

say "building (preset release)"
quietly bench-configure cmake --preset release
quietly bench-build cmake --build --preset release
mkdir -p build/bench
if [ -x build/release/cutloss_bench ]; then
  build/release/cutloss_bench --benchmark_out=build/bench/kernels.json --benchmark_out_format=json
fi
tool=build/release/src/cli/cutloss
"$tool" info --json >build/bench/machine.json
for arguments in \
  "--frozen --dtype f32" \
  "--frozen --dtype bf16" \
  "--dtype f32" \
  "--dtype bf16 --head-layout dv"; do
  # shellcheck disable=SC2086  # several arguments on purpose
  "$tool" bench --n 512 --v 32768 --d 640 $arguments --json >"build/bench/loss$(echo "$arguments" | tr -d ' ').json"
done
say "written: build/bench"
