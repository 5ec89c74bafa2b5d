// run(): checks, label scan, the passes in the mode's order, the reduction.
#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <numeric>
#include <vector>

#include "cutloss/cutloss.hpp"
#include "src/cpu/float_env.h"
#include "src/cpu/passes.h"
#include "src/cpu/sparse.h"
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
  }
  if (computed > 0) return;
  if (!p.accumulate_d_c) fill_zero(out.d_c, p.vocab * p.hidden, d_c_dtype(p));
  if (!p.accumulate_d_bias) fill_zero(out.d_bias, p.vocab, p.bias_dtype.value_or(DType::f32));
  fill_zero(out.mean_logits, p.vocab, DType::f32);
}

void reduce(const Problem& p, const RowTable& table, double scale, float* loss) {
  if (loss == nullptr) return;
  if (p.reduction == Reduction::none) {
    for (std::int64_t i = 0; i < p.tokens; ++i) loss[i] = static_cast<float>(table.loss[i]);
    return;
  }
  double sum = 0;
  for (std::int64_t i = 0; i < p.tokens; ++i) sum += table.loss[i];
  *loss = scale == 0 ? 0.0f : static_cast<float>(sum * scale);
}

// Filter "tile" knows what it kept, not what that costs.
FilterReport tile_report(const Workspace& workspace, std::int64_t computed) {
  FilterReport report;
  report.rows = computed;
  const std::int64_t counts = workspace.plan->problem.want_d_e ? computed : workspace.geometry.tiles;
  for (std::int64_t i = 0; i < counts && computed > 0; ++i) {
    report.kept_entries += static_cast<double>(workspace.rows.kept[i]);
  }
  return report;
}

}  // namespace

