#include "pass.h"

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
            for (int64_t row = 0; row < runner.rows; row++)
                memcpy(pass->features + (row * pass->tap_count + tap) * hidden, x + row * hidden, 4 * hidden);
        }
    }
    for (int64_t i = 0; i < pass->wanted_count; i++)
        runner.kernels->norm(x + pass->wanted[i] * hidden, model->norm, model->eps, hidden, pass->hidden + i * hidden);
    if (model->head.parts[0] && pass->wanted_count)
        runner.multiply(model->head, {pass->hidden, pass->wanted_count, hidden, hidden}, pass->logits, model->vocab);
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
    if (model->embedding && (model->embedding->columns != model->hidden || model->embedding->rows != model->vocab)) return "the embedding has another shape";
    if (const char* fault = check_pass(model, pass)) return fault;
    static thread_local Scratch scratch;
    Runner runner{kernels, model, pass, &scratch, pass->rows};
    run(runner);
    return nullptr;
}
