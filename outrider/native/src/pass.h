// One pass: rows of several sequences through the layers of a model.
#pragma once
#include "kernels.h"

struct Product {  // one linear layer: tensors whose outputs lie side by side
    const Tensor* parts[3];  // null from the first that is missing
    const float* bias;       // of all outputs; may be null
};

struct Layer {
    const float *attention_norm, *mlp_norm;  // the first null where rows are normed before
    Product qkv, out, gate_up, down;
    const float *q_norm, *k_norm;  // [head_dim]; null where heads are not normalized
    float *keys, *values;          // [slots, kv_heads, head_dim]
    const float* cos_sin;          // [positions, head_dim]: pairs of cosine and sine
    int64_t window;                // last positions that a row sees; 0: all
    int64_t inputs;                // columns that qkv reads
};

struct Model {
    int64_t layer_count, hidden, wide, heads, kv_heads, head_dim, vocab;
    int64_t slots, page_bits, positions;  // of the cache; of a page; rows of cos_sin
    int64_t skip;    // so many first positions are seen by their own rows alone
    int64_t halves;  // 1: rotations turn dimensions i and i + head_dim / 2 together, and cos_sin holds cosines, then sines
    float eps, scale, embedding_scale;
    const Tensor* embedding;  // null where passes bring embedded rows
    const float* norm;
    Product head;  // its first part null: no logits
    const Layer* layers;
};

struct Sequence {  // its rows follow each other: text, then the nodes of a draft
    int64_t rows, start, text;  // text: end of its text, after the last text row
    const int32_t* table;
    int64_t pages;
    const int32_t* parents;  // of each node, -1 for those behind the text; null: a chain
    int64_t whole;           // 1: rows see all rows of the sequence
};

struct Pass {
    int64_t rows, sequence_count, wanted_count, tap_count, threads;
    const int64_t *ids, *positions, *slots;  // [rows]
    const float* embedded;   // [rows, hidden]; null: rows of the embedding
    const Sequence* sequences;
    const int64_t* wanted;   // [wanted_count]: rows
    const int64_t* taps;     // [tap_count]: layers
    float* features;         // [rows, tap_count * hidden]; null: not returned
    int64_t* kept_tokens;    // [slots]: for a head that reads them later, what was read; null: not kept
    float* kept_features;    // [slots, tap_count * hidden]: and its tapped outputs
    float* hidden;           // [wanted_count, hidden], after the last norm
    float* logits;           // [wanted_count, vocab]
    int64_t* chosen;         // [wanted_count]: the target's choice after each, -1 where it has none; null: not asked for
    const int64_t* seeds;    // [wanted_count]: of the noise of those with a temperature
    const double* temperatures;  // [wanted_count]: 0: the best token; null: all 0
};

const char* run_pass(const Kernels* kernels, const Model* model, const Pass* pass);  // null, or what is wrong
void run_product(const Kernels* kernels, const Product* product, const Rows* rows, int64_t threads, float* y, int64_t ldy);
uint64_t noise_key(uint64_t seed, int64_t position);  // of the target's noise: see verify/noise.py
Best best_of(const Best* parts, int64_t count);  // of the columns of one row, in their order
void quantize_rows(const Kernels* kernels, Rows* rows, int64_t threads);
