// Updates with vectors of 16 floats; see [Note: one file per instruction set] in kernels.hpp.
#include "tieroff/update/kernels.hpp"

#ifdef TIEROFF_UPDATES_ON_X86
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma"))), apply_to = function)
#else
// The compiler's own header initializes with themselves the vectors that its intrinsics leave undefined.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma")
#endif

namespace tieroff {
namespace {

struct SixteenLanes {
  using F = __m512;
  struct D {
    __m512d low, high;
  };
  static constexpr std::size_t kWidth = 16;

  static F load(const float* at) { return _mm512_loadu_ps(at); }
  static void store(float* at, F x) { _mm512_storeu_ps(at, x); }
  static F load(const Bfloat16* at) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
  }
  static void store(Bfloat16* at, F x) {
    const __m512i halves = _mm512_srli_epi32(raised(x), 16);
    const __m512i kept = _mm512_mask_mov_epi32(halves, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), _mm512_cvtepi32_epi16(kept));
  }
  static void store_rounded(Bfloat16* at, F x) {
    const __m512i halves = _mm512_srli_epi32(_mm512_castps_si512(x), 16);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), _mm512_cvtepi32_epi16(halves));
  }
  static F rounded(F x) {
    return _mm512_castsi512_ps(_mm512_and_si512(raised(x), _mm512_set1_epi32(static_cast<int>(0xffff0000U))));
  }
  static F set(float x) { return _mm512_set1_ps(x); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F root(F x) { return _mm512_sqrt_ps(x); }
  static F negated(F x) { return _mm512_xor_ps(x, _mm512_set1_ps(-0.0F)); }
  static F sign(F x) {
    const F zero = _mm512_setzero_ps();
    const F positive = _mm512_mask_mov_ps(zero, _mm512_cmp_ps_mask(x, zero, _CMP_GT_OQ), _mm512_set1_ps(1.0F));
    return _mm512_mask_mov_ps(positive, _mm512_cmp_ps_mask(x, zero, _CMP_LT_OQ), _mm512_set1_ps(-1.0F));
  }
  static F maximum(F a, F b) {  // max_ps gives the second where one is no number
    return _mm512_mask_mov_ps(_mm512_max_ps(a, b), _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), a);
  }
  static F larger(F a, F b) { return _mm512_max_ps(b, a); }

  static D wide(F x) {
    return {_mm512_cvtps_pd(_mm512_castps512_ps256(x)), _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1))};
  }
  static F narrow(D x) {
    return _mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvtpd_ps(x.low)), _mm512_cvtpd_ps(x.high), 1);
  }
  static D set(double x) { return {_mm512_set1_pd(x), _mm512_set1_pd(x)}; }
  static D add(D a, D b) { return {_mm512_add_pd(a.low, b.low), _mm512_add_pd(a.high, b.high)}; }
  static D mul(D a, D b) { return {_mm512_mul_pd(a.low, b.low), _mm512_mul_pd(a.high, b.high)}; }
  static D fma(D a, D b, D c) {
    return {_mm512_fmadd_pd(a.low, b.low, c.low), _mm512_fmadd_pd(a.high, b.high, c.high)};
  }

 private:
  // The bits, such that what is cut off below rounds to even.
  static __m512i raised(F x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __mmask16 is_odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000));
    return _mm512_add_epi32(bits, _mm512_mask_mov_epi32(_mm512_set1_epi32(0x7fff), is_odd, _mm512_set1_epi32(0x8000)));
  }
};

}  // namespace
}  // namespace tieroff

#include "tieroff/update/rules.hpp"

namespace tieroff {

void update_avx512(const UpdatePart& part, std::int64_t first, std::int64_t count) {
  update_with<SixteenLanes>(part, first, count);
}

}  // namespace tieroff

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
