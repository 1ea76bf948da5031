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
constexpr int QUANTIZED_ROWS = 4;  // that are rounded to 8 bits together

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
INLINE __m128 first_of_lanes(F v) {  // the first number of each 128 bits
    return _mm512_castps512_ps128(_mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12), v));
}
INLINE void sum_lanes_of_4(const F* v, float* sums) {  // each by halves
    F two = add(_mm512_shuffle_f32x4(v[0], v[1], 0x44), _mm512_shuffle_f32x4(v[0], v[1], 0xEE));
    F others = add(_mm512_shuffle_f32x4(v[2], v[3], 0x44), _mm512_shuffle_f32x4(v[2], v[3], 0xEE));
    F four = add(_mm512_shuffle_f32x4(two, others, 0x88), _mm512_shuffle_f32x4(two, others, 0xDD));
    four = add(four, _mm512_permute_ps(four, 0x4E));
    four = add(four, _mm512_permute_ps(four, 0xB1));
    _mm_storeu_ps(sums, first_of_lanes(four));
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
INLINE I add_i(I a, I b) { return _mm512_add_epi32(a, b); }
// The 32 numbers of a block, and the sums of its halves.
INLINE void store_block(int8_t* p, I low, I high, int32_t* sums) {
    __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm512_cvtepi32_epi8(low)), _mm512_cvtepi32_epi8(high), 1);
    _mm256_storeu_si256((__m256i*)p, both);
    __m256i fours = _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(1), both);
    fours = _mm256_add_epi32(fours, _mm256_shuffle_epi32(fours, 0x4E));
    fours = _mm256_add_epi32(fours, _mm256_shuffle_epi32(fours, 0xB1));
    sums[0] = _mm256_cvtsi256_si32(fours), sums[1] = _mm256_extract_epi32(fours, 4);
}
// One block of four rows that lie side by side, as quantize_block of one row: what it does once, that of one does four times.
INLINE void quantize_block(Rows* rows, int64_t at, const F (&low)[4], const F (&high)[4]) {
    F v[4];
    for (int r = 0; r < 4; r++) v[r] = max(absolute(low[r]), absolute(high[r]));
    F two = max(_mm512_shuffle_f32x4(v[0], v[1], 0x44), _mm512_shuffle_f32x4(v[0], v[1], 0xEE));
    F others = max(_mm512_shuffle_f32x4(v[2], v[3], 0x44), _mm512_shuffle_f32x4(v[2], v[3], 0xEE));
    F most = max(_mm512_shuffle_f32x4(two, others, 0x88), _mm512_shuffle_f32x4(two, others, 0xDD));
    most = max(most, _mm512_permute_ps(most, 0x4E));
    most = max(most, _mm512_permute_ps(most, 0xB1));  // of row r in the r-th 128 bits, four times
    F scales = _mm512_maskz_div_ps(_mm512_cmp_ps_mask(most, set1(MIN_LARGEST), _CMP_GT_OQ), set1(127.0f), most);
    F scale[4] = {_mm512_shuffle_f32x4(scales, scales, 0x00), _mm512_shuffle_f32x4(scales, scales, 0x55),
                  _mm512_shuffle_f32x4(scales, scales, 0xAA), _mm512_shuffle_f32x4(scales, scales, 0xFF)};
    const I order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), ones = _mm512_set1_epi8(1);
    I total[2];  // of two rows each: number i of every 128 bits is of half i of the two
    for (int i = 0; i < 2; i++) {
        I words[2];
        for (int r = 0; r < 2; r++)
            words[r] = _mm512_packs_epi32(whole(mul(low[2 * i + r], scale[2 * i + r])), whole(mul(high[2 * i + r], scale[2 * i + r])));
        I q = _mm512_packs_epi16(words[0], words[1]);
        _mm512_storeu_si512(rows->q + (at + 2 * i) * BLOCK, _mm512_permutexvar_epi32(order, q));
        total[i] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), ones, q);
    }
    I halves = add_i(_mm512_shuffle_i32x4(total[0], total[1], 0x44), _mm512_shuffle_i32x4(total[0], total[1], 0xEE));
    halves = add_i(_mm512_shuffle_i32x4(halves, halves, 0x08), _mm512_shuffle_i32x4(halves, halves, 0x0D));
    _mm256_storeu_si256((__m256i*)(rows->sums + 2 * at), _mm512_castsi512_si256(halves));
    __m128i sums = _mm512_castsi512_si128(_mm512_permutexvar_epi32(_mm512_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6, 0, 2, 4, 6, 0, 2, 4, 6),
                                                                   add_i(halves, _mm512_srli_epi64(halves, 32))));
    __m128 d = _mm_div_ps(first_of_lanes(most), _mm_set1_ps(127.0f));
    _mm_storeu_ps(rows->d + at, d);
    _mm_storeu_ps(rows->d_sums + at, _mm_mul_ps(d, _mm_cvtepi32_ps(sums)));
    _mm_storeu_si128((__m128i*)(rows->zeros + at), _mm_sub_epi32(_mm_setzero_si128(), _mm_slli_epi32(sums, 7)));
}
INLINE I set1_i(int32_t v) { return _mm512_set1_epi32(v); }
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
// One instruction, which repeats the four numbers by itself: of the intrinsic GCC makes two, and rows wait for those.
template <int FOUR> INLINE I dot(I sum, B levels, Sixteen x) {
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(levels), "m"(*(const int8_t(*)[4])(x + 4 * FOUR)));
    return sum;
}
template <int FOUR> INLINE I dot8(I sum, B levels, Sixteen x) { return dot<FOUR>(sum, levels, x); }
