// Updates with vectors of 8 floats; see [Note: one file per instruction set] in kernels.hpp.
#include "tieroff/update/kernels.hpp"

#ifdef TIEROFF_UPDATES_ON_X86
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif

namespace tieroff {
namespace {

struct EightLanes {
  using F = __m256;
  struct D {
    __m256d low, high;
  };
  static constexpr std::size_t kWidth = 8;

  static F load(const float* at) { return _mm256_loadu_ps(at); }
  static void store(float* at, F x) { _mm256_storeu_ps(at, x); }
  static F load(const Bfloat16* at) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
  }
  static void store(Bfloat16* at, F x) {
    const __m256i halves = _mm256_srli_epi32(raised(x), 16);
    const __m256i is_none = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i kept = _mm256_blendv_epi8(halves, _mm256_set1_epi32(0x7fc0), is_none);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(at),
                     _mm_packus_epi32(_mm256_castsi256_si128(kept), _mm256_extracti128_si256(kept, 1)));
  }
  static void store_rounded(Bfloat16* at, F x) {
    const __m256i halves = _mm256_srli_epi32(_mm256_castps_si256(x), 16);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(at),
                     _mm_packus_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1)));
  }
  static F rounded(F x) {
    return _mm256_castsi256_ps(_mm256_and_si256(raised(x), _mm256_set1_epi32(static_cast<int>(0xffff0000U))));
  }
  static F set(float x) { return _mm256_set1_ps(x); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F div(F a, F b) { return _mm256_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F root(F x) { return _mm256_sqrt_ps(x); }
  static F negated(F x) { return _mm256_xor_ps(x, _mm256_set1_ps(-0.0F)); }
  static F sign(F x) {
    const F zero = _mm256_setzero_ps();
    const F positive = _mm256_and_ps(_mm256_cmp_ps(x, zero, _CMP_GT_OQ), _mm256_set1_ps(1.0F));
    return _mm256_or_ps(positive, _mm256_and_ps(_mm256_cmp_ps(x, zero, _CMP_LT_OQ), _mm256_set1_ps(-1.0F)));
  }
  static F maximum(F a, F b) {  // max_ps gives the second where one is no number
    return _mm256_blendv_ps(_mm256_max_ps(a, b), a, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  }
  static F larger(F a, F b) { return _mm256_max_ps(b, a); }

  static D wide(F x) {
    return {_mm256_cvtps_pd(_mm256_castps256_ps128(x)), _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1))};
  }
  static F narrow(D x) { return _mm256_set_m128(_mm256_cvtpd_ps(x.high), _mm256_cvtpd_ps(x.low)); }
  static D set(double x) { return {_mm256_set1_pd(x), _mm256_set1_pd(x)}; }
  static D add(D a, D b) { return {_mm256_add_pd(a.low, b.low), _mm256_add_pd(a.high, b.high)}; }
  static D mul(D a, D b) { return {_mm256_mul_pd(a.low, b.low), _mm256_mul_pd(a.high, b.high)}; }
  static D fma(D a, D b, D c) {
    return {_mm256_fmadd_pd(a.low, b.low, c.low), _mm256_fmadd_pd(a.high, b.high, c.high)};
  }

 private:
  // The bits, such that what is cut off below rounds to even.
  static __m256i raised(F x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  }
};

}  // namespace
}  // namespace tieroff

#include "tieroff/update/rules.hpp"

namespace tieroff {

void update_avx2(const UpdatePart& part, std::int64_t first, std::int64_t count) { update_with<EightLanes>(part, first, count); }

}  // namespace tieroff

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
