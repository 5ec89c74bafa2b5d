// Every kernel of every target on one panel against one head tile, in cache: cutloss_bench --benchmark_filter=avx2
#include <benchmark/benchmark.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "src/cpu/kernels.h"
#include "src/cpu/peak.h"

namespace cutloss::cpu {
namespace {

struct Free {
  void operator()(float* p) const { std::free(p); }
};
using Buffer = std::unique_ptr<float, Free>;

Buffer buffer(std::int64_t count) {
  const std::size_t bytes = (static_cast<std::size_t>(count) * sizeof(float) + 63) / 64 * 64;
  Buffer b(static_cast<float*>(std::aligned_alloc(64, bytes)));
  for (std::int64_t i = 0; i < count; ++i) b.get()[i] = static_cast<float>(i % 61) * 0.01f - 0.3f;
  return b;
}

// Kernel under test over a head tile of about 96 rows and D columns, with everything it touches.
struct Tile {
  Tile(const Kernels& k, std::int64_t d) : kernels(k), hidden(d) {
    padded_hidden = (d + k.rows - 1) / k.rows * k.rows;
    groups = std::max(1, 96 / k.rows);
    rows = groups * k.rows;
    stride = head_stride(padded_hidden, k.rows);
    head = buffer(static_cast<std::int64_t>(stride) * groups);
    table = buffer(rows * d);
    tokens = buffer(d * k.panel);
    logits = buffer(rows * k.panel);
    weights = buffer(rows * k.panel);
    slopes = buffer(rows * k.panel);
    lanes = buffer(8 * k.panel);
    accumulator = buffer(padded_hidden * k.panel);
    slice_hidden = (d + k.panel - 1) / k.panel * k.panel;
    slices = buffer(slice_hidden * k.panel);
    out = buffer(rows * slice_hidden);
    out_error = buffer(rows * slice_hidden);
  }
  float* lane(int i) { return lanes.get() + i * kernels.panel; }
  double product_flops() const { return 2.0 * static_cast<double>(rows * hidden * kernels.panel); }

  const Kernels& kernels;
  std::int64_t hidden, padded_hidden, groups, rows, slice_hidden;
  std::size_t stride;
  Buffer head, table, tokens, logits, weights, slopes, lanes, accumulator, slices, out, out_error;
};

template <typename Call>
void run(benchmark::State& state, const Kernels& kernels, bool product, const Call& call) {
  Tile tile(kernels, state.range(0));
  for (auto _ : state) {
    call(tile);
    benchmark::ClobberMemory();
  }
  const double per_call = product ? tile.product_flops() : static_cast<double>(tile.rows * kernels.panel);
  state.counters[product ? "FLOP/s" : "logits/s"] =
      benchmark::Counter(per_call, benchmark::Counter::kIsIterationInvariantRate, benchmark::Counter::kIs1000);
}

void register_all() {
  for (const Kernels* k : supported_kernels()) {
    const auto add = [k](const char* name, bool product, auto call) {
      benchmark::RegisterBenchmark((std::string(k->name) + "/" + name).c_str(),
                                   [k, product, call](benchmark::State& state) { run(state, *k, product, call); })
          ->Arg(640)
          ->Arg(1024)
          ->Arg(2304);
    };
    add("logits", true,
        [](Tile& t) { t.kernels.logits(t.head.get(), t.stride, t.groups, t.tokens.get(), t.hidden, t.logits.get()); });
    add("hidden_gradient", true, [](Tile& t) {
      t.kernels.hidden_gradient(t.head.get(), t.stride, t.groups, t.weights.get(), t.padded_hidden, t.lane(5),
                                t.accumulator.get());
    });
    add("head_gradient", true, [](Tile& t) {
      t.kernels.head_gradient(t.logits.get(), 0, 1, t.slices.get(), t.kernels.panel, t.groups, t.slice_hidden, true,
                              t.out.get(), t.out_error.get());
    });
    add("softcap", false,
        [](Tile& t) { t.kernels.softcap(t.logits.get(), t.rows, 30.0f, t.weights.get(), t.slopes.get()); });
    add("softmax", false, [](Tile& t) {
      t.kernels.softmax(t.logits.get(), t.rows, t.groups, nullptr, {t.lane(0), t.lane(1), t.lane(2)}, t.weights.get(),
                        t.lane(5));
    });
    add("pack_head", false, [](Tile& t) {
      t.kernels.pack_head(t.table.get(), DType::f32, t.hidden, 1, nullptr, 0, t.rows, t.hidden, t.padded_hidden,
                          t.head.get());
    });
    benchmark::RegisterBenchmark((std::string(k->name) + "/peak").c_str(), [k](benchmark::State& state) {
      for (auto _ : state) state.counters["FLOP/s"] = measure_peak_gflops(k->name, 1) * 1e9;
    })->Iterations(1);
  }
}

const bool registered = (register_all(), true);

}  // namespace
}  // namespace cutloss::cpu
