#include "checks.h"
#include "heads.h"
#include "runner.h"

namespace {

struct StepScratch {
    Scratch rows;
    std::vector<int64_t> ids, positions, slots, chosen;
    std::vector<float> features, hidden, joined, last, normed, logits;
    std::vector<Sequence> sequences;
};

struct StepRunner {
    const Kernels* kernels;
    const StepHead* steps;
    const Drafts* drafts;
    StepScratch* s;
    const Head& head = steps->head;
    const Model& model = head.model;

    // Rows [first, end) of each text, whose last has this token; the others' are kept.
    void add_rows(const Text& text, int64_t first, int64_t end, int64_t token) {
        for (int64_t p = first; p < end; p++) {
            int64_t slot = slot_of(model, text, p);
            s->positions.push_back(p), s->slots.push_back(slot);
            s->ids.push_back(p + 1 < end ? head.kept_tokens[slot] : token);
        }
        s->sequences.push_back({end - first, first, end, text.table, text.pages, nullptr, 0});
    }

    void clear() { s->positions.clear(), s->slots.clear(), s->ids.clear(), s->sequences.clear(); }

    // The target's tapped outputs before each row, through fc, to s->hidden.
    void fuse(Runner& runner) {
        int64_t columns = head.features, part = steps->feature_norm_columns;
        float* features = sized(s->features, runner.rows * columns);
        int64_t row = 0;
        for (int64_t i = 0; i < drafts->count; i++) {
            Text text = drafts->text(i);
            for (int64_t p = text.first; p < text.length; p++, row++) {
                float* x = features + row * columns;
                if (p) memcpy(x, head.kept_features + slot_of(model, text, p - 1) * columns, 4 * columns);
                else memset(x, 0, 4 * columns);
            }
        }
        if (steps->feature_norm)
            runner.each_row(runner.rows, columns, [&](int64_t r) {
                for (int64_t at = 0; at < columns; at += part)
                    kernels->norm(features + r * columns + at, steps->feature_norm + at, model.eps, part, features + r * columns + at);
            });
        runner.multiply(head.fc, {features, runner.rows, columns, columns}, sized(s->hidden, runner.rows * model.hidden), model.hidden);
    }

    // Rows through the layers, to the stream. only_read: of the last layer keys and values alone.
    void step(Runner& runner, bool only_read) {
        int64_t hidden = model.hidden;
        runner.prepare();
        float *joined = sized(s->joined, runner.rows * 2 * hidden), *x = s->rows.x.data();
        const float* states = s->hidden.data();
        runner.each_row(runner.rows, 2 * hidden, [&](int64_t row) {
            float *left = joined + 2 * row * hidden, *right = left + hidden;
            embed_token(head.embedding, s->ids[row], left);
            kernels->norm(left, steps->embedding_norm, model.eps, hidden, left);
            kernels->norm(states + row * hidden, steps->hidden_norm, model.eps, hidden, right);
            memcpy(x + row * hidden, steps->normed_residual ? right : states + row * hidden, 4 * hidden);
        });
        for (int64_t i = 0; i < model.layer_count; i++) {
            const float* read = i ? nullptr : joined;
            if (only_read && i + 1 == model.layer_count) runner.project(model.layers[i], read);
            else runner.run_layer(model.layers[i], read);
        }
    }

    Pass pass() const {
        Pass made = {};
        made.rows = (int64_t)s->ids.size(), made.threads = drafts->threads;
        made.ids = s->ids.data(), made.positions = s->positions.data(), made.slots = s->slots.data();
        made.sequence_count = (int64_t)s->sequences.size(), made.sequences = s->sequences.data();
        return made;
    }

    void read() {
        clear();
        for (int64_t i = 0; i < drafts->count; i++) add_rows(drafts->text(i), drafts->firsts[i], drafts->lengths[i], drafts->last[i]);
        Pass own = pass();
        Runner runner{kernels, &model, &own, &s->rows, own.rows};
        fuse(runner);
        step(runner, drafts->tokens == 0);
    }

    // The next token of each text, from the stream at its last row; what the next step reads goes to s->hidden.
    void choose(Runner& runner, int64_t token) {
        int64_t hidden = model.hidden, row = -1;
        float *normed = sized(s->normed, drafts->count * hidden), *next = sized(s->hidden, drafts->count * hidden);
        for (int64_t i = 0; i < drafts->count; i++) {
            row += s->sequences[i].rows;
            const float* x = s->rows.x.data() + row * hidden;
            kernels->norm(x, model.norm, model.eps, hidden, normed + i * hidden);
            memcpy(next + i * hidden, steps->norm_output ? normed + i * hidden : x, 4 * hidden);
        }
        float* logits = sized(s->logits, drafts->count * model.vocab);
        runner.multiply(model.head, {normed, drafts->count, hidden, hidden}, logits, model.vocab);
        Choice choice = {kernels, &head, drafts, {nullptr, nullptr, 0}};
        choice.choose(logits, model.vocab, token, nullptr, drafts->chosen + token, drafts->tokens);
    }

    void draft() {
        for (int64_t token = 0; token < drafts->tokens; token++) {
            if (token) {
                clear();
                for (int64_t i = 0; i < drafts->count; i++) {
                    int64_t at = drafts->lengths[i] - 1 + token;
                    add_rows(drafts->text(i), at, at + 1, drafts->chosen[i * drafts->tokens + token - 1]);
                }
            }
            Pass own = pass();
            Runner runner{kernels, &model, &own, &s->rows, own.rows};
            if (token) step(runner, false);
            choose(runner, token);
        }
    }
};

const char* check(const StepHead* h, const Drafts* d) {
    if (const char* fault = check_head(&h->head, d, d->tokens ? d->tokens : 1)) return fault;
    if (!h->embedding_norm || !h->hidden_norm || h->head.model.layers[0].inputs != 2 * h->head.model.hidden) return "the head lacks a part";
    if (h->feature_norm && (h->feature_norm_columns < 1 || h->head.features % h->feature_norm_columns)) return "a norm has another width";
    if (d->tokens && !d->chosen) return "there is no room for the drafts";
    for (int64_t i = 0; i < d->count; i++)
        if (d->firsts[i] >= d->lengths[i]) return "a text has nothing to be read";
    return nullptr;
}

}  // namespace

const char* draft_steps(const Kernels* kernels, const StepHead* head, const Drafts* drafts) {
    if (const char* fault = check(head, drafts)) return fault;
    static thread_local StepScratch scratch;
    StepRunner runner{kernels, head, drafts, &scratch};
    runner.read();
    runner.draft();
    return nullptr;
}
