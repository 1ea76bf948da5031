// Bounds of what callers may ask for, and sizes that were found by measuring.
#pragma once
#include <stdint.h>

constexpr int64_t MAX_HEAD_DIM = 512;
constexpr int64_t MAX_SIZE = 1 << 28;      // of a dimension
constexpr int64_t MAX_THREADS = 256;
constexpr int64_t PREFETCH_BYTES = 8192;   // so far ahead of what is read
constexpr int PREFETCH_HINT = 2;           // to the second cache: it takes more at a time than the first
constexpr int64_t PART_BYTES = 64 << 10;   // weights of a part of a product
constexpr int64_t FEW_NUMBERS = 1 << 13;   // of rows: fewer are not shared out
constexpr int64_t MAX_SHARED_NUMBERS = 1 << 22;  // of attention: where more, threads do not share the keys of a row
constexpr int64_t MIN_TILE_ROWS = 4;      // of attention: tiles of fewer rows would read the keys too often
