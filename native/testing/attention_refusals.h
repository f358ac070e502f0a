// What the tests of refused attention calls share.
#ifndef FLASHVERIFY_NATIVE_TESTING_ATTENTION_REFUSALS_H_
#define FLASHVERIFY_NATIVE_TESTING_ATTENTION_REFUSALS_H_

#include <vector>

#include "flashverify/flashverify.h"
#include "native/testing/attention_case.h"
#include "native/testing/random.h"
#include "native/testing/refusal.h"

namespace flashverify::testing {

// Two requests of 3 and 2 rows, lengths 40 and 17, page size 16, pages 0 .. 8.
inline AttentionOptions small_valid_call() {
  AttentionOptions options;
  options.query_lens = {3, 2};
  options.seq_lens = {40, 17};
  options.sinks = true;
  options.scales = 2;
  return options;
}

inline void expect_all_refused(const std::vector<Refusal<fv_attention_params>>& refusals,
                               const AttentionOptions& options = small_valid_call()) {
  const fv_api& api = *fv_get_api();
  for (const Refusal<fv_attention_params>& refusal : refusals) {
    Random random(1);
    AttentionCase c(options, random);
    c.plan(api);
    expect_refused(refusal, c.params, c.arena, api.paged_attention);
  }
}

}  // namespace flashverify::testing

#endif  // FLASHVERIFY_NATIVE_TESTING_ATTENTION_REFUSALS_H_
