// 16 lanes in two registers: AVX2 with FMA and F16C.
#pragma once
#include <immintrin.h>
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))

struct F { __m256 a, b; };
struct I { __m256i a, b; };
struct B { __m256i a, b; };
constexpr int BYTE_ZERO = 0;  // `dot8` takes 128 off
constexpr int QUERIES = 1;  // whose sums of 4 vectors fit the registers
constexpr int QUANTIZED_ROWS = 1;  // that are rounded to 8 bits together

INLINE __m256i lanes_below(int n) { return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)); }
INLINE F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE F load_n(const float* p, int n) {
    return {_mm256_maskload_ps(p, lanes_below(n)), _mm256_maskload_ps(p + 8, lanes_below(n - 8))};
}
INLINE void store(float* p, F v) { _mm256_storeu_ps(p, v.a), _mm256_storeu_ps(p + 8, v.b); }
INLINE void store_n(float* p, F v, int n) {
    _mm256_maskstore_ps(p, lanes_below(n), v.a), _mm256_maskstore_ps(p + 8, lanes_below(n - 8), v.b);
}
INLINE F set1(float v) { return {_mm256_set1_ps(v), _mm256_set1_ps(v)}; }
INLINE F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
INLINE F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
INLINE F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
INLINE F div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
INLINE F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
INLINE F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
INLINE F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
INLINE F absolute(F x) {
    __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
INLINE F nearest(F x) { return {_mm256_round_ps(x.a, 8), _mm256_round_ps(x.b, 8)}; }
INLINE F zero_below(F x, float bound, F v) {
    __m256 low = _mm256_set1_ps(bound);
    return {_mm256_andnot_ps(_mm256_cmp_ps(x.a, low, _CMP_LT_OQ), v.a), _mm256_andnot_ps(_mm256_cmp_ps(x.b, low, _CMP_LT_OQ), v.b)};
}
INLINE __m256 power2_half(__m256 n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
INLINE F power2(F n) { return {power2_half(n.a), power2_half(n.b)}; }
INLINE float sum_lanes(F v) {
    __m256 half = _mm256_add_ps(v.a, v.b);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
INLINE void sum_lanes_of_4(const F* v, float* sums) {
    __m256 a = _mm256_add_ps(v[0].a, v[0].b), b = _mm256_add_ps(v[1].a, v[1].b);
    __m256 c = _mm256_add_ps(v[2].a, v[2].b), d = _mm256_add_ps(v[3].a, v[3].b);
    __m256 ab = _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
    __m256 cd = _mm256_add_ps(_mm256_permute2f128_ps(c, d, 0x20), _mm256_permute2f128_ps(c, d, 0x31));
    __m256 pairs = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xEE));  // a and c, b and d
    pairs = _mm256_add_ps(_mm256_permute_ps(pairs, 0x08), _mm256_permute_ps(pairs, 0x0D));
    _mm_storeu_ps(sums, _mm_unpacklo_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
}
INLINE float max_lane(F v) {
    __m256 half = _mm256_max_ps(v.a, v.b);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}
INLINE F load_f16(const uint8_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 16)))};
}
INLINE __m256 wide_bf16(const uint8_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
INLINE F load_bf16(const uint8_t* p) { return {wide_bf16(p), wide_bf16(p + 16)}; }
INLINE F load_u8(const uint8_t* p) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p))),
            _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8))))};
}
INLINE I load_i8(const uint8_t* p) {
    return {_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)), _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8)))};
}
INLINE I whole(F v) { return {_mm256_cvtps_epi32(v.a), _mm256_cvtps_epi32(v.b)}; }
INLINE void store_i8(int8_t* p, I v) {
    int32_t lanes[16];
    _mm256_storeu_si256((__m256i*)lanes, v.a), _mm256_storeu_si256((__m256i*)(lanes + 8), v.b);
    for (int i = 0; i < 16; i++) p[i] = (int8_t)lanes[i];
}
INLINE int32_t sum_lanes_i(I v) {
    int32_t lanes[8], sum = 0;
    _mm256_storeu_si256((__m256i*)lanes, _mm256_add_epi32(v.a, v.b));
    for (int i = 0; i < 8; i++) sum += lanes[i];
    return sum;
}
// The 32 numbers of a block, and the sums of its halves.
INLINE void store_block(int8_t* p, I low, I high, int32_t* sums) {
    store_i8(p, low), store_i8(p + 16, high);
    sums[0] = sum_lanes_i(low), sums[1] = sum_lanes_i(high);
}
INLINE I set1_i(int32_t v) { return {_mm256_set1_epi32(v), _mm256_set1_epi32(v)}; }
INLINE I add_i(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
INLINE I mul_i(I x, I y) { return {_mm256_mullo_epi32(x.a, y.a), _mm256_mullo_epi32(x.b, y.b)}; }
INLINE F to_float(I v) { return {_mm256_cvtepi32_ps(v.a), _mm256_cvtepi32_ps(v.b)}; }
constexpr int32_t SUM_START = 0;
INLINE F sum_to_float(I v) { return to_float(v); }  // of a sum that began with SUM_START, below 2^22

INLINE B bytes(const uint8_t* p) { return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))}; }
INLINE B low_half(B v) { return {_mm256_and_si256(v.a, _mm256_set1_epi8(15)), _mm256_and_si256(v.b, _mm256_set1_epi8(15))}; }
INLINE B high_half(B v) { return low_half({_mm256_srli_epi16(v.a, 4), _mm256_srli_epi16(v.b, 4)}); }
template <int SHIFT, int MASK> INLINE __m256i with_bits_half(__m256i level, __m256i plane) {
    __m256i placed = SHIFT < 4 ? _mm256_slli_epi16(plane, SHIFT < 4 ? 4 - SHIFT : 0) : _mm256_srli_epi16(plane, SHIFT < 4 ? 0 : SHIFT - 4);
    return _mm256_or_si256(level, _mm256_and_si256(placed, _mm256_set1_epi8((char)(MASK << 4))));
}
template <int SHIFT, int MASK> INLINE B with_bits(B level, B plane) {
    return {with_bits_half<SHIFT, MASK>(level.a, plane.a), with_bits_half<SHIFT, MASK>(level.b, plane.b)};
}
// Pairs of products must fit 16 bits: levels of up to 6 bits do.
INLINE __m256i dot_half(__m256i sum, __m256i levels, __m256i four) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(levels, four), _mm256_set1_epi16(1)));
}
typedef const int8_t* Sixteen;  // of a row
INLINE Sixteen sixteen(const int8_t* p) { return p; }
INLINE __m256i four_at(const int8_t* p) {
    int32_t four;
    memcpy(&four, p, 4);
    return _mm256_set1_epi32(four);
}
template <int FOUR> INLINE I dot(I sum, B levels, Sixteen x) {
    __m256i four = four_at(x + 4 * FOUR);
    return {dot_half(sum.a, levels.a, four), dot_half(sum.b, levels.b, four)};
}
// 8-bit levels: their distance from 128, whose size goes on one side and whose sign on the other.
INLINE __m256i dot8_half(__m256i sum, __m256i levels, __m256i four) {
    __m256i w = _mm256_xor_si256(levels, _mm256_set1_epi8((char)0x80));
    return dot_half(sum, _mm256_abs_epi8(w), _mm256_sign_epi8(four, w));
}
template <int FOUR> INLINE I dot8(I sum, B levels, Sixteen x) {
    __m256i four = four_at(x + 4 * FOUR);
    return {dot8_half(sum.a, levels.a, four), dot8_half(sum.b, levels.b, four)};
}
