// Every pointer of Inputs and Outputs with the bytes behind it, and matrices in all the ways they may be laid out.
#ifndef CUTLOSS_TESTS_BUFFERS_H_
#define CUTLOSS_TESTS_BUFFERS_H_

#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "src/problem/resolve.h"
#include "tests/guarded.h"

namespace cutloss::testing {

struct Place {
  const char* name;
  std::function<const void*()> get;
  std::function<void(void*)> set;
  std::int64_t count;
  std::size_t item;
  std::int64_t before = 0;  // of the elements, so many lie before the pointer
};

template <typename T>
Place place(const char* name, T*& pointer, std::int64_t count, std::size_t item, std::int64_t before = 0) {
  return {name,  [&pointer] { return pointer; }, [&pointer](void* to) { pointer = static_cast<T*>(to); }, count, item,
          before};
}

// But for e and c, whose extent their strides decide.
inline std::vector<Place> places_of(const Problem& p, Inputs& in) {
  const std::int64_t per_loss = p.reduction == Reduction::none ? p.tokens : 1;
  const std::size_t id = size_of(p.label_dtype);
  const std::int64_t labels = p.tokens == 0 ? 0 : (p.tokens - 1) * std::abs(p.label_stride) + 1;
  return {place("labels", in.labels, labels, id, p.label_stride < 0 ? labels - 1 : 0),
          place("cotangent", in.cotangent, per_loss, 4),
          place("bias", in.bias, p.vocab, p.bias_dtype ? size_of(*p.bias_dtype) : 4),
          place("token_weights", in.token_weights, p.tokens, 4),
          place("class_weights", in.class_weights, p.vocab, 4),
          place("lse_cotangent", in.lse_cotangent, p.tokens, 4),
          place("soft_ids", in.soft_ids, p.tokens * p.soft_targets, id),
          place("soft_probabilities", in.soft_probabilities, p.tokens * p.soft_targets, 4),
          place("vocab_order", in.vocab_order, p.vocab, 8)};
}

inline std::vector<Place> places_of(const Problem& p, Outputs& out) {
  const std::int64_t n = p.tokens, k = p.metrics.top_k;
  return {place("loss", out.loss, p.reduction == Reduction::none ? n : 1, 4),
          place("nll", out.nll, n, 4),
          place("lse", out.lse, n, 4),
          place("d_e", out.d_e, n * p.hidden, size_of(d_e_dtype(p))),
          place("d_c", out.d_c, p.vocab * p.hidden, size_of(d_c_dtype(p))),
          place("d_bias", out.d_bias, p.vocab, p.bias_dtype ? size_of(*p.bias_dtype) : 4),
          place("valid_count", out.valid_count, 1, 8),
          place("entropy", out.entropy, n, 4),
          place("argmax", out.argmax, n, 8),
          place("correct", out.correct, n, 1),
          place("rank", out.rank, n, 8),
          place("top_k_ids", out.top_k_ids, n * k, 8),
          place("top_k_logprobs", out.top_k_logprobs, n * k, 4),
          place("mean_logits", out.mean_logits, p.vocab, 4),
          place("filter_report", out.filter_report, sizeof(FilterReport) / 8, 8)};
}

// How a matrix may be laid out: strides in elements, by its extents.
struct Arrangement {
  const char* name;
  Strides (*strides)(std::int64_t rows, std::int64_t columns);
};
inline const std::vector<Arrangement>& all_arrangements() {
  using I = std::int64_t;
  static const std::vector<Arrangement> list = {
      {"contiguous",
       [](I, I c) {
         return Strides{c, 1};
       }},
      {"padded rows",
       [](I, I c) {
         return Strides{c + 3, 1};
       }},
      {"transposed",
       [](I r, I) {
         return Strides{1, r};
       }},
      {"transposed with padding",
       [](I r, I) {
         return Strides{1, r + 2};
       }},
      {"every other row",
       [](I, I c) {
         return Strides{2 * c, 1};
       }},
      {"every other column",
       [](I, I c) {
         return Strides{2 * c + 1, 2};
       }},
      {"rows backwards",
       [](I, I c) {
         return Strides{-c, 1};
       }},
      {"columns backwards",
       [](I, I c) {
         return Strides{c + 1, -1};
       }},
      {"both backwards",
       [](I, I c) {
         return Strides{-2 * c, -1};
       }},
      {"one row for all",
       [](I, I) {
         return Strides{0, 1};
       }},
      {"one column for all",
       [](I, I) {
         return Strides{1, 0};
       }},
  };
  return list;
}

// A matrix of `item` byte elements laid out so, its bytes ending or beginning at a forbidden page; what is between its
// elements is NaN. With a stride of 0 the elements that fall together hold the last one written.
class ArrangedMatrix {
 public:
  ArrangedMatrix(const void* flat, std::int64_t rows, std::int64_t columns, std::size_t item, Strides strides,
                 Against against)
      : strides_(strides) {
    std::int64_t reach = 0;
    for (const auto& [extent, step] : {std::pair{rows, strides.axis0}, std::pair{columns, strides.axis1}}) {
      const std::int64_t span = std::max<std::int64_t>(extent - 1, 0) * step;
      if (span < 0) first_ -= span;
      reach += std::abs(span);
    }
    const std::int64_t size = rows == 0 || columns == 0 ? 0 : reach + 1;
    memory_ = GuardedMemory(static_cast<std::size_t>(size) * item, against);
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t j = 0; j < columns; ++j) {
        std::memcpy(at(i, j, item),
                    static_cast<const std::byte*>(flat) + static_cast<std::size_t>(i * columns + j) * item, item);
      }
    }
    data_ = at(0, 0, item);
    memory_.freeze();
  }
  const void* data() const { return data_; }
  Strides strides() const { return strides_; }
  void copy_to(void* flat, std::int64_t rows, std::int64_t columns, std::size_t item) {
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t j = 0; j < columns; ++j) {
        std::memcpy(static_cast<std::byte*>(flat) + static_cast<std::size_t>(i * columns + j) * item, at(i, j, item),
                    item);
      }
    }
  }

 private:
  std::byte* at(std::int64_t i, std::int64_t j, std::size_t item) {
    return memory_.data() + (first_ + i * strides_.axis0 + j * strides_.axis1) * static_cast<std::int64_t>(item);
  }
  Strides strides_;
  std::int64_t first_ = 0;
  GuardedMemory memory_;
  const void* data_ = nullptr;
};

}  // namespace cutloss::testing

#endif  // CUTLOSS_TESTS_BUFFERS_H_
