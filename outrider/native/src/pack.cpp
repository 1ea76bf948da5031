// A file's blocks to tiles, and rows of tiles to floats.
#include <math.h>
#include <string.h>

#include "pack.h"

namespace {

struct Levels {  // one block of 32 columns of one row
    uint8_t level[BLOCK];
    uint16_t d, m;        // as stored: f16, or bf16 of our own kinds
    uint8_t sub_d, sub_m; // of super-blocks: their share of d and m; SUPER_6: of each half of the block
};

inline uint16_t half_at(const uint8_t* p) {
    uint16_t value;
    memcpy(&value, p, 2);
    return value;
}

void low_high(const uint8_t* packed, uint8_t* level) {  // 16 bytes: columns 0 to 15 in the low halves
    for (int i = 0; i < 16; i++) level[i] = packed[i] & 15, level[i + 16] = packed[i] >> 4;
}

struct SpreadBits {  // of[byte]: its bits as fifth bits of eight bytes, the lowest first
    uint64_t of[256] = {};
    constexpr SpreadBits() {
        for (int byte = 0; byte < 256; byte++)
            for (int i = 0; i < 8; i++) of[byte] |= (uint64_t)(byte >> i & 1) << (8 * i + 4);
    }
};
constexpr SpreadBits SPREAD;

void add_fifth_bit(const uint8_t* bits, uint8_t* level) {
    for (int i = 0; i < 4; i++) {
        uint64_t eight;
        memcpy(&eight, level + 8 * i, 8);
        eight |= SPREAD.of[bits[i]];
        memcpy(level + 8 * i, &eight, 8);
    }
}

void k_scale(const uint8_t* packed, int sub, Levels* out) {  // 12 bytes: 8 scales and 8 minima of 6 bits
    if (sub < 4) {
        out->sub_d = packed[sub] & 63, out->sub_m = packed[sub + 4] & 63;
    } else {
        out->sub_d = (packed[sub + 4] & 15) | (packed[sub - 4] >> 6 << 4);
        out->sub_m = (packed[sub + 4] >> 4) | (packed[sub] >> 6 << 4);
    }
}

void read_k(const uint8_t* block, int sub, const uint8_t* fifth, const uint8_t* low, Levels* out) {
    out->d = half_at(block), out->m = half_at(block + 2);
    k_scale(block + 4, sub, out);
    const uint8_t* packed = low + sub / 2 * 32;
    int shift = sub % 2 * 4;
    for (int i = 0; i < BLOCK; i++) out->level[i] = packed[i] >> shift & 15;
    for (int i = 0; fifth && i < BLOCK; i++) out->level[i] |= (fifth[i] >> sub & 1) << 4;
}

void read_q6(const uint8_t* block, int sub, Levels* out) {  // 128 low, 64 high, 16 scales, d
    out->d = half_at(block + 208), out->m = 0;
    out->sub_d = block[192 + 2 * sub], out->sub_m = block[193 + 2 * sub];
    const uint8_t* low = block + sub / 4 * 64 + sub % 2 * 32;
    const uint8_t* high = block + 128 + sub / 4 * 32;
    int shift = sub % 4 / 2 * 4, high_shift = sub % 4 * 2;
    for (int i = 0; i < BLOCK; i++) out->level[i] = (low[i] >> shift & 15) | (high[i] >> high_shift & 3) << 4;
}

void read_block(int32_t kind, const uint8_t* row, int64_t index, Levels* out) {
    const KindInfo* info = kind_info(kind);
    const uint8_t* block = row + index * BLOCK / info->block_columns * info->block_bytes;
    int sub = index % SUPER_BLOCKS;
    out->d = half_at(block), out->m = 0, out->sub_d = out->sub_m = 0;
    switch (kind) {
        case Q4_0: low_high(block + 2, out->level); break;
        case Q4_1: out->m = half_at(block + 2), low_high(block + 4, out->level); break;
        case Q5_0: low_high(block + 6, out->level), add_fifth_bit(block + 2, out->level); break;
        case Q5_1: out->m = half_at(block + 2), low_high(block + 8, out->level), add_fifth_bit(block + 4, out->level); break;
        case Q8_0: case INT8: for (int i = 0; i < BLOCK; i++) out->level[i] = block[2 + i] ^ 0x80; break;
        case INT4: out->m = half_at(block + 2), memcpy(out->level, block + 4, BLOCK); break;
        case Q4_K: read_k(block, sub, nullptr, block + 16, out); break;
        case Q5_K: read_k(block, sub, block + 16, block + 48, out); break;
        case Q6_K: read_q6(block, sub, out); break;
    }
}

void put_levels(const Levels* rows, int bits, uint8_t* tile) {
    uint8_t groups[8][64];
    for (int row = 0; row < STRIP; row++)
        for (int g = 0; g < 8; g++) memcpy(groups[g] + 4 * row, rows[row].level + 4 * g, 4);
    if (bits == 8) {
        memcpy(tile, groups, 512);
        return;
    }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 64; j++) tile[64 * i + j] = (groups[i][j] & 15) | (groups[i + 4][j] & 15) << 4;
    uint8_t* high = tile + 256;
    memset(high, 0, (size_t)level_bytes(bits) - 256);
    int share = bits == 6 ? 2 : 1, per_byte = 8 / share;  // bits of a group in a byte; groups there
    for (int g = 0; bits > 4 && g < 8; g++) {
        uint8_t* plane = high + g / per_byte * 64;
        for (int j = 0; j < 64; j++) plane[j] |= groups[g][j] >> 4 << g % per_byte * share;
    }
}

