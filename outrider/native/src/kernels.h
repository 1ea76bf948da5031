// What is compiled once for each instruction set. Every function computes a row the same way whatever rows are beside it.
#pragma once
#include "activations.h"
#include "blocks.h"

constexpr int64_t MAX_QUERIES = 32;       // of one task
constexpr int64_t ATTENTION_CHUNK = 256;  // positions whose numbers are added one after another; chunks are joined in order
constexpr int64_t attention_width(int64_t dim) { return (dim + 15) / 16 * 16; }

struct AttentionTask {
    const float* q;          // [rows, ldq]: the first row and first head of the group
    int64_t ldq;
    float* out;              // [rows, ldo], likewise
    int64_t ldo;
    int64_t rows, group, dim;  // rows * group <= MAX_QUERIES
    const float *keys, *values;  // of this layer and key head: the slot s lies at s * slot_stride
    int64_t slot_stride;
    const int32_t* table;    // pages of the sequence
    int64_t page_bits;       // a page holds 2^page_bits tokens
    const int64_t *firsts, *limits;  // [rows]: each sees the positions from its first up to its limit
    int64_t text;            // tokens of text
    const int32_t* paths;    // [rows, path_stride]: of a tree, the nodes that are at the positions behind the text; may be null
    int64_t path_stride;
    float scale;
};

struct Scored {            // columns [first, end) of a row
    const float *logits, *added;  // what is added may be null
    const int64_t* tokens;   // of the columns; null: columns are tokens
    int64_t first, end;
    double scale;            // of logits, where noise is added
    uint64_t key;            // of the noise
    float most, temperature; // of the target's own choice in place of `scale`: the row's largest logit, and its temperature
};

struct Best {
    double score;
    int64_t column;
};

constexpr int64_t MAX_TREE_WIDTH = 8, MAX_RANKED = 2048;  // columns that are ranked at once

struct Ranked {              // of a row's columns
    int64_t count;
    Best best[MAX_TREE_WIDTH];
    float most, sum;         // the largest score, and the sum of exp(score - most)
};

struct Kernels {
    const char* name;
    void (*quantize)(Rows* rows, int64_t first, int64_t end);
    // y[row, 16 * strip + i] for strips [first, end); ldy: floats between rows of y
    void (*product)(const Tensor* w, const Rows* rows, int64_t first, int64_t end, float* y, int64_t ldy);
    // One chunk of positions: sums of values [rows * group, attention_width(dim)], the largest scores, the sums of weights.
    void (*attend)(const AttentionTask* task, int64_t chunk, float* part);
    void (*join)(const AttentionTask* task, float* sum, const float* part);  // of the chunk behind
    void (*finish)(const AttentionTask* task, const float* sum);             // to task->out
    void (*noise)(const Scored* scored, float* out);  // of each column
    // The best `width` columns, best first. noise: as above, which is added; null: nothing is.
    void (*rank)(const Scored* scored, const float* noise, int64_t width, Ranked* ranked);
    // out = x / rms(x) * weight, of n numbers
    void (*norm)(const float* x, const float* weight, float eps, int64_t n, float* out);
    void (*add)(float* x, const float* y, int64_t n);               // x += y
    void (*silu_times)(const float* gate, const float* up, int64_t n, float* out);
    void (*rotate)(float* x, const float* cos_sin, int64_t dim);    // pairs in place
    void (*rotate_halves)(float* x, const float* cos_sin, int64_t dim);
    Best (*largest)(const Scored* scored);
    Best (*noisiest)(const Scored* scored);
    Best (*noisiest_of_target)(const Scored* scored);
};

extern const Kernels KERNELS_PLAIN;
#ifdef OUTRIDER_X86
extern const Kernels KERNELS_AVX2, KERNELS_AVX512;
const Kernels* kernels_amx();  // null where this machine or build lacks them; called only where AVX-512 is there
#endif
#ifdef OUTRIDER_ARM
extern const Kernels KERNELS_NEON, KERNELS_NEON_DOT;
#endif
