// 16 lanes as arrays: any processor. The reference of the others.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline
#define LANES(expression)                        \
    do {                                         \
        for (int i = 0; i < 16; i++) expression; \
    } while (0)

struct F { float v[16]; };
struct I { int32_t v[16]; };
struct B { uint8_t v[64]; };
constexpr int BYTE_ZERO = 128;
constexpr int QUERIES = 1;  // whose sums of 4 vectors fit the registers
constexpr int QUANTIZED_ROWS = 1;  // that are rounded to 8 bits together

INLINE F load(const float* p) { F r; memcpy(r.v, p, 64); return r; }
INLINE F load_n(const float* p, int n) { F r = {}; memcpy(r.v, p, 4 * n); return r; }
INLINE void store(float* p, F v) { memcpy(p, v.v, 64); }
INLINE void store_n(float* p, F v, int n) { memcpy(p, v.v, 4 * n); }
INLINE F set1(float v) { F r; LANES(r.v[i] = v); return r; }
INLINE F add(F a, F b) { LANES(a.v[i] += b.v[i]); return a; }
INLINE F sub(F a, F b) { LANES(a.v[i] -= b.v[i]); return a; }
INLINE F mul(F a, F b) { LANES(a.v[i] *= b.v[i]); return a; }
INLINE F div(F a, F b) { LANES(a.v[i] /= b.v[i]); return a; }
#if defined(FP_FAST_FMAF) || defined(__FMA__)
INLINE F fma(F a, F b, F c) { LANES(a.v[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i])); return a; }
#else  // a call for each of them would be far slower
INLINE F fma(F a, F b, F c) { LANES(a.v[i] = a.v[i] * b.v[i] + c.v[i]); return a; }
#endif
INLINE F max(F a, F b) { LANES(b.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]); return b; }
INLINE F min(F a, F b) { LANES(b.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]); return b; }
INLINE F absolute(F a) { LANES(a.v[i] = fabsf(a.v[i])); return a; }
INLINE F nearest(F a) { LANES(a.v[i] = rintf(a.v[i])); return a; }
INLINE F zero_below(F x, float bound, F v) { LANES(v.v[i] = x.v[i] < bound ? 0 : v.v[i]); return v; }
INLINE F power2(F n) {
    LANES({ int32_t bits = (int32_t)((uint32_t)((n.v[i] == n.v[i] ? (int32_t)n.v[i] : 0) + 127) << 23); memcpy(&n.v[i], &bits, 4); });
    return n;
}
INLINE float sum_lanes(F v) {  // by halves, as the others do
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) v.v[i] += v.v[i + half];
    return v.v[0];
}
INLINE void sum_lanes_of_4(const F* v, float* sums) {
    for (int i = 0; i < 4; i++) sums[i] = sum_lanes(v[i]);
}
INLINE float max_lane(F v) {
    float most = v.v[0];
    LANES(most = v.v[i] > most ? v.v[i] : most);
    return most;
}
INLINE float wide_f16(uint16_t bits) {
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, exponent = bits >> 10 & 31, fraction = bits & 1023;
    if (exponent == 0) return (sign ? -1.0f : 1.0f) * (float)fraction * 0x1p-24f;
    uint32_t wide = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | fraction << 13;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}
INLINE F load_f16(const uint8_t* p) {
    F r;
    LANES({ uint16_t bits; memcpy(&bits, p + 2 * i, 2); r.v[i] = wide_f16(bits); });
    return r;
}
INLINE F load_bf16(const uint8_t* p) {
    F r;
    LANES({ uint16_t bits; memcpy(&bits, p + 2 * i, 2); uint32_t wide = (uint32_t)bits << 16; memcpy(&r.v[i], &wide, 4); });
    return r;
}
INLINE F load_u8(const uint8_t* p) { F r; LANES(r.v[i] = (float)p[i]); return r; }
INLINE I load_i8(const uint8_t* p) { I r; LANES(r.v[i] = (int8_t)p[i]); return r; }
INLINE I whole(F v) { I r; LANES(r.v[i] = v.v[i] == v.v[i] ? (int32_t)rintf(v.v[i]) : 0); return r; }
INLINE void store_i8(int8_t* p, I v) { LANES(p[i] = (int8_t)v.v[i]); }
INLINE int32_t sum_lanes_i(I v) { int32_t sum = 0; LANES(sum += v.v[i]); return sum; }
// The 32 numbers of a block, and the sums of its halves.
INLINE void store_block(int8_t* p, I low, I high, int32_t* sums) {
    store_i8(p, low), store_i8(p + 16, high);
    sums[0] = sum_lanes_i(low), sums[1] = sum_lanes_i(high);
}
INLINE I set1_i(int32_t v) { I r; LANES(r.v[i] = v); return r; }
INLINE I add_i(I a, I b) { LANES(a.v[i] += b.v[i]); return a; }
INLINE I mul_i(I a, I b) { LANES(a.v[i] *= b.v[i]); return a; }
INLINE F to_float(I v) { F r; LANES(r.v[i] = (float)v.v[i]); return r; }
constexpr int32_t SUM_START = 0;
INLINE F sum_to_float(I v) { return to_float(v); }  // of a sum that began with SUM_START, below 2^22

INLINE B bytes(const uint8_t* p) { B r; memcpy(r.v, p, 64); return r; }
INLINE B low_half(B v) { for (int i = 0; i < 64; i++) v.v[i] &= 15; return v; }
INLINE B high_half(B v) { for (int i = 0; i < 64; i++) v.v[i] >>= 4; return v; }
template <int SHIFT, int MASK> INLINE B with_bits(B level, B plane) {
    for (int i = 0; i < 64; i++) level.v[i] |= (plane.v[i] >> SHIFT & MASK) << 4;
    return level;
}
typedef const int8_t* Sixteen;  // of a row
INLINE Sixteen sixteen(const int8_t* p) { return p; }
template <int FOUR> INLINE I dot(I sum, B levels, Sixteen sixteen) {
    const int8_t* x = sixteen + 4 * FOUR;
    LANES(sum.v[i] += levels.v[4 * i] * x[0] + levels.v[4 * i + 1] * x[1] + levels.v[4 * i + 2] * x[2] + levels.v[4 * i + 3] * x[3]);
    return sum;
}
template <int FOUR> INLINE I dot8(I sum, B levels, Sixteen x) { return dot<FOUR>(sum, levels, x); }
