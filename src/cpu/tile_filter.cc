// filter "tile", as in Cut Cross-Entropy: a tile (W tokens x vocab_tile ids) takes no part in dE where every |dz| in it
// is below epsilon, in units of its token's upstream gradient. The logits are formed once more for it, since only with
// the lse known can a tile be judged.
#include <algorithm>

#include "src/cpu/element.h"
#include "src/cpu/passes.h"
#include "src/plan/arith.h"
#include "src/problem/resolve.h"

namespace cutloss::cpu {

namespace {

class FilteredTask {
 public:
  explicit FilteredTask(const Context& context)
      : context_(context), p_(context.plan.problem), g_(context.workspace.geometry) {}

  // Rows [first, first + count) of the row table. Returns how many logits were in tiles that were kept.
  std::int64_t run(std::int64_t first, std::int64_t count, const LossScratch& scratch, float* accumulator) const {
    const std::int64_t panels = ceil_div(count, g_.panel);
    const auto stride = static_cast<std::size_t>(g_.head_stride);
    std::int64_t kept = 0;
    pack_token_panels(context_, first, count, panels, scratch.tokens);
    std::fill_n(accumulator, panels * g_.panel * g_.padded_depth, 0.0f);
    std::fill_n(scratch.rescale, g_.panel, 1.0f);
    for (std::int64_t tile = 0; tile < g_.tiles; ++tile) {
      const std::int64_t tile_row = tile * g_.tile_rows;
      const std::int64_t rows = std::min(g_.tile_rows, p_.vocab - tile_row);
      const std::int64_t groups = ceil_div(rows, g_.rows);
      pack_head_tile(context_, tile_row, rows, scratch.head);
      const float* class_weights = tile_class_weights(context_, tile_row, rows, scratch.class_weights);
      for (std::int64_t lane = 0; lane < count; lane += g_.panel) {
        context_.kernels.logits(scratch.head, stride, groups, scratch.tokens + lane * g_.depth, g_.depth,
                                scratch.weights);
        if (!gradient_tile(context_, first + lane, first + count, tile_row, rows, class_weights, scratch.label_row,
                           scratch.weights)) {
          continue;
        }
        kept += rows * std::min(g_.panel, count - lane);
        context_.kernels.hidden_gradient(scratch.head, stride, groups, scratch.weights, g_.padded_depth,
                                         scratch.rescale, accumulator + lane * g_.padded_depth);
      }
    }
    write(first, count, accumulator);
    return kept;
  }

 private:
  void write(std::int64_t first, std::int64_t count, const float* accumulator) const {
    WithElement(d_e_dtype(p_), context_.outputs.d_e, [&](auto* d_e) {
      for (std::int64_t i = 0; i < count; ++i) {
        const float* from = accumulator + i / g_.panel * g_.panel * g_.padded_depth + i % g_.panel;
        auto* to = d_e + context_.workspace.rows.row[first + i] * p_.hidden;
        for (std::int64_t column = 0; column < p_.hidden; ++column) {
          const float value = p_.logit_scale * from[column * g_.panel];
          FromFloat(p_.accumulate_d_e ? ToFloat(to[column]) + value : value, to[column]);
        }
      }
    });
  }

  const Context& context_;
  const Problem& p_;
  const Geometry& g_;
};

}  // namespace

void filtered_pass(const Context& context, std::int64_t rows) {
  const std::int64_t block = context.plan.token_block;
  const FilteredTask task(context);
  context.executor.parallel_for(ceil_div(rows, block), [&](std::int64_t index, int worker) {
    const std::int64_t first = index * block;
    const std::int64_t count = std::min(block, rows - first);
    const std::int64_t kept = task.run(first, count, context.workspace.loss_scratch(worker),
                                       context.workspace.loss_state(worker).accumulator);
    // Counted at the block's first row: summed in order, whoever did it.
    context.workspace.rows.kept[first] = kept;
    std::fill_n(context.workspace.rows.kept + first + 1, count - 1, std::int64_t{0});
  });
}

}  // namespace cutloss::cpu
