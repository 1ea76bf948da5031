// 16 lanes in four registers: NEON, with its product of four bytes (dotprod) where that is compiled for.
#pragma once
#include <arm_neon.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define EACH(expression)                        \
    do {                                        \
        _Pragma("GCC unroll 4")                 \
        for (int i = 0; i < 4; i++) expression; \
    } while (0)

struct F { float32x4_t v[4]; };
struct I { int32x4_t v[4]; };
struct B { uint8x16_t v[4]; };
constexpr int BYTE_ZERO = 0;  // `dot8` takes 128 off
constexpr int QUERIES = 1;  // whose sums of 4 vectors fit the registers
constexpr int QUANTIZED_ROWS = 1;  // that are rounded to 8 bits together

INLINE F load(const float* p) { F r; EACH(r.v[i] = vld1q_f32(p + 4 * i)); return r; }
INLINE F load_n(const float* p, int n) { float lanes[16] = {}; memcpy(lanes, p, 4 * n); return load(lanes); }
INLINE void store(float* p, F v) { EACH(vst1q_f32(p + 4 * i, v.v[i])); }
INLINE void store_n(float* p, F v, int n) { float lanes[16]; store(lanes, v); memcpy(p, lanes, 4 * n); }
INLINE F set1(float v) { F r; EACH(r.v[i] = vdupq_n_f32(v)); return r; }
INLINE F add(F a, F b) { EACH(a.v[i] = vaddq_f32(a.v[i], b.v[i])); return a; }
INLINE F sub(F a, F b) { EACH(a.v[i] = vsubq_f32(a.v[i], b.v[i])); return a; }
INLINE F mul(F a, F b) { EACH(a.v[i] = vmulq_f32(a.v[i], b.v[i])); return a; }
INLINE F div(F a, F b) { EACH(a.v[i] = vdivq_f32(a.v[i], b.v[i])); return a; }
INLINE F fma(F a, F b, F c) { EACH(c.v[i] = vfmaq_f32(c.v[i], a.v[i], b.v[i])); return c; }
INLINE F max(F a, F b) { EACH(b.v[i] = vbslq_f32(vcgtq_f32(a.v[i], b.v[i]), a.v[i], b.v[i])); return b; }  // b where either is NaN
INLINE F min(F a, F b) { EACH(b.v[i] = vbslq_f32(vcltq_f32(a.v[i], b.v[i]), a.v[i], b.v[i])); return b; }
INLINE F absolute(F a) { EACH(a.v[i] = vabsq_f32(a.v[i])); return a; }
INLINE F nearest(F a) { EACH(a.v[i] = vrndnq_f32(a.v[i])); return a; }
INLINE F zero_below(F x, float bound, F v) {
    EACH(v.v[i] = vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(v.v[i]), vcltq_f32(x.v[i], vdupq_n_f32(bound)))));
    return v;
}
INLINE F power2(F n) {
    EACH(n.v[i] = vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n.v[i]), vdupq_n_s32(127)), 23)));
    return n;
}
INLINE float sum_lanes(F v) {  // by halves, as the others do
    float32x4_t four = vaddq_f32(vaddq_f32(v.v[0], v.v[2]), vaddq_f32(v.v[1], v.v[3]));
    float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
INLINE void sum_lanes_of_4(const F* v, float* sums) {
    float32x4_t four[4], pairs[2];
    EACH(four[i] = vaddq_f32(vaddq_f32(v[i].v[0], v[i].v[2]), vaddq_f32(v[i].v[1], v[i].v[3])));
    for (int i = 0; i < 2; i++) {
        float64x2_t a = vreinterpretq_f64_f32(four[2 * i]), b = vreinterpretq_f64_f32(four[2 * i + 1]);
        pairs[i] = vaddq_f32(vreinterpretq_f32_f64(vzip1q_f64(a, b)), vreinterpretq_f32_f64(vzip2q_f64(a, b)));
    }
    vst1q_f32(sums, vpaddq_f32(pairs[0], pairs[1]));
}
INLINE float max_lane(F v) { return vmaxvq_f32(vmaxq_f32(vmaxq_f32(v.v[0], v.v[1]), vmaxq_f32(v.v[2], v.v[3]))); }
INLINE F load_f16(const uint8_t* p) {
    F r;
    EACH(r.v[i] = vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p + 8 * i))));
    return r;
}
INLINE F load_bf16(const uint8_t* p) {
    F r;
    EACH(r.v[i] = vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(p + 8 * i)), 16)));
    return r;
}
INLINE F load_u8(const uint8_t* p) {
    uint8x16_t v = vld1q_u8(p);
    uint16x8_t low = vmovl_u8(vget_low_u8(v)), high = vmovl_u8(vget_high_u8(v));
    return {{vcvtq_f32_u32(vmovl_u16(vget_low_u16(low))), vcvtq_f32_u32(vmovl_u16(vget_high_u16(low))),
             vcvtq_f32_u32(vmovl_u16(vget_low_u16(high))), vcvtq_f32_u32(vmovl_u16(vget_high_u16(high)))}};
}
INLINE I load_i8(const uint8_t* p) {
    int8x16_t v = vreinterpretq_s8_u8(vld1q_u8(p));
    int16x8_t low = vmovl_s8(vget_low_s8(v)), high = vmovl_s8(vget_high_s8(v));
    return {{vmovl_s16(vget_low_s16(low)), vmovl_s16(vget_high_s16(low)), vmovl_s16(vget_low_s16(high)), vmovl_s16(vget_high_s16(high))}};
}
INLINE I whole(F v) { I r; EACH(r.v[i] = vcvtnq_s32_f32(v.v[i])); return r; }
INLINE void store_i8(int8_t* p, I v) {
    int16x8_t low = vcombine_s16(vmovn_s32(v.v[0]), vmovn_s32(v.v[1])), high = vcombine_s16(vmovn_s32(v.v[2]), vmovn_s32(v.v[3]));
    vst1q_s8(p, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
}
INLINE int32_t sum_lanes_i(I v) { return vaddvq_s32(vaddq_s32(vaddq_s32(v.v[0], v.v[1]), vaddq_s32(v.v[2], v.v[3]))); }
// The 32 numbers of a block, and the sums of its halves.
INLINE void store_block(int8_t* p, I low, I high, int32_t* sums) {
    store_i8(p, low), store_i8(p + 16, high);
    sums[0] = sum_lanes_i(low), sums[1] = sum_lanes_i(high);
}
INLINE I set1_i(int32_t v) { I r; EACH(r.v[i] = vdupq_n_s32(v)); return r; }
INLINE I add_i(I a, I b) { EACH(a.v[i] = vaddq_s32(a.v[i], b.v[i])); return a; }
INLINE I mul_i(I a, I b) { EACH(a.v[i] = vmulq_s32(a.v[i], b.v[i])); return a; }
INLINE F to_float(I v) { F r; EACH(r.v[i] = vcvtq_f32_s32(v.v[i])); return r; }
// Of a sum below 2^22 that began with SUM_START, the bits of 1.5 * 2^23: read as a float it is that number too large.
// A conversion takes four times as long.
constexpr int32_t SUM_START = 0x4B400000;
INLINE F sum_to_float(I v) { F r; EACH(r.v[i] = vsubq_f32(vreinterpretq_f32_s32(v.v[i]), vdupq_n_f32(12582912.0f))); return r; }

INLINE B bytes(const uint8_t* p) { B r; EACH(r.v[i] = vld1q_u8(p + 16 * i)); return r; }
INLINE B low_half(B v) { EACH(v.v[i] = vandq_u8(v.v[i], vdupq_n_u8(15))); return v; }
INLINE B high_half(B v) { EACH(v.v[i] = vshrq_n_u8(v.v[i], 4)); return v; }
template <int SHIFT, int MASK> INLINE B with_bits(B level, B plane) {
    if constexpr (SHIFT > 0) EACH(plane.v[i] = vshrq_n_u8(plane.v[i], SHIFT));
    EACH(level.v[i] = vorrq_u8(level.v[i], vshlq_n_u8(vandq_u8(plane.v[i], vdupq_n_u8(MASK)), 4)));
    return level;
}
typedef int8x16_t Sixteen;  // of a row
INLINE Sixteen sixteen(const int8_t* p) { return vld1q_s8(p); }
template <int FOUR> INLINE int32x4_t dot_quarter(int32x4_t sum, int8x16_t w, Sixteen x) {
#ifdef __ARM_FEATURE_DOTPROD
    return vdotq_laneq_s32(sum, w, x, FOUR);
#else
    int8x8_t four = vreinterpret_s8_s32(vdup_laneq_s32(vreinterpretq_s32_s8(x), FOUR));
    int16x8_t low = vmull_s8(vget_low_s8(w), four), high = vmull_s8(vget_high_s8(w), four);
    return vaddq_s32(sum, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
#endif
}
template <int FOUR> INLINE I dot(I sum, B levels, Sixteen x) {  // levels of up to 7 bits
    EACH(sum.v[i] = dot_quarter<FOUR>(sum.v[i], vreinterpretq_s8_u8(levels.v[i]), x));
    return sum;
}
template <int FOUR> INLINE I dot8(I sum, B levels, Sixteen x) {
    EACH(levels.v[i] = veorq_u8(levels.v[i], vdupq_n_u8(128)));
    return dot<FOUR>(sum, levels, x);
}
