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

// Ignored rows are 0 in every per-row output; the passes write only the others.
void clear_outputs(const Problem& p, const Outputs& out, std::int64_t valid) {
  if (valid < p.tokens) {
    fill_zero(out.nll, p.tokens, DType::f32);
    fill_zero(out.lse, p.tokens, DType::f32);
    fill_zero(out.d_e, p.tokens * p.hidden, d_e_dtype(p));
    if (p.reduction == Reduction::none) fill_zero(out.loss, p.tokens, DType::f32);
  }
  if (valid == 0) fill_zero(out.d_c, p.vocab * p.hidden, d_c_dtype(p));
}

void reduce(const Problem& p, const RowTable& table, std::int64_t valid, double scale, float* loss) {
  if (loss == nullptr) return;
  if (p.reduction == Reduction::none) {
    for (std::int64_t i = 0; i < valid; ++i) loss[table.row[i]] = static_cast<float>(table.nll[i]);
    return;
  }
  double sum = 0;
  for (std::int64_t i = 0; i < valid; ++i) sum += table.nll[i];
  *loss = static_cast<float>(sum * scale);
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
  const RowScan labels = scan_rows(p, inputs, {map.rows.row, tokens}, {map.rows.label, tokens});
  if (!labels.bad.ok() && p.bad_labels == BadLabels::error) return labels.bad;
  clear_outputs(p, outputs, labels.valid);
  if (outputs.valid_count != nullptr) *outputs.valid_count = labels.valid;

  const double scale =
      p.reduction == Reduction::mean && labels.valid > 0 ? 1.0 / static_cast<double>(labels.valid) : 1.0;
  if (labels.valid > 0) {
    std::unique_ptr<Executor> own;
    if (executor == nullptr) {
      own = make_thread_executor(plan.threads);
      executor = own.get();
    }
    Capped capped(*executor, plan.threads);
    const cpu::Context context{plan, inputs, outputs, *kernels, map, capped, scale};
    const std::int64_t step = plan.mode == Mode::chunk ? plan.chunk_tokens : labels.valid;
    for (std::int64_t first = 0; first < labels.valid; first += step) {
      const std::int64_t count = std::min(step, labels.valid - first);
      cpu::loss_pass(context, first, count);
      if (p.want_d_c) cpu::head_pass(context, first, count, first + count == labels.valid);
    }
  }
  reduce(p, map.rows, labels.valid, scale, outputs.loss);
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
