// Adding floats without losing what the addition rounds away.
#ifndef CUTLOSS_SRC_CPU_TWO_SUM_H_
#define CUTLOSS_SRC_CPU_TWO_SUM_H_

namespace cutloss::cpu {

// sum += addend; returns what that rounds away (Knuth's two-sum). simd/products-inl.h has it for vectors.
inline float AddTwoSum(float& sum, float addend) {
  const float total = sum + addend;
  const float added = total - sum;
  const float error = (sum - (total - added)) + (addend - added);
  sum = total;
  return error;
}

}  // namespace cutloss::cpu

#endif  // CUTLOSS_SRC_CPU_TWO_SUM_H_