Status run(const Plan& plan, const Inputs& inputs, const Outputs& outputs, std::span<std::byte> workspace,
           Executor* executor) try {
  const cpu::KernelFloatEnv float_env;
  const Problem& p = plan.problem;
  if (Status s = validate(p); !s.ok()) return s;
  if (Status s = validate_buffers(p, inputs, outputs, {written_range("workspace", workspace.data(), workspace.size())});
      !s.ok()) {
    return s;
  }
  if (workspace.size() < plan.workspace_bytes) {
    return invalid("workspace has ", workspace.size(), " bytes; the plan needs ", plan.workspace_bytes);
  }
  const cpu::Kernels* kernels = cpu::find_kernels(plan.target);
  if (kernels == nullptr) {
    return Status(StatusCode::unavailable, text("this CPU cannot run the plan's kernel target ", plan.target));
  }

  // The last allocations: after them nothing fails, and outputs may be written.
  std::unique_ptr<Executor> own;
  if (executor == nullptr) {
    own = make_thread_executor(plan.threads);
    if (own == nullptr) return out_of_memory();
    executor = own.get();
  }
  const Workspace map = map_workspace(plan, workspace.data());
  const auto tokens = static_cast<std::size_t>(p.tokens);
  const RowScan rows = scan_rows(p, inputs, {map.rows.row, tokens}, {map.rows.label, tokens});
  if (!rows.bad.ok() && p.bad_labels == BadLabels::error) return rows.bad;
  if (p.vocab_order) {
    const auto vocab = static_cast<std::size_t>(p.vocab);
    if (Status s = invert_order("vocab_order", {inputs.vocab_order, vocab}, {map.order_position, vocab}); !s.ok()) {
      return s;
    }
    for (std::int64_t i = 0; i < rows.computed; ++i) {
      const std::int64_t label = map.rows.label[i];
      map.rows.position[i] = label < 0 ? label : map.order_position[label];
    }
  }
  clear_outputs(p, outputs, rows.computed);
  if (outputs.valid_count != nullptr) *outputs.valid_count = rows.valid;

  std::fill_n(map.rows.loss, p.tokens, 0.0);
  double scale = 1;
  FilterReport report;
  if (rows.computed > 0) {
    const cpu::Workers workers(*executor, plan.threads);
    cpu::Context context{plan, inputs, outputs, *kernels, map, workers, workspace.data(), {}};
    if (p.soft_targets > 0) cpu::gather_targets(context, rows.computed);
    // Before the objective: both use workspace.vector, and the loss pass reads the objective's.
    if (p.metrics.mean_logits) cpu::mean_logits(context, rows.computed);
    context.objective = cpu::prepare_objective(context, rows.computed);
    scale = context.objective.scale;
    if (plan.mode == Mode::sparse) {
      report = cpu::run_sparse(context, rows.computed);
    } else {
      cpu::run_exact(context, rows.computed, false);
    }
  }
  if (p.filter == Filter::tile && wants_gradient(p)) report = tile_report(map, rows.computed);
  report.epsilon = plan.epsilon;
  if (outputs.filter_report != nullptr) *outputs.filter_report = report;
  reduce(p, map.rows, scale, outputs.loss);
  return Status();
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

Status run(const Plan& plan, const Inputs& inputs, const Outputs& outputs, Executor* executor) try {
  const std::unique_ptr<std::byte[]> workspace(new (std::nothrow) std::byte[plan.workspace_bytes]);
  if (workspace == nullptr) {
    return Status(StatusCode::out_of_memory, text("the workspace of ", plan.workspace_bytes,
                                                  " bytes could not be allocated; a smaller budget makes it smaller"));
  }
  return run(plan, inputs, outputs, {workspace.get(), plan.workspace_bytes}, executor);
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

Status learn_vocab_order(const Problem& problem, const Inputs& inputs, std::int64_t* order, Executor* executor) try {
  const cpu::KernelFloatEnv float_env;
  Problem p = problem;
  p.vocab_order = false;
  p.want_d_e = p.want_d_c = p.want_d_bias = false;
  p.accumulate_d_e = p.accumulate_d_c = p.accumulate_d_bias = false;
  p.metrics = {};
  if (Status s = validate(p); !s.ok()) return s;
  if (order == nullptr) return invalid("order is null, but vocab is ", p.vocab);
  Inputs in = inputs;
  in.vocab_order = nullptr;
  if (Status s = check_alignment("order", order, sizeof *order); !s.ok()) return s;
  const auto order_bytes = static_cast<std::size_t>(p.vocab) * sizeof *order;
  if (Status s = validate_buffers(p, in, {}, {written_range("order", order, order_bytes)}); !s.ok()) return s;

  Plan plan;
  plan.problem = p;
  const cpu::Kernels* kernels = cpu::supported_kernels().front();
  const auto n = static_cast<std::size_t>(p.tokens);
  const auto v = static_cast<std::size_t>(p.vocab);
  const auto d = static_cast<std::size_t>(p.hidden) + 1;
  std::vector<std::int64_t> rows(2 * n);
  std::vector<double> numbers(v + d * (1 + kVectorParts));
  const RowScan scan = scan_rows(p, in, {rows.data(), n}, {rows.data() + n, n});
  if (!scan.bad.ok() && p.bad_labels == BadLabels::error) return scan.bad;
  if (scan.computed == 0) {
    std::iota(order, order + p.vocab, std::int64_t{0});
    return Status();
  }
  Workspace workspace;
  workspace.plan = &plan;
  workspace.rows.row = rows.data();
  workspace.vector = numbers.data() + v;
  workspace.vector_parts = workspace.vector + d;
  std::unique_ptr<Executor> own;
  if (executor == nullptr) {
    const Result<Machine> machine = Machine::detect();
    own = make_thread_executor(machine.ok() ? machine->threads : 1);
    if (own == nullptr) return out_of_memory();
    executor = own.get();
  }
  const cpu::Workers workers(*executor, executor->concurrency());
  const cpu::Context context{plan, in, {}, *kernels, workspace, workers, nullptr, {}};
  cpu::order_by_mean_logit(context, scan.computed, numbers.data(), order);
  return Status();
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

}  // namespace cutloss