uint8_t level_at(const uint8_t* tile, int bits, int row, int column) {
    int g = column / 4, j = 4 * row + column % 4;
    if (bits == 8) return tile[64 * g + j];
    uint8_t low = g < 4 ? tile[64 * g + j] & 15 : tile[64 * (g - 4) + j] >> 4;
    if (bits == 5) low |= (tile[256 + j] >> g & 1) << 4;
    if (bits == 6) low |= (tile[256 + g / 4 * 64 + j] >> 2 * (g % 4) & 3) << 4;
    return low;
}

void put_scales(const Levels* rows, ScaleStyle style, uint8_t* scales) {
    for (int row = 0; row < STRIP; row++) {
        if (style == SUPER || style == SUPER_6) {
            scales[row] = rows[row].sub_d, scales[STRIP + row] = rows[row].sub_m;
            continue;
        }
        memcpy(scales + 2 * row, &rows[row].d, 2);
        if (style == TWO_F16 || style == TWO_BF16) memcpy(scales + 2 * (STRIP + row), &rows[row].m, 2);
    }
}

void put_header(const Levels* rows, ScaleStyle style, uint8_t* header) {
    for (int row = 0; row < STRIP; row++) {
        memcpy(header + 2 * row, &rows[row].d, 2);
        if (style == SUPER) memcpy(header + 2 * (STRIP + row), &rows[row].m, 2);
    }
}

