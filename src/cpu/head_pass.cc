#include <algorithm>

#include "src/cpu/element.h"
#include "src/cpu/float_env.h"
#include "src/cpu/passes.h"
#include "src/plan/arith.h"
#include "src/problem/resolve.h"

namespace cutloss::cpu {
namespace {

class HeadTask {
 public:
  HeadTask(const Context& context, std::int64_t first, std::int64_t count)
      : context_(context), plan_(context.plan), g_(context.workspace.geometry), first_(first), count_(count) {}

  std::int64_t rows_of(std::int64_t tile) const {
    return std::min(g_.tile_rows, plan_.problem.vocab - tile * g_.tile_rows);
  }

  std::int64_t out_tile() const { return g_.tile_rows * g_.slice_hidden; }

  // scratch.out + out_error = gradient of tiles [tile, tile_end), from the logits the loss pass kept.
  void from_saved(std::int64_t tile, const HeadScratch& scratch) const {
    const std::int64_t chunk_panels = plan_.chunk_tokens / g_.panel;
    float* saved = context_.workspace.saved_logits + tile * chunk_panels * g_.logits_tile;
    for (std::int64_t token = 0; token < count_; token += plan_.head_tokens) {
      const std::int64_t panels = ceil_div(std::min(plan_.head_tokens, count_ - token), g_.panel);
      float* logits = saved + token / g_.panel * g_.logits_tile;
      multiply(tile, token, panels, logits, context_.workspace.chunk_slices + token * g_.panel, plan_.chunk_tokens,
               scratch.out, scratch.out_error, scratch.label_row);
    }
  }

  // The same for several tiles, forming the logits again.
  void from_recomputed(std::int64_t tile, std::int64_t tile_end, const HeadScratch& scratch) const {
    const Problem& p = plan_.problem;
    const Kernels& kernels = context_.kernels;
    const HeadStrides stride = c_strides(p);
    for (std::int64_t t = tile; t < tile_end; ++t) {
      kernels.pack_head(context_.inputs.c, p.c_dtype, stride.v, stride.d, t * g_.tile_rows, rows_of(t), p.hidden,
                        scratch.heads + (t - tile) * g_.head_tile);
    }
    for (std::int64_t token = 0; token < count_; token += plan_.head_tokens) {
      const std::int64_t count = std::min(plan_.head_tokens, count_ - token);
      const std::int64_t panels = ceil_div(count, g_.panel);
      pack_token_panels(context_, first_ + token, count, panels, scratch.tokens);
      pack_token_slices(context_, first_ + token, count, 0, plan_.head_tokens, scratch.slices);
      for (std::int64_t t = tile; t < tile_end; ++t) {
        const std::int64_t groups = ceil_div(rows_of(t), g_.rows);
        for (std::int64_t panel = 0; panel < panels; ++panel) {
          kernels.logits(scratch.heads + (t - tile) * g_.head_tile, static_cast<std::size_t>(g_.head_stride), groups,
                         scratch.tokens + panel * g_.panel * p.hidden, p.hidden,
                         scratch.logits + panel * g_.logits_tile);
        }
        multiply(t, token, panels, scratch.logits, scratch.slices, plan_.head_tokens,
                 scratch.out + (t - tile) * out_tile(), scratch.out_error + (t - tile) * out_tile(), scratch.label_row);
      }
    }
  }

  // Rows of one tile into dC, added to what earlier ranges left there; `from` takes up its rounding errors first.
  void store(std::int64_t tile, float* from, const float* from_error, bool last) const {
    const Problem& p = plan_.problem;
    float* sum = context_.workspace.d_c_sum;
    const std::int64_t row = tile * g_.tile_rows;
    for (std::int64_t i = 0; i < rows_of(tile); ++i) {
      float* values = from + i * g_.slice_hidden;
      const float* errors = from_error + i * g_.slice_hidden;
      for (std::int64_t column = 0; column < p.hidden; ++column) values[column] += errors[column];
      if (sum != nullptr) {
        float* to = sum + (row + i) * p.hidden;
        for (std::int64_t column = 0; column < p.hidden; ++column) {
          to[column] = first_ == 0 ? values[column] : to[column] + values[column];
        }
        if (!last) continue;
        values = to;
      }
      if (d_c_dtype(p) == DType::bf16) {
        write(static_cast<Bf16*>(context_.outputs.d_c), row + i, values, false);
      } else {
        write(static_cast<float*>(context_.outputs.d_c), row + i, values, first_ > 0);
      }
    }
  }

 private:
  // out (+)= gradient of `panels` logits tiles x their hidden states.
  void multiply(std::int64_t tile, std::int64_t token, std::int64_t panels, float* logits, const float* slices,
                std::int64_t token_rows, float* out, float* out_error, std::int64_t* label_row) const {
    const Problem& p = plan_.problem;
    const RowTable& table = context_.workspace.rows;
    const std::int64_t rows = rows_of(tile);
    const std::int64_t groups = ceil_div(rows, g_.rows);
    for (std::int64_t panel = 0; panel < panels; ++panel) {
      const std::int64_t row = first_ + token + panel * g_.panel;
      label_rows(context_, row, first_ + count_, tile * g_.tile_rows, label_row);
      context_.kernels.logits_gradient(logits + panel * g_.logits_tile, rows, groups, label_row, softcap_or_zero(p),
                                       {table.max + row, table.weight + row, table.label_grad + row});
    }
    context_.kernels.head_gradient(logits, static_cast<std::size_t>(g_.logits_tile), panels, slices, token_rows, groups,
                                   g_.slice_hidden, token > 0, out, out_error);
  }

  template <typename T>
  void write(T* d_c, std::int64_t row, const float* values, bool add) const {
    const HeadStrides stride = d_c_strides(plan_.problem);
    T* to = d_c + row * stride.v;
    for (std::int64_t column = 0; column < plan_.problem.hidden; ++column) {
      T& cell = to[column * stride.d];
      FromFloat(add ? ToFloat(cell) + values[column] : values[column], cell);
    }
  }

  const Context& context_;
  const Plan& plan_;
  const Geometry& g_;
  const std::int64_t first_;
  const std::int64_t count_;
};

}  // namespace

void head_pass(const Context& context, std::int64_t first, std::int64_t count, bool last) {
  const Plan& plan = context.plan;
  const Workspace& workspace = context.workspace;
  const Geometry& g = workspace.geometry;
  const HeadTask task(context, first, count);

  if (plan.mode == Mode::chunk) {
    const std::int64_t step = 8 * g.panel;
    context.executor.parallel_for(ceil_div(count, step), [&](std::int64_t index, int) {
      const std::int64_t at = index * step;
      pack_token_slices(context, first + at, std::min(step, count - at), at, plan.chunk_tokens, workspace.chunk_slices);
    });
  }
  context.executor.parallel_for(ceil_div(g.tiles, plan.head_tiles), [&](std::int64_t index, int worker) {
    const KernelFloatEnv float_env;
    const HeadScratch scratch = workspace.head_scratch(worker);
    const std::int64_t tile = index * plan.head_tiles;
    const std::int64_t tile_end = std::min(tile + plan.head_tiles, g.tiles);
    if (plan.mode == Mode::chunk) {
      task.from_saved(tile, scratch);
    } else {
      task.from_recomputed(tile, tile_end, scratch);
    }
    for (std::int64_t t = tile; t < tile_end; ++t) {
      task.store(t, scratch.out + (t - tile) * task.out_tile(), scratch.out_error + (t - tile) * task.out_tile(), last);
    }
  });
}

}  // namespace cutloss::cpu
