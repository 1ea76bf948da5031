// The best columns of a part of a row, and what its softmax needs.

static double exact_score(const Scored* s, bool noisy, int64_t i) {
    double score = (double)s->logits[i] * s->scale;
    if (s->added) score += (double)s->added[i] * s->scale;
    return noisy ? score + gumbel(noise_bits(s->key, s->tokens ? s->tokens[i] : i)) : score;
}

static void noise(const Scored* s, float* out) {
    for (int64_t i = s->first; i < s->end; i++)
        out[i - s->first] = -logf((float)exponential_noise(noise_bits(s->key, s->tokens ? s->tokens[i] : i)));
}

// Scores in floats find the candidates; those are compared in doubles. The first of equals wins, NaN loses.
static void rank(const Scored* s, const float* noise, int64_t width, Ranked* out) {
    alignas(64) float x[MAX_RANKED];
    int64_t count = s->end - s->first, padded = (count + 15) / 16 * 16;
    F scale = set1((float)s->scale), largest = set1(-INFINITY), sum = set1(0);
    for (int64_t i = 0; i < count; i += 16) {
        int n = (int)(count - i < 16 ? count - i : 16);
        F logit = load_n(s->logits + s->first + i, n);
        if (s->added) logit = add(logit, load_n(s->added + s->first + i, n));
        store(x + i, fma(logit, scale, noise ? load_n(noise + i, n) : set1(0)));
    }
    for (int64_t i = count; i < padded; i++) x[i] = -INFINITY;
    for (int64_t i = 0; i < padded; i += 16) largest = max(largest, load(x + i));
    out->most = max_lane(largest);
    for (int64_t i = 0; i < padded; i += 16) sum = add(sum, exponential(sub(load(x + i), set1(out->most))));
    out->sum = sum_lanes(sum);
    out->count = 0;
    float bound = -INFINITY;  // below it none is among the best
    for (int64_t i = 0; i < padded; i += 16) {
        if (out->count == width && max_lane(load(x + i)) < bound) continue;
        for (int64_t j = i; j < i + 16 && j < count; j++) {
            if (out->count == width && x[j] < bound) continue;
            double score = exact_score(s, noise, s->first + j);
            if (score != score) score = -INFINITY;
            int64_t at = out->count < width ? out->count++ : width;
            for (; at > 0 && score > out->best[at - 1].score; at--)
                if (at < width) out->best[at] = out->best[at - 1];
            if (at < width) out->best[at] = {score, s->first + j};
            bound = (float)out->best[out->count - 1].score;
            bound -= 1e-5f * fabsf(bound) + 1e-5f;
        }
    }
}