float bf16_to_float(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

float f16_to_float(uint16_t bits) {
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, exponent = bits >> 10 & 31, fraction = bits & 1023, wide;
    if (exponent == 0) {
        float small = ldexpf((float)fraction, -24);
        return sign ? -small : small;
    }
    wide = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | fraction << 13;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

void pack_floats(Tensor* t, const uint8_t* source, const int64_t* order, int64_t strip) {
    int size = t->info->bits / 8;
    uint8_t* out = t->data + strip * t->strip_bytes;
    for (int64_t row = 0; row < STRIP; row++) {
        int64_t from = strip * STRIP + row;
        const uint8_t* in = from < t->rows ? source + (order ? order[from] : from) * t->columns * size : nullptr;
        for (int64_t c = 0; c < t->columns; c++) {
            if (in) memcpy(out + (c * STRIP + row) * size, in + c * size, size);
            else memset(out + (c * STRIP + row) * size, 0, size);
        }
    }
}

}  // namespace

void pack_strip(Tensor* t, const uint8_t* source, const int64_t* order, int64_t strip) {
    const KindInfo* info = t->info;
    if (is_float(info)) return pack_floats(t, source, order, strip);
    int64_t row_bytes = t->columns / info->block_columns * info->block_bytes;
    uint8_t* out = t->data + strip * t->strip_bytes;
    Levels rows[STRIP];
    memset(rows, 0, sizeof rows);  // rows beyond the last have d = m = 0
    for (int64_t b = 0; b < t->columns / BLOCK; b++) {
        for (int64_t row = 0; row < STRIP && strip * STRIP + row < t->rows; row++) {
            int64_t from = strip * STRIP + row;
            read_block(info->kind, source + (order ? order[from] : from) * row_bytes, b, &rows[row]);
        }
        if (header_bytes(info->style) && b % SUPER_BLOCKS == 0) {
            put_header(rows, info->style, out);
            out += header_bytes(info->style);
        }
        put_levels(rows, info->bits, out);
        out += level_bytes(info->bits);
        put_scales(rows, info->style, out);
        out += scale_bytes(info->style);
    }
}

// In the order of operations of the gguf package, so that values are equal to the last bit.
void unpack_row(const Tensor* t, int64_t index, float* out) {
    const KindInfo* info = t->info;
    const uint8_t* at = t->data + index / STRIP * t->strip_bytes;
    int row = index % STRIP;
    if (is_float(info)) {
        for (int64_t c = 0; c < t->columns; c++, at += STRIP * info->bits / 8) {
            if (info->kind == F32) memcpy(out + c, at + 4 * row, 4);
            else out[c] = (info->kind == F16 ? f16_to_float : bf16_to_float)(half_at(at + 2 * row));
        }
        return;
    }
    const uint8_t* header = at;
    for (int64_t b = 0; b < t->columns / BLOCK; b++) {
        if (header_bytes(info->style) && b % SUPER_BLOCKS == 0) header = at, at += header_bytes(info->style);
        const uint8_t* scales = at + level_bytes(info->bits);
        bool two_bytes = info->style == ONE_BF16 || info->style == TWO_BF16;
        float d, m = 0, d_second;
        if (info->style == SUPER) {
            d = d_second = f16_to_float(half_at(header + 2 * row)) * (float)scales[row];
            m = -(f16_to_float(half_at(header + 2 * (STRIP + row))) * (float)scales[STRIP + row]);
        } else if (info->style == SUPER_6) {
            float whole = f16_to_float(half_at(header + 2 * row));
            d = whole * (float)(int8_t)scales[row], d_second = whole * (float)(int8_t)scales[STRIP + row];
        } else {
            auto wide = two_bytes ? bf16_to_float : f16_to_float;
            d = d_second = wide(half_at(scales + 2 * row));
            if (info->style == TWO_F16 || info->style == TWO_BF16) m = wide(half_at(scales + 2 * (STRIP + row)));
        }
        for (int c = 0; c < BLOCK; c++)
            out[b * BLOCK + c] = (c < 16 ? d : d_second) * (float)(level_at(at, info->bits, row, c) - info->zero) + m;
        at = scales + scale_bytes(info->style);
    }
}

void copy_row(const Tensor* from, int64_t source, Tensor* to, int64_t target) {
    const KindInfo* info = to->info;
    const uint8_t* in = from->data + source / STRIP * from->strip_bytes;
    uint8_t* out = to->data + target / STRIP * to->strip_bytes;
    int64_t s = source % STRIP, t = target % STRIP;
    auto copy = [&](int64_t lane_bytes, int64_t times) {  // this row's share of so many times 16 lanes
        for (; times > 0; times--, in += STRIP * lane_bytes, out += STRIP * lane_bytes)
            memcpy(out + t * lane_bytes, in + s * lane_bytes, lane_bytes);
    };
    if (is_float(info)) return copy(info->bits / 8, to->columns);
    int64_t scale_lane = info->style == SUPER || info->style == SUPER_6 ? 1 : 2;
    for (int64_t b = 0; b < to->columns / BLOCK; b++) {
        if (b % SUPER_BLOCKS == 0) copy(2, header_bytes(info->style) / (2 * STRIP));
        copy(4, level_bytes(info->bits) / 64);
        copy(scale_lane, scale_bytes(info->style) / (scale_lane * STRIP));
    }
}
