// The best column of one row of logits: the first among equals; NaN counts as the largest.

INLINE double sum_at(const Scored* s, int64_t i) { return s->added ? (double)s->logits[i] + (double)s->added[i] : (double)s->logits[i]; }

static Best exact_largest(const Scored* s, int64_t first, int64_t end) {
    Best best = {sum_at(s, first), first};
    for (int64_t i = first + 1; i < end && best.score == best.score; i++) {
        double score = sum_at(s, i);
        if (!(score <= best.score)) best = {score, i};
    }
    return best;
}

// In floats first: rounding keeps the order, so that the best of a row is among those that round to the largest.
static Best largest(const Scored* s) {
    constexpr int64_t CHUNK = 256;
    Best best = {-INFINITY, s->first};
    for (int64_t at = s->first; at < s->end; at += CHUNK) {
        int64_t end = at + CHUNK < s->end ? at + CHUNK : s->end, i = at;
        F most = set1(-INFINITY), broken = set1(0);
        for (; i + 16 <= end; i += 16) {
            F x = s->added ? add(load(s->logits + i), load(s->added + i)) : load(s->logits + i);
            most = max(most, x), broken = add(broken, sub(x, x));
        }
        float rounded = i > at ? max_lane(most) : -INFINITY;
        bool sound = i == end && sum_lanes(broken) == 0;  // no lane is left over, and all are finite
        if (sound && rounded < (float)best.score) continue;
        Best found = exact_largest(s, at, end);
        if (at == s->first || !(found.score <= best.score)) best = found;
        if (best.score != best.score) break;
    }
    return best;
}

// With the noise of verify/noise.py. A Gumbel is at most -log v, and v at least a power of two: logarithms are computed
// only where that could be the best.
static Best noisiest(const Scored* s) {
    constexpr int64_t CHUNK = 64;
    constexpr uint64_t MANTISSA = ((uint64_t)1 << 52) - 1, ONE = (uint64_t)0x3FF << 52;
    Best best = {-INFINITY, s->first};
    for (int64_t at = s->first; at < s->end; at += CHUNK) {
        int64_t count = s->end - at < CHUNK ? s->end - at : CHUNK;
        uint64_t bits[CHUNK];
        for (int64_t i = 0; i < count; i++) {
            uint64_t x = s->key + (uint64_t)(s->tokens ? s->tokens[at + i] : at + i) * 0x9E3779B97F4A7C15u;
            x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
            x = (x ^ x >> 27) * 0x94D049BB133111EBu;
            bits[i] = (x ^ x >> 31) >> 12;
        }
        for (int64_t i = 0; i < count; i++) {
            double most = (double)(__builtin_clzll(bits[i] | 1) - 10) * 0.6931471805599454;  // of its noise, and a little
            if (sum_at(s, at + i) * s->scale + most < best.score) continue;
            uint64_t mantissa = (bits[i] ^ MANTISSA) | ONE;
            double rest;  // 1 - v, exactly
            memcpy(&rest, &mantissa, 8);
            rest -= 1 - 0x1p-53;
            double score = (double)s->logits[at + i] * s->scale - log(-log(rest));
            if (s->added) score += (double)s->added[at + i] * s->scale;
            if (!(score <= best.score)) best = {score, at + i};
            if (score != score) return best;
        }
    }
    return best;
}
