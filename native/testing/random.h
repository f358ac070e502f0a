// Random numbers for tests: the same on every machine and standard library.
#ifndef FLASHVERIFY_NATIVE_TESTING_RANDOM_H_
#define FLASHVERIFY_NATIVE_TESTING_RANDOM_H_

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <random>
#include <utility>
#include <vector>

namespace flashverify::testing {

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}

  uint64_t bits() { return engine_(); }

  // Uniform in [least, most].
  int64_t integer(int64_t least, int64_t most) {
    return least + static_cast<int64_t>(engine_() % static_cast<uint64_t>(most - least + 1));
  }

  bool chance(int percent) { return integer(0, 99) < percent; }

  // Uniform in [0, 1).
  double uniform() { return static_cast<double>(engine_() >> 11) * 0x1p-53; }

  // Standard normal, by Box and Muller.
  double normal() {
    const double radius = std::sqrt(-2 * std::log(1 - uniform()));
    return radius * std::cos(6.283185307179586 * uniform());
  }

  template <typename T>
  T pick(std::initializer_list<T> choices) {
    return choices.begin()[integer(0, static_cast<int64_t>(choices.size()) - 1)];
  }

  template <typename T>
  void shuffle(std::vector<T>& items) {
    for (size_t i = items.size(); i > 1; --i) {
      std::swap(items[i - 1], items[static_cast<size_t>(integer(0, static_cast<int64_t>(i) - 1))]);
    }
  }

 private:
  std::mt19937_64 engine_;
};

}  // namespace flashverify::testing

#endif  // FLASHVERIFY_NATIVE_TESTING_RANDOM_H_
