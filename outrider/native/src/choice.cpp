#include <math.h>
#include <string.h>

#include <vector>

#include "heads.h"
#include "runner.h"

namespace {

constexpr int64_t PART_STRIPS = 128;  // of the columns that one part looks at
constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15u;

uint64_t mix(uint64_t x) {
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

}  // namespace

uint64_t noise_key(uint64_t seed, int64_t position) { return mix(mix(mix(seed + GOLDEN) + (uint64_t)position * GOLDEN)); }

Best best_of(const Best* parts, int64_t count) {
    Best most = parts[0];
    for (int64_t part = 1; part < count && most.score == most.score; part++)
        if (!(parts[part].score <= most.score)) most = parts[part];
    return most;
}

void Choice::choose(const float* logits, int64_t ldl, int64_t step, const int64_t* before, int64_t* chosen, int64_t stride) const {
    static thread_local std::vector<float> memory;
    static thread_local std::vector<Best> found;
    int64_t vocab = head->model.vocab, strips = (vocab + STRIP - 1) / STRIP, parts = (strips + PART_STRIPS - 1) / PART_STRIPS;
    float* added = bias.after ? sized(memory, drafts->count * vocab) : nullptr;
    Best* best = sized(found, drafts->count * parts);
    for_parts(drafts->threads, drafts->count * parts, [&](int64_t part) {
        Text text = drafts->text(part / parts);
        int64_t strip = part % parts * PART_STRIPS, end = strip + PART_STRIPS < strips ? strip + PART_STRIPS : strips;
        int64_t from = strip * STRIP, to = end * STRIP < vocab ? end * STRIP : vocab;
        float* own = nullptr;
        if (added) {
            own = added + part / parts * vocab;
            Rows row = {1, bias.rank, 0, bias.before + before[part / parts * stride] * bias.rank, bias.rank, nullptr, nullptr, nullptr, nullptr, nullptr};
            kernels->product(bias.after->parts[0], &row, strip, end, own, vocab);
        }
        Scored scored = {logits + part / parts * ldl, own, head->tokens, from, to, 1, 0, 0, 0};
        if (text.temperature > 0) {
            scored.scale = 1 / text.temperature, scored.key = noise_key(text.seed, text.length + step);
            best[part] = kernels->noisiest(&scored);
        } else {
            best[part] = kernels->largest(&scored);
        }
    });
    for (int64_t i = 0; i < drafts->count; i++) {
        Best most = best_of(best + i * parts, parts);
        chosen[i * stride] = head->tokens ? head->tokens[most.column] : most.column;
    }
}
