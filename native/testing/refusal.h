// Calls that must be refused: with which status, naming what.
#ifndef FLASHVERIFY_NATIVE_TESTING_REFUSAL_H_
#define FLASHVERIFY_NATIVE_TESTING_REFUSAL_H_

#include <cstring>
#include <string>
#include <vector>

#include "flashverify/flashverify.h"
#include "native/testing/arena.h"
#include "native/testing/check.h"

namespace flashverify::testing {

template <typename Params>
struct Refusal {
  const char* what;
  fv_status status;
  const char* argument;
  std::vector<const char*> texts;  // parts of the message: the value, what is accepted
  void (*damage)(Params& p);
};

// Damages a valid call as told and makes it. It must fail as told, write to
// neither the arena nor its parameters, and complete no route.
template <typename Params>
void expect_refused(const Refusal<Params>& refusal, Params params, const Arena& arena,
                    fv_status (*call)(Params* params)) {
  TRACE("%s", refusal.what);
  const fv_api& api = *fv_get_api();
  refusal.damage(params);
  const auto memory = arena.snapshot();
  Params passed = params;
  uint64_t counts[2][FV_ROUTE_COUNT];
  api.route_counts(counts[0]);

  const fv_status status = call(&passed);
  const std::string message = api.last_error();
  TRACE("message: %s", message.c_str());
  CHECK_EQ(status, refusal.status);
  CHECK_EQ(message.rfind(std::string(refusal.argument) + ": ", 0), size_t{0});
  CHECK_CONTAINS(message, "; accepted: ");
  for (const char* text : refusal.texts) CHECK_CONTAINS(message, text);
  CHECK(arena.snapshot() == memory);
  CHECK_EQ(std::memcmp(&passed, &params, sizeof params), 0);
  api.route_counts(counts[1]);
  CHECK_EQ(std::memcmp(counts[0], counts[1], sizeof counts[0]), 0);
}

}  // namespace flashverify::testing

#endif  // FLASHVERIFY_NATIVE_TESTING_REFUSAL_H_
