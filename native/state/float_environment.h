// The floating-point mode that every computation runs in.
#ifndef FLASHVERIFY_NATIVE_STATE_FLOAT_ENVIRONMENT_H_
#define FLASHVERIFY_NATIVE_STATE_FLOAT_ENVIRONMENT_H_

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace flashverify {

// The default mode for a scope. An engine may have switched flush-to-zero on in its
// threads, or another rounding; the bits of a row must not depend on that.
class DefaultFloatEnvironment {
 public:
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
  DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;
#if defined(__SSE2__)
  DefaultFloatEnvironment() : saved_(_mm_getcsr()) { _mm_setcsr(kDefault); }
  ~DefaultFloatEnvironment() { _mm_setcsr(saved_); }

 private:
  static constexpr unsigned kDefault = 0x1f80;  // all exceptions masked, nothing else
  unsigned saved_;
#else
  DefaultFloatEnvironment() = default;
#endif
};

}  // namespace flashverify

#endif  // FLASHVERIFY_NATIVE_STATE_FLOAT_ENVIRONMENT_H_
