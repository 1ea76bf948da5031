// Rows of several sequences through the layers of a model, one step after another.
#pragma once
#include <string.h>

#include <vector>

#include "attention.h"
#include "pass.h"
#include "sizes.h"
#include "threads.h"

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
    std::vector<float> x, normed, qkv, mixed, wide, narrow;
    AttentionScratch attention;
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
        quantize_rows(kernels, &rows, pass->threads);
        run_product(kernels, &product, &rows, pass->threads, y, ldy);
    }

    // make: computes a row of the input first.
    template <class Make> void multiply(const Product& product, View in, float* y, int64_t ldy, const Make& make) {
        each_row(in.count, in.columns, make);
        multiply(product, in, y, ldy);
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

    Attention attention = {kernels, model, pass, &scratch->attention};

    void add_to_stream(int64_t row) {
        int64_t hidden = model->hidden;
        kernels->add(scratch->x.data() + row * hidden, scratch->narrow.data() + row * hidden, hidden);
    }

    void norm_row(const float* weight, int64_t row) {
        int64_t hidden = model->hidden;
        kernels->norm(scratch->x.data() + row * hidden, weight, model->eps, hidden, scratch->normed.data() + row * hidden);
    }

    // Queries, keys and values of one layer. read: what it reads, in place of the normed stream where it has no norm.
    void project(const Layer& layer, const float* read = nullptr) {
        int64_t width = (model->heads + 2 * model->kv_heads) * model->head_dim;
        Scratch& s = *scratch;
        multiply(layer.qkv, {layer.attention_norm ? s.normed.data() : read, rows, layer.inputs, layer.inputs}, s.qkv.data(), width, [&](int64_t row) {
            if (layer.attention_norm) norm_row(layer.attention_norm, row);
        });
        place(layer, model->heads);
    }

    void run_layer(const Layer& layer, const float* read = nullptr) {
        int64_t hidden = model->hidden, wide = model->wide, q = model->heads * model->head_dim;
        Scratch& s = *scratch;
        project(layer, read);
        attention.run(layer, s.qkv.data(), s.mixed.data());
        multiply(layer.out, {s.mixed.data(), rows, q, q}, s.narrow.data(), hidden);
        multiply(layer.gate_up, {s.normed.data(), rows, hidden, hidden}, s.wide.data(), 2 * wide, [&](int64_t row) {
            add_to_stream(row);
            norm_row(layer.mlp_norm, row);
        });
        multiply(layer.down, {s.wide.data(), rows, wide, 2 * wide}, s.narrow.data(), hidden, [&](int64_t row) {
            float* gate = s.wide.data() + 2 * row * wide;
            kernels->silu_times(gate, gate + wide, wide, gate);
        });
        each_row(rows, hidden, [&](int64_t row) { add_to_stream(row); });
    }

    // Memory for all rows, and what each sees.
    void prepare() {
        int64_t hidden = model->hidden, q = model->heads * model->head_dim;
        Scratch& s = *scratch;
        sized(s.x, rows * hidden), sized(s.normed, rows * hidden), sized(s.narrow, rows * hidden);
        sized(s.qkv, rows * (q + 2 * model->kv_heads * model->head_dim)), sized(s.mixed, rows * q);
        sized(s.wide, 2 * rows * model->wide);
        attention.prepare(rows);
    }
};
