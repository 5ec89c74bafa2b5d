#!/usr/bin/env bash
# fuzz.sh [SECONDS [TARGET...]]: runs each libFuzzer target of fuzz/ for so long (60 by default), from a few seeds and
# what earlier runs found, which stays in build/fuzz/corpus. A failing input is left in build/fuzz/found, and
#   build/fuzz/fuzz/TARGET build/fuzz/found/...
# repeats it.
source "$(dirname "$0")/common.sh"

seconds=${1:-60}
shift || true

command -v clang++ >/dev/null || apt_install "fuzzing needs clang" clang libclang-rt-dev

npy() { # DESCR FORTRAN_ORDER SHAPE BYTES
  printf '\x93NUMPY\x01\x00v\x00%-117s\n' "{'descr': '$1', 'fortran_order': $2, 'shape': ($3), }"
  head -c "$4" /dev/zero
}

write_seeds() {
  local corpus=build/fuzz/corpus i
  mkdir -p $corpus/{objective,capi,npy,tuning,machine}_fuzz build/fuzz/found
  for i in $(seq 40); do echo "problem $i" | sha512sum >$corpus/objective_fuzz/seed$i; done
  # Longer than the hashes above: a problem, then its arrays.
  for i in $(seq 40); do seq "$i" 7 5000 | sha512sum >$corpus/capi_fuzz/seed$i; seq "$i" 7 5000 >>$corpus/capi_fuzz/seed$i; done
  npy '<f4' False '2, 3' 24 >$corpus/npy_fuzz/f4
  npy '<f2' True '2, 3' 12 >$corpus/npy_fuzz/f2
  npy '<i8' False '5,' 40 >$corpus/npy_fuzz/i8
  npy '|u1' False '' 1 >$corpus/npy_fuzz/scalar
  npy '<f8' False '3,' 24 >$corpus/npy_fuzz/f8
  npy '|b1' True '2, 2' 4 >$corpus/npy_fuzz/b1
  npy '<u8' False '0, 7' 0 >$corpus/npy_fuzz/empty
  npy '<V2' False '9000000000000000000, 2' 8 >$corpus/npy_fuzz/large
  echo 'avx2 stream 640 f32 vd 1024 168 2048 512 768' >$corpus/tuning_fuzz/one
  printf 'avx512 chunk 7 bf16 dv 1 1 1 1 1\navx512 loss 16777216 f16 vd 65536 9 9 9 9\n' >$corpus/tuning_fuzz/two
  printf "name = box # mine\nf32_flops = 2e12\nbandwidth=1e11\ncache_bytes=3e7\nthreads=8\n" >$corpus/machine_fuzz/box
}

say "building the fuzz targets (preset fuzz)"
quietly fuzz-configure cmake --preset fuzz
quietly fuzz-build cmake --build --preset fuzz --target all_fuzz
write_seeds
failed=()
for target in ${@:-$(cd fuzz && ls -- *_fuzz.cc | sed 's/\.cc$//')}; do
  say "$target for $seconds seconds"
  build/fuzz/fuzz/"$target" -max_total_time="$seconds" -timeout=30 -rss_limit_mb=4096 -print_final_stats=1 \
    -artifact_prefix=build/fuzz/found/"$target"- build/fuzz/corpus/"$target" >build/logs/"$target".log 2>&1 ||
    { failed+=("$target"); tail -n 40 build/logs/"$target".log; }
  grep -E 'number_of_executed_units|new_units_added|DONE' build/logs/"$target".log || true
done
[ ${#failed[@]} = 0 ] || die "found something: ${failed[*]} (inputs in build/fuzz/found, output in build/logs)"
