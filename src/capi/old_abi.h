// The structs of cutloss.h 0.1.0, as a program built with it has them. For tests.
#ifndef CUTLOSS_SRC_CAPI_OLD_ABI_H_
#define CUTLOSS_SRC_CAPI_OLD_ABI_H_

#include <cstddef>
#include <cstdint>

namespace cutloss::capi::v0_1_0 {

struct problem {
  std::size_t size;
  std::int64_t tokens, hidden, vocab;
  std::int32_t e_dtype, c_dtype, label_dtype, head_layout;
  std::int32_t has_e_strides, has_c_strides;
  std::int64_t e_strides[2], c_strides[2];
  std::int64_t label_stride;
  std::int32_t reduction, bad_labels;
  std::int64_t ignore_index;
  float softcap;
  std::int32_t want_d_e, want_d_c;
};

struct inputs {
  std::size_t size;
  const void *e, *c, *labels;
  const float* cotangent;
};

struct outputs {
  std::size_t size;
  float *loss, *nll, *lse;
  void *d_e, *d_c;
  std::int64_t* valid_count;
};

}  // namespace cutloss::capi::v0_1_0

#endif  // CUTLOSS_SRC_CAPI_OLD_ABI_H_
