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

// The noise of verify/noise.py: of each token 52 bits, of which the number v between 0 and 1 and the Gumbel are made.
INLINE uint64_t noise_bits(uint64_t key, int64_t token) {
    uint64_t x = key + (uint64_t)token * 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return (x ^ x >> 31) >> 12;
}

// A Gumbel is at most -log v, and v at least a power of two: no less than the noise of these bits or larger ones.
INLINE double most_noise(uint64_t bits) { return (double)(__builtin_clzll(bits | 1) - 10) * 0.6931471805599454; }

INLINE double exponential_noise(uint64_t bits) {  // a Gumbel is its -log
    constexpr uint64_t MANTISSA = ((uint64_t)1 << 52) - 1, ONE = (uint64_t)0x3FF << 52;
    uint64_t mantissa = (bits ^ MANTISSA) | ONE;
    double rest;  // 1 - v, exactly
    memcpy(&rest, &mantissa, 8);
    rest -= 1 - 0x1p-53;
    return -log(rest);
}

INLINE double gumbel(uint64_t bits) { return -log(exponential_noise(bits)); }

// A draft's choice. Logarithms are computed only where the score could be the best.
static Best noisiest(const Scored* s) {
    constexpr int64_t CHUNK = 64;
    Best best = {-INFINITY, s->first};
    for (int64_t at = s->first; at < s->end; at += CHUNK) {
        int64_t count = s->end - at < CHUNK ? s->end - at : CHUNK;
        uint64_t bits[CHUNK];
        for (int64_t i = 0; i < count; i++) bits[i] = noise_bits(s->key, s->tokens ? s->tokens[at + i] : at + i);
        for (int64_t i = 0; i < count; i++) {
            if (sum_at(s, at + i) * s->scale + most_noise(bits[i]) < best.score) continue;
            double score = (double)s->logits[at + i] * s->scale + gumbel(bits[i]);
            if (s->added) score += (double)s->added[at + i] * s->scale;
            if (!(score <= best.score)) best = {score, at + i};
            if (score != score) return best;
        }
    }
    return best;
}

// The target's choice, as verify/seeded.py makes it: logits below the row's largest, which is finite, over the temperature
// in floats, and noise in doubles. Chunks whose best logit and best noise together are not enough are left out.
static Best noisiest_of_target(const Scored* s) {
    constexpr int64_t CHUNK = 64;
    Best best = {-INFINITY, s->first};
    for (int64_t at = s->first; at < s->end; at += CHUNK) {
        int64_t count = s->end - at < CHUNK ? s->end - at : CHUNK;
        uint64_t bits[CHUNK], least = ~(uint64_t)0;
        float most = -INFINITY;
        for (int64_t i = 0; i < count; i++) bits[i] = noise_bits(s->key, at + i);
        for (int64_t i = 0; i < count; i++) least = bits[i] < least ? bits[i] : least;
        for (int64_t i = 0; i < count; i++) most = s->logits[at + i] > most ? s->logits[at + i] : most;
        if ((double)((most - s->most) / s->temperature) + most_noise(least) < best.score) continue;
        for (int64_t i = 0; i < count; i++) {
            double chance = (double)((s->logits[at + i] - s->most) / s->temperature);
            if (chance + most_noise(bits[i]) < best.score) continue;
            double score = chance + gumbel(bits[i]);
            if (score > best.score) best = {score, at + i};
        }
    }
    return best;
}
