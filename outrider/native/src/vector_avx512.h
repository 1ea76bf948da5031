// 16 lanes in one register: AVX-512 with VNNI.
#pragma once
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

typedef __m512 F;
typedef __m512i I;
typedef __m512i B;
constexpr int BYTE_ZERO = 128;  // `dot` of 8-bit levels takes them as they are
constexpr int QUERIES = 4;  // whose sums of 4 vectors fit the registers

INLINE F load(const float* p) { return _mm512_loadu_ps(p); }
INLINE F load_n(const float* p, int n) { return _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p); }
INLINE void store(float* p, F v) { _mm512_storeu_ps(p, v); }
INLINE void store_n(float* p, F v, int n) { _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), v); }
INLINE F set1(float v) { return _mm512_set1_ps(v); }
INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
INLINE F sub(F a, F b) { return _mm512_sub_ps(a, b); }
INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
INLINE F div(F a, F b) { return _mm512_div_ps(a, b); }
INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
INLINE F max(F a, F b) { return _mm512_max_ps(a, b); }  // b where either is NaN
INLINE F min(F a, F b) { return _mm512_min_ps(a, b); }
INLINE F absolute(F a) { return _mm512_abs_ps(a); }
INLINE F nearest(F a) { return _mm512_roundscale_ps(a, 0); }
INLINE F zero_below(F x, float bound, F v) {  // 0 in lanes where x < bound
    return _mm512_mask_mov_ps(v, _mm512_cmp_ps_mask(x, set1(bound), _CMP_LT_OQ), _mm512_setzero_ps());
}
INLINE F power2(F n) {  // 2^n of whole n in -126 to 127
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
INLINE float sum_lanes(F v) { return _mm512_reduce_add_ps(v); }
INLINE void sum_lanes_of_4(const F* v, float* sums) {  // each by halves
    F two = add(_mm512_shuffle_f32x4(v[0], v[1], 0x44), _mm512_shuffle_f32x4(v[0], v[1], 0xEE));
    F others = add(_mm512_shuffle_f32x4(v[2], v[3], 0x44), _mm512_shuffle_f32x4(v[2], v[3], 0xEE));
    F four = add(_mm512_shuffle_f32x4(two, others, 0x88), _mm512_shuffle_f32x4(two, others, 0xDD));
    four = add(four, _mm512_permute_ps(four, 0x4E));
    four = add(four, _mm512_permute_ps(four, 0xB1));
    _mm_storeu_ps(sums, _mm512_castps512_ps128(_mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12), four)));
}
INLINE float max_lane(F v) { return _mm512_reduce_max_ps(v); }
INLINE F load_f16(const uint8_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
INLINE F load_bf16(const uint8_t* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
INLINE F load_u8(const uint8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
INLINE I load_i8(const uint8_t* p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)); }
INLINE I whole(F v) { return _mm512_cvtps_epi32(v); }  // to nearest
// The 32 numbers of a block, and the sums of its halves.
INLINE void store_block(int8_t* p, I low, I high, int32_t* sums) {
    __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm512_cvtepi32_epi8(low)), _mm512_cvtepi32_epi8(high), 1);
    _mm256_storeu_si256((__m256i*)p, both);
    __m256i fours = _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(1), both);
    fours = _mm256_add_epi32(fours, _mm256_shuffle_epi32(fours, 0x4E));
    fours = _mm256_add_epi32(fours, _mm256_shuffle_epi32(fours, 0xB1));
    sums[0] = _mm256_cvtsi256_si32(fours), sums[1] = _mm256_extract_epi32(fours, 4);
}
INLINE I set1_i(int32_t v) { return _mm512_set1_epi32(v); }
INLINE I add_i(I a, I b) { return _mm512_add_epi32(a, b); }
INLINE I mul_i(I a, I b) { return _mm512_mullo_epi32(a, b); }
INLINE F to_float(I v) { return _mm512_cvtepi32_ps(v); }
constexpr int32_t SUM_START = 0;
INLINE F sum_to_float(I v) { return to_float(v); }  // of a sum that began with SUM_START, below 2^22

INLINE B bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
INLINE B low_half(B v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
INLINE B high_half(B v) { return _mm512_and_si512(_mm512_srli_epi16(v, 4), _mm512_set1_epi8(15)); }
// level | (plane >> shift & mask) << 4 in each byte, mask of bits that do not cross bytes
template <int SHIFT, int MASK> INLINE B with_bits(B level, B plane) {
    B placed = SHIFT < 4 ? _mm512_slli_epi16(plane, 4 - SHIFT) : _mm512_srli_epi16(plane, SHIFT - 4);
    return _mm512_ternarylogic_epi32(level, placed, _mm512_set1_epi8((char)(MASK << 4)), 0xF8);  // a | (b & c)
}
typedef const int8_t* Sixteen;  // of a row
INLINE Sixteen sixteen(const int8_t* p) { return p; }
template <int FOUR> INLINE I dot(I sum, B levels, Sixteen x) {
    int32_t four;
    memcpy(&four, x + 4 * FOUR, 4);
    return _mm512_dpbusd_epi32(sum, levels, _mm512_set1_epi32(four));
}
template <int FOUR> INLINE I dot8(I sum, B levels, Sixteen x) { return dot<FOUR>(sum, levels, x); }
