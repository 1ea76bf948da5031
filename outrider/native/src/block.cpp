#include <math.h>

#include "checks.h"
#include "heads.h"
#include "runner.h"

namespace {

struct BlockScratch {
    Scratch rows;
    std::vector<int64_t> positions, slots, wanted;
    std::vector<float> features, context, hidden, logits;
    std::vector<Sequence> sequences;
};

struct BlockRunner {
    const Kernels* kernels;
    const BlockHead* block;
    const Drafts* drafts;
    BlockScratch* s;
    const Head& head = block->head;
    const Model& model = head.model;

    Pass pass_of(int64_t rows) const {
        Pass pass = {};
        pass.rows = rows, pass.threads = drafts->threads, pass.positions = s->positions.data(), pass.slots = s->slots.data();
        pass.sequence_count = (int64_t)s->sequences.size(), pass.sequences = s->sequences.data();
        return pass;
    }

    void add_rows(const Text& text, int64_t first, int64_t end) {
        for (int64_t p = first; p < end; p++) s->positions.push_back(p), s->slots.push_back(slot_of(model, text, p));
    }

    // Keys and values at what the target has read: of every layer, from its tapped outputs there.
    void read() {
        s->positions.clear(), s->slots.clear(), s->sequences.clear();
        for (int64_t i = 0; i < drafts->count; i++) add_rows(drafts->text(i), drafts->firsts[i], drafts->lengths[i] - 1);
        int64_t count = (int64_t)s->slots.size(), kv = model.kv_heads * model.head_dim, hidden = model.hidden;
        if (!count) return;
        Pass pass = pass_of(count);
        Runner runner{kernels, &model, &pass, &s->rows, count};
        float *features = sized(s->features, count * head.features), *context = sized(s->context, count * hidden);
        sized(s->rows.qkv, count * 2 * kv);
        runner.each_row(count, head.features, [&](int64_t row) {
            memcpy(features + row * head.features, head.kept_features + s->slots[row] * head.features, 4 * head.features);
        });
        runner.multiply(head.fc, {features, count, head.features, head.features}, context, hidden);
        runner.norm_rows(block->context_norm, count, context, context);
        Rows rows = s->rows.blocks.rows(context, hidden, count, hidden);  // the same for all layers
        quantize_rows(kernels, &rows, drafts->threads);
        for (int64_t i = 0; i < model.layer_count; i++) {
            const Layer& layer = model.layers[i];
            int64_t q = model.heads * model.head_dim;
            Product keys_values = {{layer.qkv.parts[1], layer.qkv.parts[2], nullptr}, layer.qkv.bias ? layer.qkv.bias + q : nullptr};
            run_product(kernels, &keys_values, &rows, drafts->threads, s->rows.qkv.data(), 2 * kv);
            runner.place(layer, 0);
        }
    }

    // The rows of all blocks through the layers; the wanted ones behind the last norm, and their logits.
    void run(float* hidden_rows, float* logits) {
        int64_t hidden = model.hidden, tokens = drafts->tokens;
        int64_t width = block->causal ? tokens + !block->anchored : block->rows, count = drafts->count * width;  // all are seen
        s->positions.clear(), s->slots.clear(), s->sequences.clear();
        for (int64_t i = 0; i < drafts->count; i++) {
            Text text = drafts->text(i);
            add_rows(text, text.length - 1, text.length - 1 + width);
            s->sequences.push_back({width, text.length - 1, text.length - 1 + width, text.table, text.pages, nullptr, !block->causal});
        }
        Pass pass = pass_of(count);
        Runner runner{kernels, &model, &pass, &s->rows, count};
        runner.prepare();
        float* x = s->rows.x.data();
        for (int64_t row = 0; row < count; row++) {
            if (row % width) memcpy(x + row * hidden, block->mask, 4 * hidden);
            else embed_token(head.embedding, drafts->last[row / width], x + row * hidden);
        }
        for (int64_t i = 0; i < model.layer_count; i++) runner.run_layer(model.layers[i]);
        for (int64_t i = 0; i < drafts->count * tokens; i++) {
            int64_t row = i / tokens * width + i % tokens + !block->anchored;
            kernels->norm(x + row * hidden, model.norm, model.eps, hidden, hidden_rows + i * hidden);
        }
        runner.multiply(model.head, {hidden_rows, drafts->count * tokens, hidden, hidden}, logits, model.vocab);
    }

