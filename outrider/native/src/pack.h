#pragma once
#include "blocks.h"

// One strip of t from a file's rows, order[i] being the row that becomes row i; null: as they are.
void pack_strip(Tensor* t, const uint8_t* source, const int64_t* order, int64_t strip);
void unpack_row(const Tensor* t, int64_t index, float* out);
void copy_row(const Tensor* from, int64_t source, Tensor* to, int64_t target);  // of one kind and width
