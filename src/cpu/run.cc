// run(): checks, label scan, the passes in the mode's order, the reduction.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <new>
#include <vector>

#include "cutloss/cutloss.hpp"
#include "src/cpu/float_env.h"
#include "src/cpu/passes.h"
#include "src/problem/resolve.h"
#include "src/problem/text.h"

namespace cutloss {
namespace {

void fill_zero(void* data, std::int64_t count, DType dtype) {
  if (data != nullptr) std::memset(data, 0, static_cast<std::size_t>(count) * size_of(dtype));
}

// Rows that are not computed are 0 (ids: -1) in every per-row output; the passes write only the others.
void clear_outputs(const Problem& p, const Outputs& out, std::int64_t computed) {
  const auto fill_ids = [](std::int64_t* ids, std::int64_t count) {
    if (ids != nullptr) std::fill_n(ids, count, -1);
  };
  if (computed < p.tokens) {
    for (float* rows : {out.nll, out.lse, out.entropy}) fill_zero(rows, p.tokens, DType::f32);
    fill_zero(out.top_k_logprobs, p.tokens * p.metrics.top_k, DType::f32);
    fill_ids(out.argmax, p.tokens);
    fill_ids(out.rank, p.tokens);
    fill_ids(out.top_k_ids, p.tokens * p.metrics.top_k);
    if (out.correct != nullptr) std::fill_n(out.correct, p.tokens, std::uint8_t{0});
    if (!p.accumulate_d_e) fill_zero(out.d_e, p.tokens * p.hidden, d_e_dtype(p));
    if (p.reduction == Reduction::none) fill_zero(out.loss, p.tokens, DType::f32);
  }
  if (computed > 0) return;
  if (!p.accumulate_d_c) fill_zero(out.d_c, p.vocab * p.hidden, d_c_dtype(p));
  if (!p.accumulate_d_bias) fill_zero(out.d_bias, p.vocab, p.bias_dtype.value_or(DType::f32));
  fill_zero(out.mean_logits, p.vocab, DType::f32);
}

void reduce(const Problem& p, const RowTable& table, std::int64_t computed, double scale, float* loss) {
  if (loss == nullptr) return;
  if (p.reduction == Reduction::none) {
    for (std::int64_t i = 0; i < computed; ++i) loss[table.row[i]] = static_cast<float>(table.loss[i]);
    return;
  }
  double sum = 0;
  for (std::int64_t i = 0; i < computed; ++i) sum += table.loss[i];
  *loss = scale == 0 ? 0.0f : static_cast<float>(sum * scale);
}

// The passes of a mode over all rows.
void run_passes(const cpu::Context& context, std::int64_t rows) {
  const Plan& plan = context.plan;
  const std::int64_t step = plan.mode == Mode::chunk ? plan.chunk_tokens : rows;
  for (std::int64_t first = 0; first < rows; first += step) {
    const std::int64_t count = std::min(step, rows - first);
    cpu::loss_pass(context, first, count);
    if (wants_head(plan.problem)) cpu::head_pass(context, first, count, first + count == rows);
  }
}

// An executor that never uses more workers than the workspace has scratch for.
class Capped final : public Executor {
 public:
  Capped(Executor& inner, int limit) : inner_(inner), limit_(limit) {}
  int concurrency() const override { return std::min(inner_.concurrency(), limit_); }
  void parallel_for(std::int64_t tasks, const Body& body) override {
    if (inner_.concurrency() <= limit_) return inner_.parallel_for(tasks, body);
    // Fewer tasks than workers is the one way to bound worker ids that every Executor offers.
    std::atomic<std::int64_t> next{0};
    inner_.parallel_for(std::min<std::int64_t>(limit_, tasks), [&](std::int64_t lane, int) {
      for (std::int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
        body(task, static_cast<int>(lane));
      }
    });
  }

 private:
  Executor& inner_;
  int limit_;
};

}  // namespace

Status run(const Plan& plan, const Inputs& inputs, const Outputs& outputs, std::span<std::byte> workspace,
           Executor* executor) {
  const Problem& p = plan.problem;
  if (Status s = validate(p); !s.ok()) return s;
  if (Status s = validate_buffers(p, inputs, outputs, workspace); !s.ok()) return s;
  if (workspace.size() < plan.workspace_bytes) {
    return invalid("workspace has ", workspace.size(), " bytes; the plan needs ", plan.workspace_bytes);
  }
  const cpu::Kernels* kernels = cpu::find_kernels(plan.target);
  if (kernels == nullptr) {
    return Status(StatusCode::unavailable, text("this CPU cannot run the plan's kernel target ", plan.target));
  }

  const cpu::KernelFloatEnv float_env;
  const Workspace map = map_workspace(plan, workspace.data());
  const auto tokens = static_cast<std::size_t>(p.tokens);
  const RowScan rows = scan_rows(p, inputs, {map.rows.row, tokens}, {map.rows.label, tokens});
  if (!rows.bad.ok() && p.bad_labels == BadLabels::error) return rows.bad;
  if (p.vocab_order) {
    const auto vocab = static_cast<std::size_t>(p.vocab);
    if (Status s = invert_order(p, inputs, {map.order_position, vocab}); !s.ok()) return s;
    for (std::int64_t i = 0; i < rows.computed; ++i) {
      const std::int64_t label = map.rows.label[i];
      map.rows.position[i] = label == kBadLabel ? kBadLabel : map.order_position[label];
    }
  }
  clear_outputs(p, outputs, rows.computed);
  if (outputs.valid_count != nullptr) *outputs.valid_count = rows.valid;

  double scale = 1;
  if (rows.computed > 0) {
    std::unique_ptr<Executor> own;
    if (executor == nullptr) {
      own = make_thread_executor(plan.threads);
      executor = own.get();
    }
    Capped capped(*executor, plan.threads);
    cpu::Context context{plan, inputs, outputs, *kernels, map, capped, {}};
    if (p.soft_targets > 0) cpu::gather_targets(context, rows.computed);
    context.objective = cpu::prepare_objective(context, rows.computed);
    scale = context.objective.scale;
    run_passes(context, rows.computed);
    if (p.metrics.mean_logits) cpu::mean_logits(context, rows.computed);
  }
  reduce(p, map.rows, rows.computed, scale, outputs.loss);
  return Status();
}

Status run(const Plan& plan, const Inputs& inputs, const Outputs& outputs, Executor* executor) {
  const std::unique_ptr<std::byte[]> workspace(new (std::nothrow) std::byte[plan.workspace_bytes]);
  if (workspace == nullptr) {
    return Status(StatusCode::out_of_memory, text("the workspace of ", plan.workspace_bytes,
                                                  " bytes could not be allocated; a smaller budget makes it smaller"));
  }
  return run(plan, inputs, outputs, {workspace.get(), plan.workspace_bytes}, executor);
}

}  // namespace cutloss
