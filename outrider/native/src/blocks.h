// Storage types: how a file's blocks are laid out, and how their weights lie in memory.
//
// In memory a tensor is strips of 16 rows. A strip is tiles of 32 columns, one after another: all that is needed of 16
// outputs for 32 inputs lies side by side, and one vector register holds one value of each of the 16 rows.
// Levels (a weight is d * (level - zero) + m) are unsigned. Columns come in groups of 4: byte 4 * row + c of a group's
// 64 bytes is column 4 * group + c.
//   levels of 4 bits: 4 x 64 bytes; byte j of the i-th holds group i in its low half and group i + 4 in its high half
//   bits above those: 5-bit levels 64 bytes, bit g is of group g; 6-bit levels 2 x 64 bytes, two bits a group
//   levels of 8 bits: 8 x 64 bytes
//   behind them the scales of the 16 rows, as ScaleStyle says
// Floats are 16 rows of one column side by side.
#pragma once
#include <stdint.h>

enum Kind : int32_t {  // numbers as in ggml, but for our own from 100 on
    F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8,
    Q4_K = 12, Q5_K = 13, Q6_K = 14, BF16 = 30,
    INT4 = 100,  // 32 levels of a byte each, d and m in bf16: d * (level - 8) + m
    INT8 = 101,  // 32 levels of a byte each, signed, d in bf16
};

enum ScaleStyle : int32_t {
    NO_SCALES,
    ONE_F16,    // d
    TWO_F16,    // d, m
    ONE_BF16,   // d
    TWO_BF16,   // d, m
    SUPER,      // a byte for d and one for m a block; before each 8 tiles d and dmin in f16
    SUPER_6,    // a signed byte for each 16 columns; before each 8 tiles d in f16
};

enum { STRIP = 16, BLOCK = 32, SUPER_BLOCKS = 8 };

struct KindInfo {
    int32_t kind, bits;
    ScaleStyle style;
    int32_t zero;
    int32_t block_columns, block_bytes;  // in the file
};

constexpr KindInfo KINDS[] = {
    {F32, 32, NO_SCALES, 0, 1, 4},      {F16, 16, NO_SCALES, 0, 1, 2},     {BF16, 16, NO_SCALES, 0, 1, 2},
    {Q4_0, 4, ONE_F16, 8, 32, 18},      {Q4_1, 4, TWO_F16, 0, 32, 20},     {Q5_0, 5, ONE_F16, 16, 32, 22},
    {Q5_1, 5, TWO_F16, 0, 32, 24},      {Q8_0, 8, ONE_F16, 128, 32, 34},   {Q4_K, 4, SUPER, 0, 256, 144},
    {Q5_K, 5, SUPER, 0, 256, 176},      {Q6_K, 6, SUPER_6, 32, 256, 210},  {INT4, 4, TWO_BF16, 8, 32, 36},
    {INT8, 8, ONE_BF16, 128, 32, 34},
};

constexpr const KindInfo* kind_info(int32_t kind) {
    for (const KindInfo& info : KINDS)
        if (info.kind == kind) return &info;
    return nullptr;
}

constexpr int64_t level_bytes(int bits) { return bits == 8 ? 512 : bits == 6 ? 384 : bits == 5 ? 320 : 256; }

constexpr int64_t scale_bytes(ScaleStyle style) {
    return style == ONE_F16 || style == ONE_BF16 ? 2 * STRIP : style == TWO_F16 || style == TWO_BF16 ? 4 * STRIP : 2 * STRIP;
}

constexpr int64_t header_bytes(ScaleStyle style) { return style == SUPER ? 4 * STRIP : style == SUPER_6 ? 2 * STRIP : 0; }

struct Tensor {
    const KindInfo* info;
    int64_t rows, columns;   // columns as the caller gives them: of quantised kinds a multiple of 32
    int64_t strips, strip_bytes;
    uint8_t* data;           // strips * strip_bytes, aligned to 64
};

constexpr bool is_float(const KindInfo* info) { return info->style == NO_SCALES; }

constexpr int64_t strip_size(const KindInfo* info, int64_t columns) {
    if (is_float(info)) return columns * STRIP * (info->bits / 8);
    int64_t blocks = columns / BLOCK;
    return blocks * (level_bytes(info->bits) + scale_bytes(info->style)) + blocks / SUPER_BLOCKS * header_bytes(info->style);
}
