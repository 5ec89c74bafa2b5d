// What computing a loss costs: FLOP, bytes to and from memory, and seconds on a described machine. The planner ranks
// its candidates with this model, and `cutloss plan --costs` prints it.
//
// A plan is a row of stages, one after the other. Arithmetic and memory traffic overlap within a stage, so it takes the
// longer of the two: a roofline for each stage. docs/cost-model.md derives the terms.
#ifndef CUTLOSS_SRC_PLAN_COST_H_
#define CUTLOSS_SRC_PLAN_COST_H_

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "cutloss/cutloss.hpp"

namespace cutloss {

// A machine as the model sees it.
struct Speeds {
  std::string name;
  std::string source;      // where the numbers are from
  bool kernels = false;    // our CPU kernels, with what they were measured to waste; else products and bytes alone: no
                           // kernel can be faster, and ours may well be slower
  int threads = 1;         // of a CPU: what the figures below are for
  double f32_flops = 0;    // peak, multiply and add counted as two, per second
  double bf16_flops = 0;   // of products of 16-bit inputs
  double bandwidth = 0;    // bytes per second to and from memory
  double cache_bytes = 0;  // last cache, or memory on the chip: what is read again out of it is no traffic
};

// What a filter leaves to be done.
struct Kept {
  double share = 1;   // mode sparse: entries kept, of those of the rows that stay filtered; filter "tile": tiles
  double redone = 0;  // mode sparse: share of the rows that are done exactly after all
};

struct Stage {
  std::string_view name;
  double flops = 0;  // of products
  double bytes = 0;
  double compute_seconds = 0;
  double memory_seconds = 0;
  double seconds() const { return compute_seconds > memory_seconds ? compute_seconds : memory_seconds; }
};

struct Cost {
  double flops() const;
  double bytes() const;
  double seconds() const;
  bool memory_bound() const;  // stages that wait for memory take more than half of the time
  std::span<const Stage> stages() const { return {list.data(), size}; }

  std::array<Stage, 12> list;
  std::size_t size = 0;
};

// What of a plan matters to its cost.
struct Schedule {
  Mode mode = Mode::loss;
  std::int64_t at_once = 0;      // tokens whose logits are held, or all of them
  std::int64_t token_block = 0;  // tokens that share a reading of the table
  std::int64_t panel = 0;        // W of the kernels
  std::int64_t head_rows = 0;    // vocabulary rows of a task of the dC pass ...
  std::int64_t head_tokens = 0;  // ... and tokens of its step
  std::int64_t groups = 1;       // mode sparse: how often dC is added to
  double loss_speed = 1;         // threads' worth of work at a time in the loss pass, ...
  double head_speed = 1;         // ... and in the dC pass
};
Schedule schedule_of(const Plan& plan);
// On a machine that is not a CPU of ours: the largest blocks that its memory on the chip holds.
Schedule schedule_on(const Problem& problem, Mode mode, const Speeds& speeds);

Cost predict(const Problem& problem, const Schedule& schedule, const Speeds& speeds, const Kept& kept = {});
// The same of a plan; in mode sparse with the exact pass over the rows that are redone.
Cost predict(const Plan& plan, const Speeds& speeds, const Kept& kept = {});
Cost predict_on(const Problem& problem, Mode mode, const Speeds& speeds, const Kept& kept = {});
// The usual loss: f32 logits, their log-softmax and its gradient as arrays in memory.
Cost predict_dense(const Problem& problem, const Speeds& speeds);

// What the planner takes a core for; only ratios matter to it.
Speeds nominal_core(std::int64_t panel, double cache_bytes);

// Cost in u by the products that a mode makes; what a filter keeps comes on top in mode sparse.
double units_of(const Problem& problem, Mode mode);
std::vector<Mode> legal_modes(const Problem& problem);

// Cut Cross-Entropy's backward pass, by its timings: it always forms the logits again, and does a share k of the rest
// of the unfiltered pass.
double filtered_time(double again, double unfiltered, double share);
Result<double> inferred_share(double again, double unfiltered, double filtered);

}  // namespace cutloss

#endif  // CUTLOSS_SRC_PLAN_COST_H_
