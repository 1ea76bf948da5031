// A file's blocks to tiles, and rows of tiles to floats.
#include <math.h>
#include <string.h>

#include "pack.h"

namespace {

struct Block {  // of 32 columns of one row, as it lies in a tile
    uint32_t words[8];    // of its row in each 64 bytes of levels
    uint16_t d, m;        // as stored: f16, or bf16 of our own kinds
    uint8_t sub_d, sub_m; // of super-blocks: their share of d and m; SUPER_6: of each half of the block
};

typedef uint32_t Half __attribute__((vector_size(16)));  // 16 columns, a byte each: four groups

inline uint16_t half_at(const uint8_t* p) {
    uint16_t value;
    memcpy(&value, p, 2);
    return value;
}

inline Half sixteen_at(const uint8_t* p) {
    Half value;
    memcpy(&value, p, 16);
    return value;
}

inline void put_nibbles(Half first, Half second, Block* out) {  // of columns 0 to 15 and 16 to 31, in low halves of bytes
    Half both = (first & 0x0f0f0f0fu) | (second & 0x0f0f0f0fu) << 4;
    memcpy(out->words, &both, 16);
}

inline uint32_t fold(Half groups, int width) {  // values of so many bits, side by side
    return groups[0] | groups[1] << width | groups[2] << 2 * width | groups[3] << 3 * width;
}

struct FifthBits {  // of[byte]: the bits of eight columns, as bits 0 and 1 of four bytes
    uint32_t of[256] = {};
    constexpr FifthBits() {
        for (int byte = 0; byte < 256; byte++)
            for (int i = 0; i < 8; i++) of[byte] |= (uint32_t)(byte >> i & 1) << (8 * (i % 4) + i / 4);
    }
};
constexpr FifthBits FIFTH;

inline void put_fives(const uint8_t* bits, const uint8_t* packed, Block* out) {
    memcpy(out->words, packed, 16);
    out->words[4] = FIFTH.of[bits[0]] | FIFTH.of[bits[1]] << 2 | FIFTH.of[bits[2]] << 4 | FIFTH.of[bits[3]] << 6;
}

inline void put_bytes(const uint8_t* levels, uint32_t flipped, Block* out) {
    Half first = sixteen_at(levels) ^ flipped, second = sixteen_at(levels + 16) ^ flipped;
    memcpy(out->words, &first, 16), memcpy(out->words + 4, &second, 16);
}

inline void read_k(const uint8_t* block, int sub, const uint8_t* low, Block* out) {
    out->d = half_at(block), out->m = half_at(block + 2);
    const uint8_t* scales = block + 4;  // 12 bytes: 8 scales and 8 minima of 6 bits
    if (sub < 4) {
        out->sub_d = scales[sub] & 63, out->sub_m = scales[sub + 4] & 63;
    } else {
        out->sub_d = (scales[sub + 4] & 15) | (scales[sub - 4] >> 6 << 4);
        out->sub_m = (scales[sub + 4] >> 4) | (scales[sub] >> 6 << 4);
    }
    const uint8_t* packed = low + sub / 2 * 32;
    int shift = sub % 2 * 4;
    put_nibbles(sixteen_at(packed) >> shift, sixteen_at(packed + 16) >> shift, out);
}

inline void read_q6(const uint8_t* block, int sub, Block* out) {  // 128 low, 64 high, 16 scales, d
    out->d = half_at(block + 208);
    out->sub_d = block[192 + 2 * sub], out->sub_m = block[193 + 2 * sub];
    const uint8_t* low = block + sub / 4 * 64 + sub % 2 * 32;
    const uint8_t* high = block + 128 + sub / 4 * 32;
    int shift = sub % 4 / 2 * 4, high_shift = sub % 4 * 2;
    put_nibbles(sixteen_at(low) >> shift, sixteen_at(low + 16) >> shift, out);
    for (int i = 0; i < 2; i++) out->words[4 + i] = fold(sixteen_at(high + 16 * i) >> high_shift & 0x03030303u, 2);
}

template <int32_t KIND> inline void read_block(const uint8_t* block, int sub, Block* out) {
    out->d = half_at(block), out->m = half_at(block + 2);  // overwritten, or not used, where they are none
    switch (KIND) {
        case Q4_0: memcpy(out->words, block + 2, 16); break;
        case Q4_1: memcpy(out->words, block + 4, 16); break;
        case Q5_0: put_fives(block + 2, block + 6, out); break;
        case Q5_1: put_fives(block + 4, block + 8, out); break;
        case Q8_0: case INT8: put_bytes(block + 2, 0x80808080u, out); break;
        case INT4: put_nibbles(sixteen_at(block + 4), sixteen_at(block + 20), out); break;
        case Q4_K: read_k(block, sub, block + 16, out); break;
        case Q5_K: {
            read_k(block, sub, block + 48, out);
            Half first = sixteen_at(block + 16) >> sub & 0x01010101u, second = sixteen_at(block + 32) >> sub & 0x01010101u;
            out->words[4] = fold(first, 1) | fold(second, 1) << 4;
            break;
        }
        case Q6_K: read_q6(block, sub, out); break;
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

// One row's share of a tile, and of the header that lies before each 8 tiles.
template <int32_t KIND> inline void put_block(const Block& block, int row, uint8_t* tile, uint8_t* header) {
    constexpr KindInfo info = *kind_info(KIND);
    constexpr bool super = info.style == SUPER || info.style == SUPER_6;
    constexpr bool two = info.style == SUPER || info.style == TWO_F16 || info.style == TWO_BF16;
    uint8_t* scales = tile + level_bytes(info.bits);
    for (int i = 0; i < level_bytes(info.bits) / 64; i++) memcpy(tile + 64 * i + 4 * row, &block.words[i], 4);
    if (super) scales[row] = block.sub_d, scales[STRIP + row] = block.sub_m;
    uint8_t* halves = super ? header : scales;
    if (!halves) return;
    memcpy(halves + 2 * row, &block.d, 2);
    if (two) memcpy(halves + 2 * (STRIP + row), &block.m, 2);
}

int strip_rows(const Tensor* t, const uint8_t* source, const int64_t* order, int64_t strip, int64_t row_bytes, const uint8_t** rows) {
    int count = 0;
    for (int64_t i = strip * STRIP; i < t->rows && count < STRIP; i++) rows[count++] = source + (order ? order[i] : i) * row_bytes;
    return count;
}

template <int32_t KIND> void pack_blocks(Tensor* t, const uint8_t* source, const int64_t* order, int64_t strip) {
    constexpr KindInfo info = *kind_info(KIND);
    constexpr int64_t in_file = info.block_columns / BLOCK;  // blocks that lie together there
    int64_t row_bytes = t->columns / info.block_columns * info.block_bytes;
    const uint8_t* rows[STRIP];
    int count = strip_rows(t, source, order, strip, row_bytes, rows);
    uint8_t* out = t->data + strip * t->strip_bytes;
    if (count < STRIP) memset(out, 0, (size_t)t->strip_bytes);  // rows beyond the last have d = m = 0
    Block block;
    for (int64_t b = 0; b < t->columns / BLOCK; b++) {
        uint8_t* header = header_bytes(info.style) && b % SUPER_BLOCKS == 0 ? out : nullptr;
        if (header) out += header_bytes(info.style);
        for (int row = 0; row < count; row++) {
            read_block<KIND>(rows[row] + b / in_file * info.block_bytes, b % in_file, &block);
            put_block<KIND>(block, row, out, header);
        }
        out += level_bytes(info.bits) + scale_bytes(info.style);
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

template <class Number> void pack_floats(Tensor* t, const uint8_t* source, const int64_t* order, int64_t strip) {
    const uint8_t* rows[STRIP];
    int count = strip_rows(t, source, order, strip, t->columns * (int64_t)sizeof(Number), rows);
    uint8_t* out = t->data + strip * t->strip_bytes;
    if (count < STRIP) memset(out, 0, (size_t)t->strip_bytes);
    for (int64_t c = 0; c < t->columns; c++, out += STRIP * sizeof(Number))
        for (int row = 0; row < count; row++) memcpy(out + row * sizeof(Number), rows[row] + c * sizeof(Number), sizeof(Number));
}

}  // namespace

void pack_strip(Tensor* t, const uint8_t* source, const int64_t* order, int64_t strip) {
    switch (t->info->kind) {
        case Q4_0: return pack_blocks<Q4_0>(t, source, order, strip);
        case Q4_1: return pack_blocks<Q4_1>(t, source, order, strip);
        case Q5_0: return pack_blocks<Q5_0>(t, source, order, strip);
        case Q5_1: return pack_blocks<Q5_1>(t, source, order, strip);
        case Q8_0: return pack_blocks<Q8_0>(t, source, order, strip);
        case Q4_K: return pack_blocks<Q4_K>(t, source, order, strip);
        case Q5_K: return pack_blocks<Q5_K>(t, source, order, strip);
        case Q6_K: return pack_blocks<Q6_K>(t, source, order, strip);
        case INT4: return pack_blocks<INT4>(t, source, order, strip);
        case INT8: return pack_blocks<INT8>(t, source, order, strip);
        case F32: return pack_floats<float>(t, source, order, strip);
        default: return pack_floats<uint16_t>(t, source, order, strip);
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
