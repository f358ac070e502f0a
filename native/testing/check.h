// Enough of a test framework for native tests: named tests, checks that print
// both sides, and a trace that tells which case failed.
//
//   TEST(merging_identities_gives_the_identity) {
//     for (int n : {1, 2, 7}) {
//       TRACE("n = %d", n);
//       CHECK_EQ(merge(n).sum, 0.0f);
//     }
//   }
//   TEST_MAIN()
//
// A failed check ends its test; the others still run. The program takes one
// optional argument, a part of the names of the tests to run.
#ifndef FLASHVERIFY_NATIVE_TESTING_CHECK_H_
#define FLASHVERIFY_NATIVE_TESTING_CHECK_H_

#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

namespace flashverify::testing {

struct Test {
  const char* name;
  void (*body)();
};

inline std::vector<Test>& all_tests() {
  static std::vector<Test> tests;
  return tests;
}

inline std::vector<std::string>& traces() {
  static thread_local std::vector<std::string> stack;
  return stack;
}

struct Registration {
  Registration(const char* name, void (*body)()) { all_tests().push_back({name, body}); }
};

// Thrown by a failed check, after it has said what is wrong.
struct CheckFailed {};

class Trace {
 public:
  [[gnu::format(printf, 2, 3)]] explicit Trace(const char* format, ...) {
    char text[512];
    va_list values;
    va_start(values, format);
    std::vsnprintf(text, sizeof text, format, values);
    va_end(values);
    traces().emplace_back(text);
  }
  ~Trace() { traces().pop_back(); }
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;
};

[[noreturn]] inline void report_failure(const char* file, int line, const std::string& text) {
  std::printf("%s:%d: %s\n", file, line, text.c_str());
  for (const std::string& trace : traces()) std::printf("    with %s\n", trace.c_str());
  throw CheckFailed{};
}

template <typename T>
std::string show(const T& value) {
  std::ostringstream text;
  if constexpr (std::is_floating_point_v<T>) {
    text.precision(17);
    text << value;
  } else if constexpr (std::is_enum_v<T>) {
    text << static_cast<int64_t>(value);
  } else if constexpr (std::is_integral_v<T> && sizeof(T) == 1) {
    text << static_cast<int>(value);
  } else {
    text << value;
  }
  return text.str();
}

template <typename A, typename B>
void check_equal(const A& a, const B& b, const char* a_text, const char* b_text, const char* file,
                 int line) {
  if (a == b) return;
  report_failure(file, line,
                 std::string(a_text) + " is " + show(a) + ", and " + b_text + " is " + show(b));
}

// Within `tolerance`, or both NaN, or the same infinity.
inline void check_near(double a, double b, double tolerance, const char* a_text, const char* b_text,
                       const char* file, int line) {
  if (a == b || (std::isnan(a) && std::isnan(b)) || std::fabs(a - b) <= tolerance) return;
  report_failure(file, line,
                 std::string(a_text) + " is " + show(a) + ", and " + b_text + " is " + show(b) +
                     ", which is more than " + show(tolerance) + " away");
}

inline void check_contains(const std::string& text, const std::string& part, const char* file,
                           int line) {
  if (text.find(part) != std::string::npos) return;
  report_failure(file, line, "\"" + text + "\" does not contain \"" + part + "\"");
}

inline int run_tests(int argc, char** argv) {
  const char* filter = argc > 1 ? argv[1] : "";
  int passed = 0;
  int failed = 0;
  for (const Test& test : all_tests()) {
    if (std::strstr(test.name, filter) == nullptr) continue;
    bool ok = false;
    try {
      test.body();
      ok = true;
    } catch (const CheckFailed&) {
    } catch (const std::exception& error) {
      std::printf("unexpected exception: %s\n", error.what());
    }
    std::printf("%s %s\n", ok ? "passed" : "FAILED", test.name);
    std::fflush(stdout);
    (ok ? passed : failed) += 1;
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 && passed > 0 ? 0 : 1;
}

}  // namespace flashverify::testing

#define FV_TEST_CONCATENATE_(a, b) a##b
#define FV_TEST_CONCATENATE(a, b) FV_TEST_CONCATENATE_(a, b)

#define TEST(name)                                                                               \
  static void test_##name();                                                                     \
  static const ::flashverify::testing::Registration registration_of_##name(#name, &test_##name); \
  static void test_##name()

#define TEST_MAIN() \
  int main(int argc, char** argv) { return ::flashverify::testing::run_tests(argc, argv); }

// What is going on, printf-style, for the messages of checks in this scope.
#define TRACE(...) \
  const ::flashverify::testing::Trace FV_TEST_CONCATENATE(trace_, __LINE__)(__VA_ARGS__)

#define CHECK(condition)                                                                \
  do {                                                                                  \
    if (!(condition)) {                                                                 \
      ::flashverify::testing::report_failure(__FILE__, __LINE__, "false: " #condition); \
    }                                                                                   \
  } while (false)

#define CHECK_EQ(a, b) ::flashverify::testing::check_equal((a), (b), #a, #b, __FILE__, __LINE__)

#define CHECK_NEAR(a, b, tolerance) \
  ::flashverify::testing::check_near((a), (b), (tolerance), #a, #b, __FILE__, __LINE__)

// `text` holds `part`.
#define CHECK_CONTAINS(text, part) \
  ::flashverify::testing::check_contains((text), (part), __FILE__, __LINE__)

#endif  // FLASHVERIFY_NATIVE_TESTING_CHECK_H_