    void choose(const float* logits) {
        int64_t tokens = drafts->tokens;
        Bias bias = {block->before ? &block->after : nullptr, block->before, block->rank};
        if (drafts->nodes) return draft_trees(kernels, &head, drafts, bias, logits);
        Choice choice = {kernels, &head, drafts, bias};
        std::vector<int64_t> last((size_t)drafts->count * tokens);
        for (int64_t i = 0; i < drafts->count; i++) last[i * tokens] = drafts->last[i];
        for (int64_t step = 0; step < tokens; step++) {
            const int64_t* before = step ? drafts->chosen + step - 1 : last.data();
            choice.choose(logits + step * model.vocab, tokens * model.vocab, step, before, drafts->chosen + step, tokens);
        }
    }

    void judge(const float* hidden_rows) {
        int64_t columns = block->confidence_columns, hidden = model.hidden;
        for (int64_t i = 0; i < drafts->count * drafts->tokens; i++) {
            int64_t before = i % drafts->tokens ? drafts->chosen[i - 1] : drafts->last[i / drafts->tokens];
            double sum = block->confidence[columns];
            for (int64_t c = 0; c < columns; c++)
                sum += (double)block->confidence[c] * (c < hidden ? hidden_rows[i * hidden + c] : block->before[before * block->rank + c - hidden]);
            drafts->confidences[i] = (float)(1 / (1 + exp(-sum)));
        }
    }
};

const char* check(const BlockHead* b, const Drafts* d) {
    if (const char* fault = check_head(&b->head, d, d->tokens ? b->rows : 1)) return fault;
    const Model& m = b->head.model;
    if (!b->context_norm || !b->mask) return "the head lacks a part";
    for (int64_t i = 0; i < m.layer_count; i++)
        if (!m.layers[i].qkv.parts[1] || !m.layers[i].qkv.parts[2]) return "a layer's queries, keys and values are no tensors of their own";
    if (!within(b->rows, 1, 1 << 10) || !within(d->tokens, 0, b->rows - !b->anchored)) return "a block has fewer rows than tokens";
    bool biased = b->rank > 0 && b->after.parts[0] && is_float(b->after.parts[0]->info) && product_fits(b->after, b->rank, m.vocab);
    if (b->before && !biased) return "the Markov head has another shape";
    int64_t columns = b->confidence_columns;
    if (b->confidence && columns != m.hidden && (!b->before || columns != m.hidden + b->rank)) return "the confidence head has another shape";
    if (d->confidences && !(b->confidence && d->chosen && !d->nodes)) return "there is nothing to be sure of";
    if (d->nodes) {
        if (!d->chosen || !d->parents || !within(d->tree_width, 1, MAX_TREE_WIDTH) || d->nodes < 0) return "a tree's size is out of bounds";
        int64_t wide = 1, all = 0;
        for (int64_t level = 0; level < d->tokens; level++) all += wide = tree_level(wide, m.vocab, d);
        if (d->nodes > all) return "a tree has more nodes than its levels hold";
    }
    return nullptr;
}

}  // namespace

const char* draft_blocks(const Kernels* kernels, const BlockHead* head, const Drafts* drafts) {
    if (const char* fault = check(head, drafts)) return fault;
    static thread_local BlockScratch scratch;
    BlockRunner runner{kernels, head, drafts, &scratch};
    runner.read();
    if (!drafts->tokens) return nullptr;
    const Model& model = head->head.model;
    int64_t count = drafts->count * drafts->tokens;
    float* hidden = drafts->hidden ? drafts->hidden : sized(scratch.hidden, count * model.hidden);
    float* logits = drafts->logits ? drafts->logits : sized(scratch.logits, count * model.vocab);
    runner.run(hidden, logits);
    if (drafts->chosen) runner.choose(logits);
    if (drafts->confidences) runner.judge(hidden);
    return nullptr;
}
