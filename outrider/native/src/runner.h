// Rows of several sequences through the layers of a model, one step after another.
#pragma once
#include <string.h>

#include <vector>

#include "pass.h"
#include "sizes.h"
#include "threads.h"

template <class T> T* sized(std::vector<T>& memory, int64_t count) {
    if ((int64_t)memory.size() < count) memory.resize(count);
    return memory.data();
}

struct RowBlocks {  // memory of rows in 8 bits
    std::vector<int8_t> q;
    std::vector<float> d, d_sums;
    std::vector<int32_t> sums, zeros;

    Rows rows(const float* x, int64_t ldx, int64_t count, int64_t columns) {
        int64_t blocks = (columns + BLOCK - 1) / BLOCK;
        int64_t all = count * blocks + SPARE_BLOCKS;
        return {count, columns, blocks, x, ldx, sized(q, all * BLOCK), sized(d, all), sized(d_sums, all),
                sized(sums, 2 * all), sized(zeros, all)};
    }
};

struct Scratch {  // kept from pass to pass by each calling thread
    std::vector<float> x, normed, qkv, mixed, wide, narrow, scores;
    std::vector<uint64_t> nodes;
    std::vector<int64_t> limits, firsts;
    RowBlocks blocks;
};

struct Runner {
    const Kernels* kernels;
    const Model* model;
    const Pass* pass;
    Scratch* scratch;
    int64_t rows;

    // Rows by ranges: on this thread alone where they are few.
    template <class Body> void each_row(int64_t count, int64_t numbers, const Body& body) {
        int64_t parts = count * numbers < FEW_NUMBERS ? 1 : count < 4 * pass->threads ? count : 4 * pass->threads;
        for_parts(pass->threads, parts, [&](int64_t part) {
            for (int64_t row = count * part / parts; row < count * (part + 1) / parts; row++) body(row);
        });
    }

    struct View {
        const float* x;
        int64_t count, columns, stride;
    };

    void multiply(const Product& product, View in, float* y, int64_t ldy) {
        Rows rows = scratch->blocks.rows(in.x, in.stride, in.count, in.columns);
        each_row(in.count, in.columns, [&](int64_t row) { kernels->quantize(&rows, row, row + 1); });
        run_product(kernels, &product, &rows, pass->threads, y, ldy);
    }

    void norm_rows(const float* weight, int64_t count, const float* x, float* out) {
        int64_t hidden = model->hidden;
        each_row(count, hidden, [&](int64_t row) { kernels->norm(x + row * hidden, weight, model->eps, hidden, out + row * hidden); });
    }

    // Head norms and rotations of so many queries and of the keys; keys and values to their slots.
    void place(const Layer& layer, int64_t heads) {
        int64_t dim = model->head_dim, kv = model->kv_heads, width = (heads + 2 * kv) * dim;
        auto rotate = model->halves ? kernels->rotate_halves : kernels->rotate;
        each_row(rows, width, [&](int64_t row) {
            float* x = scratch->qkv.data() + row * width;
            const float* turn = layer.cos_sin + pass->positions[row] * dim;
            for (int64_t h = 0; h < heads + kv; h++) {
                const float* weight = h < heads ? layer.q_norm : layer.k_norm;
                if (weight) kernels->norm(x + h * dim, weight, model->eps, dim, x + h * dim);
                rotate(x + h * dim, turn, dim);
            }
            int64_t at = pass->slots[row] * kv * dim;
            memcpy(layer.keys + at, x + heads * dim, 4 * kv * dim);
            memcpy(layer.values + at, x + (heads + kv) * dim, 4 * kv * dim);
        });
    }

    struct Tile {
        const Sequence* sequence;
        int64_t first, rows, length, nodes;  // first: row of the pass; nodes: that of the sequence's first node
    };
    std::vector<Tile> tiles = {};
    int64_t words = 0, longest = 0;

    void find_tiles() {
        int64_t group = model->heads / model->kv_heads, most = group > 16 ? 1 : 16 / group, first = 0;
        for (int64_t s = 0; s < pass->sequence_count; s++) {
            const Sequence* sequence = pass->sequences + s;
            if (sequence->parents) words = words > (sequence->rows + 63) / 64 ? words : (sequence->rows + 63) / 64;
            for (int64_t row = 0; row < sequence->rows; row += most) {
                int64_t count = sequence->rows - row < most ? sequence->rows - row : most;
                int64_t length = sequence->start + (sequence->whole ? sequence->rows : row + count);
                tiles.push_back({sequence, first + row, count, length, first + sequence->text - sequence->start});
                if (tiles.back().length > longest) longest = tiles.back().length;
            }
            first += sequence->rows;
        }
    }

