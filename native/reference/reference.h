// The FP64 oracle: what every call of the library must compute, written as
// plainly as the definition. It takes the ABI's own structures, so that a test
// hands the same arguments to both.
#ifndef FLASHVERIFY_NATIVE_REFERENCE_REFERENCE_H_
#define FLASHVERIFY_NATIVE_REFERENCE_REFERENCE_H_

#include <cstdint>
#include <vector>

#include "flashverify/flashverify.h"

namespace flashverify::reference {

// One (query token, query head) pair, with what a bound on the error of a
// computation in shorter arithmetic needs.
struct Row {
  std::vector<double> out;        // head_dim, unrounded
  std::vector<double> out_terms;  // head_dim: the sum of |probability * value|
  double lse = 0;
  int64_t keys = 0;             // visible ones
  double largest_score = 0;     // max over keys of |score|, after softcap
  double largest_products = 0;  // max over keys of scale * sum over dims of |q * k|
  double largest_value = 0;     // max over keys and dims of |value|
  double probability_sum = 0;   // sum of exp(score - largest), the sink left out
};

// Row (token, head) is element token * q_heads + head.
std::vector<Row> attention(const fv_attention_params& params);

// Writes the caches of `params`.
void append(const fv_append_params& params);

// Row (token, head) is element token * heads + head; lse and out are set.
std::vector<Row> merge(const fv_merge_params& params);

}  // namespace flashverify::reference

#endif  // FLASHVERIFY_NATIVE_REFERENCE_REFERENCE_H_
