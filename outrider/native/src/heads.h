// Drafting heads: a few layers over the target's tapped outputs. Keys and values lie in the target's pages.
#pragma once
#include "pass.h"

struct Table {  // rows to look up
    const Tensor* blocks;  // or, where null, floats of `kind`:
    const void* rows;      // [count, columns]
    int64_t kind, count, columns;
};

struct Head {
    Model model;                // its vocab: columns of the logits
    Table embedding;
    const int64_t* tokens;      // [vocab]: the token of each column; null: columns are tokens
    Product fc;                 // over the tapped outputs
    int64_t features;           // columns of those
    const int64_t* kept_tokens;   // [slots]: what the target has read,
    const float* kept_features;   // [slots, features]: and its tapped outputs there
};

struct BlockHead {
    Head head;
    const float* context_norm;  // behind fc
    int64_t rows;               // of a block
    int64_t causal;             // 1: a row sees no row behind it
    int64_t anchored;           // 1: the first row predicts the first token
    const float* mask;          // [hidden]: the input of rows behind the first
    const float* before;        // [tokens of the target, rank]: the Markov head's; null: it has none
    Product after;              // rank columns to vocab outputs, of floats
    int64_t rank;
    const float* confidence;    // [confidence_columns + 1]: weights and bias; null: none
    int64_t confidence_columns; // hidden, or with the Markov head's rank behind
};

struct StepHead {  // EAGLE-3
    Head head;
    const float* feature_norm;  // [features]: over each so many columns of the tapped outputs; null: none
    int64_t feature_norm_columns;
    const float *embedding_norm, *hidden_norm;
    int64_t normed_residual;    // 1: the stream begins with the normed hidden state
    int64_t norm_output;        // 1: the next step reads what is behind the last norm
};

struct Text {
    int64_t length, last, first;  // tokens; the last of them; the first position to be read
    uint64_t seed;
    double temperature;
    const int32_t* table;
    int64_t pages;
};

struct Drafts {  // of `count` texts; tokens 0: they are only read
    int64_t count, tokens, threads;
    const int64_t *table_ids, *lengths, *last, *firsts, *seeds;  // [count]: see Text
    const double* temperatures;
    const int32_t* tables;  // [.., table_pages]
    int64_t table_pages;
    int64_t* chosen;        // [count, tokens], or of trees [count, nodes]; null: not chosen here
    float* hidden;          // of a block, after the last norm: [count, tokens, hidden]; null: not asked for
    float* logits;          // of a block, without the Markov head's part: [count, tokens, vocab]; null, as above
    float* confidences;     // of a block: [count, tokens]; null, as above
    int64_t nodes, tree_width;  // of a block's trees, and most nodes of a level and children of each; 0: chains
    int64_t* parents;       // [count, nodes]: -1, or a node before it

    Text text(int64_t i) const {
        return {lengths[i], last[i], firsts[i], (uint64_t)seeds[i], temperatures[i], tables + table_ids[i] * table_pages, table_pages};
    }
};

const char* draft_blocks(const Kernels* kernels, const BlockHead* head, const Drafts* drafts);  // null, or what is wrong
const char* draft_steps(const Kernels* kernels, const StepHead* head, const Drafts* drafts);

// What both kinds of head share.
const char* check_head(const Head* head, const Drafts* drafts, int64_t rows);  // rows: written behind each text's last but one
void embed_token(const Table& table, int64_t token, float* out);
inline int64_t slot_of(const Model& model, const Text& text, int64_t position) {
    return ((int64_t)text.table[position >> model.page_bits] << model.page_bits) | (position & ((1 << model.page_bits) - 1));
}

struct Bias {  // what is added to the logits of what follows a token
    const Product* after;  // null: nothing
    const float* before;   // [tokens of the target, rank]
    int64_t rank;
};

// The token at position text.length + step of each text, from logits [count, ldl]: the best, or with the target's noise.
// before, chosen: of each text, `stride` numbers apart.
struct Choice {
    const Kernels* kernels;
    const Head* head;
    const Drafts* drafts;
    Bias bias;
    void choose(const float* logits, int64_t ldl, int64_t step, const int64_t* before, int64_t* chosen, int64_t stride) const;
};

// The likeliest nodes of a tree behind each text, from logits [count, tokens, vocab]. tree_level: how many nodes a level
// has below one of so many.
void draft_trees(const Kernels* kernels, const Head* head, const Drafts* drafts, Bias bias, const float* logits);
int64_t tree_level(int64_t wide, int64_t vocab, const Drafts* drafts);