    // What each row sees: of the text by limits, of a tree the nodes on its path.
    void find_limits() {
        scratch->nodes.assign((size_t)(rows * words), 0);
        int64_t* limits = sized(scratch->limits, rows);
        int64_t row = 0;
        for (int64_t s = 0; s < pass->sequence_count; s++) {
            const Sequence& sequence = pass->sequences[s];
            int64_t text_rows = sequence.text - sequence.start;
            for (int64_t i = 0; i < sequence.rows; i++, row++) {
                int64_t node = i - text_rows;
                limits[row] = sequence.start + (sequence.whole ? sequence.rows : i + 1);
                if (!sequence.parents || node < 0) continue;
                limits[row] = sequence.text;
                uint64_t* bits = &scratch->nodes[row * words];
                int64_t parent = sequence.parents[node];
                if (parent >= 0) memcpy(bits, &scratch->nodes[(row - node + parent) * words], 8 * words);
                bits[node / 64] |= (uint64_t)1 << node % 64;
            }
        }
    }

    // From which position on each row sees, by a layer's window and what the model skips.
    void find_firsts(int64_t window) {
        int64_t* firsts = sized(scratch->firsts, rows);
        for (int64_t row = 0; row < rows; row++) {
            int64_t at = pass->positions[row], first = window ? at + 1 - window : 0;
            int64_t skipped = at < model->skip ? at : model->skip;
            firsts[row] = first > skipped ? first : skipped;
        }
    }

    void attend(const Layer& layer) {
        int64_t dim = model->head_dim, kv = model->kv_heads, group = model->heads / kv;
        int64_t width = (model->heads + 2 * kv) * dim, lanes = group < 16 ? group : 16;
        int64_t splits = (group + lanes - 1) / lanes;
        find_firsts(layer.window);
        for_parts(pass->threads, (int64_t)tiles.size() * kv * splits, [&](int64_t part) {
            static thread_local std::vector<float> scores;
            const Tile& tile = tiles[tiles.size() - 1 - part / (kv * splits)];  // the longest first
            int64_t head = part / splits % kv, from = head * group + part % splits * lanes;
            int64_t heads = (head + 1) * group - from < lanes ? (head + 1) * group - from : lanes;
            AttentionTask task;
            task.q = scratch->qkv.data() + tile.first * width + from * dim, task.ldq = width;
            task.out = scratch->mixed.data() + (tile.first * model->heads + from) * dim, task.ldo = model->heads * dim;
            task.rows = tile.rows, task.group = heads, task.dim = dim;
            task.keys = layer.keys + head * dim, task.values = layer.values + head * dim, task.slot_stride = kv * dim;
            task.table = tile.sequence->table, task.page_bits = model->page_bits;
            task.text = tile.sequence->text;
            task.limits = scratch->limits.data() + tile.first, task.firsts = scratch->firsts.data() + tile.first;
            task.nodes = tile.sequence->parents ? scratch->nodes.data() + tile.first * words : nullptr, task.words = words;
            task.node_positions = pass->positions + tile.nodes;
            task.length = tile.length, task.scale = model->scale;
            task.scores = sized(scores, 16 * longest);
            kernels->attend(&task);
        });
    }

    void add_to_stream(const float* y) {
        each_row(rows, model->hidden, [&](int64_t row) { kernels->add(scratch->x.data() + row * model->hidden, y + row * model->hidden, model->hidden); });
    }

    // Queries, keys and values of one layer. read: what it reads, in place of the normed stream where it has no norm.
    void project(const Layer& layer, const float* read = nullptr) {
        int64_t width = (model->heads + 2 * model->kv_heads) * model->head_dim;
        Scratch& s = *scratch;
        if (layer.attention_norm) norm_rows(layer.attention_norm, rows, s.x.data(), s.normed.data()), read = s.normed.data();
        multiply(layer.qkv, {read, rows, layer.inputs, layer.inputs}, s.qkv.data(), width);
        place(layer, model->heads);
    }

    void run_layer(const Layer& layer, const float* read = nullptr) {
        int64_t hidden = model->hidden, wide = model->wide, q = model->heads * model->head_dim;
        Scratch& s = *scratch;
        project(layer, read);
        attend(layer);
        multiply(layer.out, {s.mixed.data(), rows, q, q}, s.narrow.data(), hidden);
        add_to_stream(s.narrow.data());
        norm_rows(layer.mlp_norm, rows, s.x.data(), s.normed.data());
        multiply(layer.gate_up, {s.normed.data(), rows, hidden, hidden}, s.wide.data(), 2 * wide);
        each_row(rows, 4 * wide, [&](int64_t row) {
            float* gate = s.wide.data() + 2 * row * wide;
            kernels->silu_times(gate, gate + wide, wide, gate);
        });
        multiply(layer.down, {s.wide.data(), rows, wide, 2 * wide}, s.narrow.data(), hidden);
        add_to_stream(s.narrow.data());
    }

    // Memory for all rows, and what each sees.
    void prepare() {
        int64_t hidden = model->hidden, q = model->heads * model->head_dim;
        Scratch& s = *scratch;
        sized(s.x, rows * hidden), sized(s.normed, rows * hidden), sized(s.narrow, rows * hidden);
        sized(s.qkv, rows * (q + 2 * model->kv_heads * model->head_dim)), sized(s.mixed, rows * q);
        sized(s.wide, 2 * rows * model->wide);
        find_tiles();
        find_limits();
    }
};
