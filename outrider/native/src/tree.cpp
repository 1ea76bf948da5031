// The likeliest nodes of a block's tree: what verify/block_sampling.py's draft_tree computes, which says what a node's score is.
#include <math.h>
#include <string.h>

#include <algorithm>

#include "heads.h"
#include "memory.h"
#include "sizes.h"
#include "threads.h"

namespace {

constexpr double MIN_LOG_PROB = -100, STEP = 1e-3;

struct Node {
    int64_t token, parent;  // parent: its place among the nodes of all levels
    double total;
};

// Of one part of the columns after another: the best of all, with their log-probabilities for scores.
Ranked merged(const Ranked* parts, int64_t count, int64_t width) {
    Ranked all = {};
    std::vector<Best> best;
    double most = -INFINITY, sum = 0;
    for (int64_t i = 0; i < count; i++) {
        best.insert(best.end(), parts[i].best, parts[i].best + parts[i].count);
        most = std::max(most, (double)parts[i].most);
    }
    for (int64_t i = 0; i < count; i++) sum += parts[i].sum * exp(parts[i].most - most);
    std::stable_sort(best.begin(), best.end(), [](const Best& a, const Best& b) { return a.score > b.score; });
    all.count = std::min<int64_t>(width, (int64_t)best.size());
    for (int64_t i = 0; i < all.count; i++) {
        double log_prob = best[i].score - most - log(sum);
        all.best[i] = {log_prob > MIN_LOG_PROB ? log_prob : MIN_LOG_PROB, best[i].column};  // NaN too
    }
    return all;
}

struct TreeBuilder {
    const Kernels* kernels;
    const Head* head;
    const Drafts* drafts;
    Bias bias;
    std::vector<std::vector<Node>> nodes{(size_t)drafts->count};
    int64_t vocab = head->model.vocab, strips = (vocab + STRIP - 1) / STRIP, part_strips = MAX_RANKED / STRIP;
    int64_t parts = (strips + part_strips - 1) / part_strips;

    // Each text's nodes of one level, from logits [count, ldl]. wide: nodes of the level above, its last.
    void grow(const float* logits, int64_t ldl, int64_t level, int64_t wide) {
        static thread_local std::vector<float> inputs, added;
        static thread_local std::vector<Ranked> found;
        Ranked* ranked = sized(found, drafts->count * wide * parts);
        float *x = sized(inputs, drafts->count * wide * bias.rank), *y = bias.after ? sized(added, drafts->count * wide * vocab) : nullptr;
        for (int64_t i = 0; y && i < drafts->count * wide; i++)
            memcpy(x + i * bias.rank, bias.before + before(i / wide, i % wide, wide, level) * bias.rank, 4 * bias.rank);
        for_parts(drafts->threads, drafts->count * parts, [&](int64_t part) {
            int64_t i = part / parts, strip = part % parts * part_strips, end = std::min(strip + part_strips, strips);
            Text text = drafts->text(i);
            if (y) {
                Rows rows = {wide, bias.rank, 0, x + i * wide * bias.rank, bias.rank, nullptr, nullptr, nullptr, nullptr, nullptr};
                kernels->product(bias.after->parts[0], &rows, strip, end, y + i * wide * vocab, vocab);
            }
            float added_noise[MAX_RANKED];
            bool noisy = text.temperature > 0;
            Scored scored = {};
            scored.logits = logits + i * ldl, scored.tokens = head->tokens, scored.scale = 1;
            scored.first = strip * STRIP, scored.end = std::min(end * STRIP, vocab);
            if (noisy) {
                scored.scale = 1 / text.temperature, scored.key = noise_key(text.seed, text.length + level);
                kernels->noise(&scored, added_noise);
            }
            for (int64_t node = 0; node < wide; node++) {
                scored.added = y ? y + (i * wide + node) * vocab : nullptr;
                kernels->rank(&scored, noisy ? added_noise : nullptr, drafts->tree_width, ranked + (i * wide + node) * parts + part % parts);
            }
        });
        for (int64_t i = 0; i < drafts->count; i++) extend(nodes[i], ranked + i * wide * parts, level, wide);
    }

    int64_t before(int64_t text, int64_t node, int64_t wide, int64_t level) const {
        return level ? nodes[text][nodes[text].size() - wide + node].token : drafts->last[text];
    }

    void extend(std::vector<Node>& own, const Ranked* ranked, int64_t level, int64_t wide) const {
        std::vector<Node> children;
        int64_t first = (int64_t)own.size() - wide;
        for (int64_t node = 0; node < wide; node++) {
            Ranked best = merged(ranked + node * parts, parts, drafts->tree_width);
            for (int64_t i = 0; i < best.count; i++) {
                int64_t column = best.best[i].column;
                children.push_back({head->tokens ? head->tokens[column] : column, level ? first + node : -1,
                                    (level ? own[first + node].total : 0) + best.best[i].score - STEP});
            }
        }
        std::stable_sort(children.begin(), children.end(), [](const Node& a, const Node& b) { return a.total > b.total; });
        int64_t kept = std::min({(int64_t)children.size(), drafts->tree_width, drafts->nodes});
        own.insert(own.end(), children.begin(), children.begin() + kept);
    }

    // The best nodes of all levels, best first: a parent comes before its children.
    void write(int64_t text) const {
        const std::vector<Node>& own = nodes[text];
        std::vector<int64_t> order(own.size()), places(own.size());
        for (size_t i = 0; i < own.size(); i++) order[i] = (int64_t)i;
        std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return own[a].total > own[b].total; });
        for (int64_t i = 0; i < drafts->nodes; i++) {
            const Node& node = own[order[i]];
            places[order[i]] = i;
            drafts->chosen[text * drafts->nodes + i] = node.token;
            drafts->parents[text * drafts->nodes + i] = node.parent < 0 ? -1 : places[node.parent];
        }
    }
};

}  // namespace

int64_t tree_level(int64_t wide, int64_t vocab, const Drafts* drafts) {
    return std::min({wide * std::min(drafts->tree_width, vocab), drafts->tree_width, drafts->nodes});
}

void draft_trees(const Kernels* kernels, const Head* head, const Drafts* drafts, Bias bias, const float* logits) {
    TreeBuilder builder{kernels, head, drafts, bias};
    int64_t vocab = head->model.vocab, wide = 1;
    for (int64_t level = 0; level < drafts->tokens; level++) {
        builder.grow(logits + level * vocab, drafts->tokens * vocab, level, wide);
        wide = tree_level(wide, vocab, drafts);
    }
    for (int64_t i = 0; i < drafts->count; i++) builder.write(i);
}
