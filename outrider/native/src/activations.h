// Rows that products read: as floats, and in blocks of 32 with 8 bits each.
#pragma once
#include <stdint.h>

constexpr int64_t SPARE_ROWS = 1;  // that products may read behind the last

struct Rows {  // of blocks there is memory for SPARE_ROWS more than `count`
    int64_t count, columns, blocks;  // blocks = columns / 32, rounded up; what is beyond the columns is 0
    const float* x;                  // [count, ldx]
    int64_t ldx;
    int8_t* q;     // [count, 32 * blocks]: x / d, rounded
    float* d;      // [count, blocks]: the largest |x| of the block / 127
    float* d_sums; // [count, blocks]: d times the sum of q over the block
    int32_t* sums; // [count, blocks, 2]: of q over the block's first and second 16 columns
    int32_t* zeros; // [count, blocks]: what products with 8-bit levels begin with, as they are unsigned
};
