#include "pass.h"

#include <math.h>

#include "checks.h"
#include "pack.h"
#include "runner.h"

namespace {

void embed(Runner& runner) {
    const Model* model = runner.model;
    const Pass* pass = runner.pass;
    int64_t hidden = model->hidden;
    runner.each_row(runner.rows, hidden, [&](int64_t row) {
        float* x = runner.scratch->x.data() + row * hidden;
        if (pass->embedded) memcpy(x, pass->embedded + row * hidden, 4 * hidden);
        else unpack_row(model->embedding, pass->ids[row], x);
        if (model->embedding_scale != 1)
            for (int64_t i = 0; i < hidden; i++) x[i] *= model->embedding_scale;
    });
}

// The target's choice after each wanted row: the best token, or the best with noise.
struct RowChoice {
    const Kernels* kernels;
    const Model* model;
    const Pass* pass;
    static constexpr int64_t PART_COLUMNS = 1 << 13;
    int64_t vocab = model->vocab, parts = (vocab + PART_COLUMNS - 1) / PART_COLUMNS;

    Scored columns(int64_t row, int64_t part) const {
        int64_t first = part * PART_COLUMNS, end = first + PART_COLUMNS < vocab ? first + PART_COLUMNS : vocab;
        return {pass->logits + row * vocab, nullptr, nullptr, first, end, 1, 0, 0, 0};
    }

    bool is_sampled(int64_t row) const { return pass->temperatures && pass->temperatures[row] > 0 && pass->chosen[row] >= 0; }

    template <class Find> void choose(const Find& find) const {
        static thread_local std::vector<Best> memory;
        int64_t count = pass->wanted_count;
        Best* found = sized(memory, count * parts);
        for_parts(pass->threads, count * parts, [&](int64_t i) { found[i] = find(i / parts, i % parts); });
        for (int64_t row = 0; row < count; row++) {
            Best best = best_of(found + row * parts, parts);
            pass->chosen[row] = isfinite(best.score) ? best.column : -1;
        }
    }

    void run() const {
        choose([&](int64_t row, int64_t part) {
            Scored scored = columns(row, part);
            return kernels->largest(&scored);
        });
        bool any = false;
        for (int64_t row = 0; row < pass->wanted_count; row++) any |= is_sampled(row);
        if (!any) return;
        choose([&](int64_t row, int64_t part) {
            if (!is_sampled(row)) return Best{part || pass->chosen[row] < 0 ? -INFINITY : 0, pass->chosen[row]};
            Scored scored = columns(row, part);
            scored.most = scored.logits[pass->chosen[row]], scored.temperature = (float)pass->temperatures[row];
            scored.key = noise_key((uint64_t)pass->seeds[row], pass->positions[pass->wanted[row]] + 1);
            return kernels->noisiest_of_target(&scored);
        });
    }
};

void run(Runner& runner) {
    const Model* model = runner.model;
    const Pass* pass = runner.pass;
    int64_t hidden = model->hidden;
    runner.prepare();
    embed(runner);
    const float* x = runner.scratch->x.data();
    for (int64_t i = 0; i < model->layer_count; i++) {
        runner.run_layer(model->layers[i]);
        for (int64_t tap = 0; tap < pass->tap_count; tap++) {
            if (pass->taps[tap] != i) continue;
            auto copy = [&](float* to, int64_t place, int64_t row) { memcpy(to + (place * pass->tap_count + tap) * hidden, x + row * hidden, 4 * hidden); };
            for (int64_t row = 0; row < runner.rows; row++) {
                if (pass->features) copy(pass->features, row, row);
                if (pass->kept_features) copy(pass->kept_features, pass->slots[row], row);
            }
        }
    }
    for (int64_t row = 0; pass->kept_tokens && row < runner.rows; row++) pass->kept_tokens[pass->slots[row]] = pass->ids[row];
    for (int64_t i = 0; i < pass->wanted_count; i++)
        runner.kernels->norm(x + pass->wanted[i] * hidden, model->norm, model->eps, hidden, pass->hidden + i * hidden);
    if (!model->head.parts[0] || !pass->wanted_count) return;
    runner.multiply(model->head, {pass->hidden, pass->wanted_count, hidden, hidden}, pass->logits, model->vocab);
    if (pass->chosen) RowChoice{runner.kernels, model, pass}.run();
}

const char* check_pass(const Model* m, const Pass* p) {
    if (!within(p->rows, 1, 1 << 20) || !within(p->threads, 1, 1 << 20) || !within(p->wanted_count, 0, p->rows)) return "a size of the pass is out of bounds";
    if (!p->embedded && !m->embedding) return "nothing is embedded";
    for (int64_t i = 0; i < p->rows; i++)
        if (!within(p->ids[i], 0, m->vocab - 1) || !within(p->positions[i], 0, m->positions - 1) || !within(p->slots[i], 0, m->slots - 1))
            return "a row's token, position or slot is out of bounds";
    for (int64_t i = 0; i < p->wanted_count; i++)
        if (!within(p->wanted[i], 0, p->rows - 1)) return "a wanted row is out of bounds";
    if (p->tap_count && !p->features && !p->kept_features) return "tapped outputs have nowhere to go";
    if (p->chosen && (!m->head.parts[0] || (p->temperatures && !p->seeds))) return "choices need logits, and noise its seeds";
    int64_t rows = 0;
    for (int64_t i = 0; i < p->sequence_count; i++) {
        if (const char* fault = check_sequence(m, p->sequences[i])) return fault;
        rows += p->sequences[i].rows;
    }
    return rows == p->rows ? nullptr : "the sequences' rows are not those of the pass";
}

}  // namespace

// A group's rows lie in the same cache lines: one thread writes them all.
void quantize_rows(const Kernels* kernels, Rows* rows, int64_t threads) {
    for_parts(threads, (rows->count + ROW_GROUP - 1) / ROW_GROUP, [&](int64_t group) {
        int64_t first = group * ROW_GROUP;
        kernels->quantize(rows, first, first + rows->width(first));
    });
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
    if (model->embedding && (model->embedding->columns != model->hidden || model->embedding->rows != model->vocab)) return "the embedding has another shape";
    if (const char* fault = check_pass(model, pass)) return fault;
    static thread_local Scratch scratch;
    Runner runner{kernels, model, pass, &scratch, pass->rows};
    run(runner);
    return nullptr;
}
