#include "pass.h"

#include <string.h>

#include <vector>

#include "pack.h"
#include "sizes.h"
#include "threads.h"

namespace {

template <class T> T* sized(std::vector<T>& memory, int64_t count) {
    if ((int64_t)memory.size() < count) memory.resize(count);
    return memory.data();
}

struct RowBlocks {  // memory of rows in 8 bits
    std::vector<int8_t> q;
    std::vector<float> d, d_sums;
    std::vector<int32_t> sums;

    Rows rows(const float* x, int64_t ldx, int64_t count, int64_t columns) {
        int64_t blocks = (columns + BLOCK - 1) / BLOCK;
        return {count, columns, blocks, x, ldx, sized(q, count * blocks * BLOCK), sized(d, count * blocks),
                sized(d_sums, count * blocks), sized(sums, 2 * count * blocks)};
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

    void embed() {
        int64_t hidden = model->hidden;
        each_row(rows, hidden, [&](int64_t row) {
            float* x = scratch->x.data() + row * hidden;
            if (pass->embedded) memcpy(x, pass->embedded + row * hidden, 4 * hidden);
            else unpack_row(model->embedding, pass->ids[row], x);
            if (model->embedding_scale != 1)
                for (int64_t i = 0; i < hidden; i++) x[i] *= model->embedding_scale;
        });
    }

    void norm_rows(const float* weight, int64_t count, const float* x, float* out) {
        int64_t hidden = model->hidden;
        each_row(count, hidden, [&](int64_t row) { kernels->norm(x + row * hidden, weight, model->eps, hidden, out + row * hidden); });
    }

    // Head norms and rotations of queries and keys; keys and values to their slots.
    void place(const Layer& layer) {
        int64_t dim = model->head_dim, heads = model->heads, kv = model->kv_heads, width = (heads + 2 * kv) * dim;
        each_row(rows, width, [&](int64_t row) {
            float* x = scratch->qkv.data() + row * width;
            const float* turn = layer.cos_sin + pass->positions[row] * dim;
            for (int64_t h = 0; h < heads + kv; h++) {
                const float* weight = h < heads ? layer.q_norm : layer.k_norm;
                if (weight) kernels->norm(x + h * dim, weight, model->eps, dim, x + h * dim);
                kernels->rotate(x + h * dim, turn, dim);
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
                tiles.push_back({sequence, first + row, count, sequence->start + row + count, first + sequence->text - sequence->start});
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
                limits[row] = sequence.start + i + 1;
                if (!sequence.parents || node < 0) continue;
                limits[row] = sequence.text;
                uint64_t* bits = &scratch->nodes[row * words];
                int64_t parent = sequence.parents[node];
                if (parent >= 0) memcpy(bits, &scratch->nodes[(row - node + parent) * words], 8 * words);
                bits[node / 64] |= (uint64_t)1 << node % 64;
            }
        }
    }

    // From which position on each row sees, by a layer's window.
    void find_firsts(int64_t window) {
        int64_t* firsts = sized(scratch->firsts, rows);
        for (int64_t row = 0; row < rows; row++) {
            int64_t first = window ? pass->positions[row] + 1 - window : 0;
            firsts[row] = first > 0 ? first : 0;
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

    void run_layer(const Layer& layer) {
        int64_t hidden = model->hidden, wide = model->wide, q = model->heads * model->head_dim;
        int64_t width = q + 2 * model->kv_heads * model->head_dim;
        Scratch& s = *scratch;
        norm_rows(layer.attention_norm, rows, s.x.data(), s.normed.data());
        multiply(layer.qkv, {s.normed.data(), rows, hidden, hidden}, s.qkv.data(), width);
        place(layer);
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

    void run() {
        int64_t hidden = model->hidden, q = model->heads * model->head_dim;
        Scratch& s = *scratch;
        sized(s.x, rows * hidden), sized(s.normed, rows * hidden), sized(s.narrow, rows * hidden);
        sized(s.qkv, rows * (q + 2 * model->kv_heads * model->head_dim)), sized(s.mixed, rows * q);
        sized(s.wide, 2 * rows * model->wide);
        find_tiles();
        find_limits();
        embed();
        for (int64_t i = 0; i < model->layer_count; i++) {
            run_layer(model->layers[i]);
            for (int64_t tap = 0; tap < pass->tap_count; tap++) {
                if (pass->taps[tap] != i) continue;
                for (int64_t row = 0; row < rows; row++)
                    memcpy(pass->features + (row * pass->tap_count + tap) * hidden, s.x.data() + row * hidden, 4 * hidden);
            }
        }
        for (int64_t i = 0; i < pass->wanted_count; i++)
            kernels->norm(s.x.data() + pass->wanted[i] * hidden, model->norm, model->eps, hidden, pass->hidden + i * hidden);
        if (model->head.parts[0] && pass->wanted_count)
            multiply(model->head, {pass->hidden, pass->wanted_count, hidden, hidden}, pass->logits, model->vocab);
    }
};

bool within(int64_t value, int64_t low, int64_t high) { return value >= low && value <= high; }

bool product_fits(const Product& product, int64_t columns, int64_t outputs) {
    int64_t found = 0;
    for (const Tensor* part : product.parts)
        if (part) {
            if (part->columns != (is_float(part->info) ? columns : (columns + BLOCK - 1) / BLOCK * BLOCK)) return false;
            found += part->rows;
        }
    return product.parts[0] && found == outputs;
}

const char* check_model(const Model* m) {
    bool sizes = within(m->layer_count, 1, 4096) && within(m->hidden, 1, MAX_SIZE) && within(m->wide, 1, MAX_SIZE) &&
                 within(m->kv_heads, 1, 4096) && within(m->heads, m->kv_heads, 4096) && m->heads % m->kv_heads == 0 &&
                 within(m->head_dim, 2, MAX_HEAD_DIM) && m->head_dim % 2 == 0 && within(m->page_bits, 0, 16) &&
                 within(m->slots, 1, (int64_t)1 << 40) && within(m->positions, 1, (int64_t)1 << 40);
    if (!sizes) return "a size of the model is out of bounds";
    if (m->embedding && (m->embedding->columns != m->hidden || m->embedding->rows != m->vocab)) return "the embedding has another shape";
    if (m->head.parts[0] && !product_fits(m->head, m->hidden, m->vocab)) return "the head has another shape";
    int64_t q = m->heads * m->head_dim, kv = m->kv_heads * m->head_dim;
    for (int64_t i = 0; i < m->layer_count; i++) {
        const Layer& layer = m->layers[i];
        if (!product_fits(layer.qkv, m->hidden, q + 2 * kv) || !product_fits(layer.out, q, m->hidden) ||
            !product_fits(layer.gate_up, m->hidden, 2 * m->wide) || !product_fits(layer.down, m->wide, m->hidden))
            return "a layer's product has another shape";
        if (!layer.attention_norm || !layer.mlp_norm || !layer.keys || !layer.values || !layer.cos_sin) return "a layer lacks a part";
    }
    return nullptr;
}

const char* check_sequence(const Model* m, const Sequence& s) {
    if (!within(s.rows, 1, MAX_SIZE) || !within(s.start, 0, MAX_SIZE) || !within(s.text, s.start, s.start + s.rows)) return "a sequence's rows are out of bounds";
    if (s.pages << m->page_bits < s.start + s.rows) return "a sequence's table is too short for its rows";
    for (int64_t i = 0; i < s.pages; i++)
        if (!within(s.table[i], 0, (m->slots >> m->page_bits) - 1)) return "a page is out of bounds";
    for (int64_t node = 0; s.parents && node < s.start + s.rows - s.text; node++)
        if (!within(s.parents[node], -1, node - 1)) return "a node's parent does not come before it";
    return nullptr;
}

const char* check_pass(const Model* m, const Pass* p) {
    if (!within(p->rows, 1, 1 << 20) || !within(p->threads, 1, 1 << 20) || !within(p->wanted_count, 0, p->rows)) return "a size of the pass is out of bounds";
    if (!p->embedded && !m->embedding) return "nothing is embedded";
    for (int64_t i = 0; i < p->rows; i++)
        if (!within(p->ids[i], 0, m->vocab - 1) || !within(p->positions[i], 0, m->positions - 1) || !within(p->slots[i], 0, m->slots - 1))
            return "a row's token, position or slot is out of bounds";
    for (int64_t i = 0; i < p->wanted_count; i++)
        if (!within(p->wanted[i], 0, p->rows - 1)) return "a wanted row is out of bounds";
    int64_t rows = 0;
    for (int64_t i = 0; i < p->sequence_count; i++) {
        if (const char* fault = check_sequence(m, p->sequences[i])) return fault;
        rows += p->sequences[i].rows;
    }
    return rows == p->rows ? nullptr : "the sequences' rows are not those of the pass";
}

}  // namespace

void quantize_rows(const Kernels* kernels, Rows* rows, int64_t threads) {
    int64_t parts = rows->count * rows->columns < FEW_NUMBERS ? 1 : rows->count;
    for_parts(threads, parts, [&](int64_t part) { kernels->quantize(rows, rows->count * part / parts, rows->count * (part + 1) / parts); });
}

void run_product(const Kernels* kernels, const Product* product, const Rows* rows, int64_t threads, float* y, int64_t ldy) {
    int64_t sizes[3] = {0, 0, 0}, counts[3] = {0, 0, 0}, parts = 0;  // strips of a part, parts
    for (int i = 0; i < 3 && product->parts[i]; i++) {
        const Tensor* t = product->parts[i];
        int64_t fitting = PART_BYTES / t->strip_bytes, share = (t->strips + 4 * threads - 1) / (4 * threads);
        sizes[i] = fitting < 1 ? 1 : fitting < share ? fitting : share;
        parts += counts[i] = (t->strips + sizes[i] - 1) / sizes[i];
    }
    for_parts(threads, parts, [&](int64_t part) {
        int64_t offset = 0;
        int i = 0;
        for (; part >= counts[i]; i++) part -= counts[i], offset += product->parts[i]->rows;
        const Tensor* t = product->parts[i];
        int64_t first = part * sizes[i], end = first + sizes[i] < t->strips ? first + sizes[i] : t->strips;
        kernels->product(t, rows, first, end, y + offset, ldy);
        if (!product->bias) return;
        int64_t from = first * STRIP, count = (end * STRIP < t->rows ? end * STRIP : t->rows) - from;
        for (int64_t row = 0; row < rows->count; row++)
            kernels->add(y + row * ldy + offset + from, product->bias + offset + from, count);
    });
}

const char* run_pass(const Kernels* kernels, const Model* model, const Pass* pass) {
    if (const char* fault = check_model(model)) return fault;
    if (const char* fault = check_pass(model, pass)) return fault;
    static thread_local Scratch scratch;
    Runner runner{kernels, model, pass, &scratch, pass->rows};
    runner.run();
    return nullptr;
}
