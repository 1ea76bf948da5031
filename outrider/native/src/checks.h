// Whether what a caller gives fits together: null, or what is wrong.
#pragma once
#include "pass.h"

inline bool within(int64_t value, int64_t low, int64_t high) { return value >= low && value <= high; }
bool product_fits(const Product& product, int64_t columns, int64_t outputs);
const char* check_model(const Model* m);  // but for its embedding
const char* check_sequence(const Model* m, const Sequence& s);
