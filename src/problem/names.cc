#include "cutloss/cutloss.hpp"

namespace cutloss {

std::string_view version() { return CUTLOSS_VERSION; }

std::string_view name(DType dtype) {
  switch (dtype) {
    case DType::f32: return "f32";
    case DType::bf16: return "bf16";
    case DType::i32: return "i32";
    case DType::i64: return "i64";
    case DType::f16: return "f16";
  }
  return "unknown dtype";
}

std::string_view name(HeadLayout layout) { return layout == HeadLayout::vd ? "vd" : "dv"; }

std::string_view name(Reduction reduction) {
  switch (reduction) {
    case Reduction::mean: return "mean";
    case Reduction::sum: return "sum";
    case Reduction::none: return "none";
  }
  return "unknown reduction";
}

std::string_view name(Mode mode) {
  switch (mode) {
    case Mode::automatic: return "auto";
    case Mode::loss: return "loss";
    case Mode::stream: return "stream";
    case Mode::chunk: return "chunk";
    case Mode::recompute: return "recompute";
    case Mode::sparse: return "sparse";
  }
  return "unknown mode";
}

std::string_view name(Filter filter) {
  switch (filter) {
    case Filter::none: return "none";
    case Filter::certified: return "certified";
    case Filter::unbiased: return "unbiased";
    case Filter::tile: return "tile";
  }
  return "unknown filter";
}

std::size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::f32: return 4;
    case DType::bf16: return 2;
    case DType::i32: return 4;
    case DType::i64: return 8;
    case DType::f16: return 2;
  }
  return 0;
}

}  // namespace cutloss
