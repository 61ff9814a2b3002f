// A vector of one float, and what each kind of vector offers; the wider ones are in the files that use them.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace tieroff {

// bf16 as it lies in memory: the upper half of a float.
using Bfloat16 = std::uint16_t;

// kWidth floats (F) and as many doubles (D). `fma(a, b, c)` is a b + c with one rounding; `rounded` rounds to bf16, to even;
// `store_rounded` takes what is rounded already.
// [Note: no numbers] `rounded` adds to the bits of what is no number, too, which stays none as long as the lower half of its
// bits is 0. So it is in bf16 tensors and in what processors make; scalars are made so as they come in.
inline float of_a_scalar(double x) {
  return std::isnan(x) ? std::numeric_limits<float>::quiet_NaN() : static_cast<float>(x);  // [Note: no numbers]
}

struct OneLane {
  using F = float;
  using D = double;
  static constexpr std::size_t kWidth = 1;

  static F load(const float* at) { return *at; }
  static void store(float* at, F x) { *at = x; }
  static F load(const Bfloat16* at) { return std::bit_cast<float>(static_cast<std::uint32_t>(*at) << 16); }
  static void store(Bfloat16* at, F x) {
    *at = std::isnan(x) ? Bfloat16{0x7fc0} : static_cast<Bfloat16>(std::bit_cast<std::uint32_t>(rounded(x)) >> 16);
  }
  static void store_rounded(Bfloat16* at, F x) { *at = static_cast<Bfloat16>(std::bit_cast<std::uint32_t>(x) >> 16); }
  static F rounded(F x) {
    const auto bits = std::bit_cast<std::uint32_t>(x);
    return std::bit_cast<float>((bits + 0x7fffU + ((bits >> 16) & 1U)) & 0xffff0000U);
  }
  static F set(float x) { return x; }
  static F add(F a, F b) { return a + b; }
  static F sub(F a, F b) { return a - b; }
  static F mul(F a, F b) { return a * b; }
  static F div(F a, F b) { return a / b; }
  static F fma(F a, F b, F c) { return std::fma(a, b, c); }
  static F root(F x) { return std::sqrt(x); }
  static F negated(F x) { return -x; }
  static F sign(F x) { return static_cast<float>(static_cast<int>(0.0F < x) - static_cast<int>(x < 0.0F)); }
  static F maximum(F a, F b) { return std::isnan(a) ? a : (a > b ? a : b); }  // what is no number wins
  static F larger(F a, F b) { return a < b ? b : a; }                         // as std::max has it

  static D wide(F x) { return static_cast<double>(x); }
  static F narrow(D x) { return static_cast<float>(x); }
  static D set(double x) { return x; }
  static D add(D a, D b) { return a + b; }
  static D mul(D a, D b) { return a * b; }
  static D fma(D a, D b, D c) { return std::fma(a, b, c); }
};

}  // namespace tieroff
