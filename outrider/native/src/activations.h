// Rows that products read: as floats, and in blocks of 32 with 8 bits each.
#pragma once
#include <stdint.h>

enum { ROW_GROUP = 16 };
constexpr int64_t SPARE_BLOCKS = 16;  // that products may read behind the last
constexpr float MIN_LARGEST = 1e-36f;  // of a block: where all are smaller they count as 0, as 127 / largest might be infinite

// Blocks lie as products of many rows read them: rows come in groups of 16 (the last of what is left), a group's blocks
// one after another, and of each block all rows of the group.
struct Rows {
    int64_t count, columns, blocks;  // blocks = columns / 32, rounded up; what is beyond the columns is 0
    const float* x;                  // [count, ldx]
    int64_t ldx;
    int8_t* q;     // [count * blocks + SPARE_BLOCKS, 32], as the next ones: x / d, rounded
    float* d;      // the largest |x| of the block / 127
    float* d_sums; // d times the sum of q over the block
    int32_t* sums; // [.., 2]: of q over the block's first and second 16 columns
    int32_t* zeros; // what products with 8-bit levels begin with, as they are unsigned

    int64_t width(int64_t row) const {  // rows of its group
        int64_t left = count - row / ROW_GROUP * ROW_GROUP;
        return left < ROW_GROUP ? left : ROW_GROUP;
    }
    int64_t at(int64_t row, int64_t block) const { return row / ROW_GROUP * ROW_GROUP * blocks + block * width(row) + row % ROW_GROUP; }
};
