// Attention of up to 16 queries that share their keys: one lane each. Keys are taken in the order of the text, each
// query's numbers in the same order whatever queries are beside it; keys that a query does not see are not touched.

INLINE const float* slot_of(const AttentionTask* t, const float* cache, int64_t position) {
    int64_t slot = ((int64_t)t->table[position >> t->page_bits] << t->page_bits) | (position & ((1 << t->page_bits) - 1));
    return cache + slot * t->slot_stride;
}

static inline bool sees(const AttentionTask* t, int64_t row, int64_t position) {
    if (position < t->text || !t->nodes) return position >= t->firsts[row] && position < t->limits[row];
    int64_t node = position - t->text;
    return t->node_positions[node] >= t->firsts[row] && t->nodes[row * t->words + node / 64] >> (node % 64) & 1;
}

template <int KEYS> INLINE void score_keys(const AttentionTask* t, const float* qt, int64_t position) {
    const float* keys[KEYS];
    F sums[KEYS];
    for (int i = 0; i < KEYS; i++) keys[i] = slot_of(t, t->keys, position + i), sums[i] = set1(0);
    for (int64_t d = 0; d < t->dim; d++) {
        F q = load(qt + 16 * d);
        for (int i = 0; i < KEYS; i++) sums[i] = fma(q, set1(keys[i][d]), sums[i]);
    }
    for (int i = 0; i < KEYS; i++) store(t->scores + 16 * (position + i), sums[i]);
}

template <int QUERIES, int CHUNKS> INLINE void add_values(
    const AttentionTask* t, const float* weights, int64_t first, int64_t end, int64_t d, F (*sums)[CHUNKS]) {
    for (int64_t position = first; position < end; position++) {
        const float* value = slot_of(t, t->values, position) + d;
        F v[CHUNKS];
        for (int c = 0; c < CHUNKS; c++) v[c] = load(value + 16 * c);
        for (int q = 0; q < QUERIES; q++)
            for (int c = 0; c < CHUNKS; c++) sums[q][c] = fma(set1(weights[16 * position + q]), v[c], sums[q][c]);
    }
}

// Of queries [lane, lane + QUERIES): 16 * CHUNKS dimensions from d on. `shared`: all of them see [from, shared).
template <int QUERIES, int CHUNKS>
INLINE void mix_values(const AttentionTask* t, const float* totals, int lane, int64_t d, int64_t from, int64_t shared) {
    F sums[QUERIES][CHUNKS];
    for (int q = 0; q < QUERIES; q++)
        for (int c = 0; c < CHUNKS; c++) sums[q][c] = set1(0);
    for (int q = 0; q < QUERIES; q++) {
        int64_t row = (lane + q) / t->group;
        for (int64_t p = t->firsts[row]; p < from; p++)
            if (sees(t, row, p)) add_values<1, CHUNKS>(t, t->scores + lane + q, p, p + 1, d, sums + q);
    }
    add_values<QUERIES, CHUNKS>(t, t->scores + lane, from, shared, d, sums);
    for (int q = 0; q < QUERIES; q++) {
        int64_t row = (lane + q) / t->group, head = (lane + q) % t->group;
        for (int64_t p = shared; p < t->length; p++)
            if (sees(t, row, p)) add_values<1, CHUNKS>(t, t->scores + lane + q, p, p + 1, d, sums + q);
        float* out = t->out + row * t->ldo + head * t->dim + d;
        for (int c = 0; c < CHUNKS; c++) store(out + 16 * c, div(sums[q][c], set1(totals[lane + q])));
    }
}

template <int QUERIES> INLINE void mix_queries(const AttentionTask* t, const float* totals, int lane, int64_t from, int64_t shared) {
    int64_t d = 0;
    for (; d + 64 <= t->dim; d += 64) mix_values<QUERIES, 4>(t, totals, lane, d, from, shared);
    for (; d + 16 <= t->dim; d += 16) mix_values<QUERIES, 1>(t, totals, lane, d, from, shared);
    for (; d < t->dim; d++)
        for (int q = lane; q < lane + QUERIES; q++) {
            int64_t row = q / t->group, head = q % t->group;
            float sum = 0;
            for (int64_t p = t->firsts[row]; p < t->length; p++)
                if (sees(t, row, p)) sum += t->scores[16 * p + q] * slot_of(t, t->values, p)[d];
            t->out[row * t->ldo + head * t->dim + d] = sum / totals[q];
        }
}

static void attend(const AttentionTask* t) {
    float qt[16 * MAX_HEAD_DIM];
    int queries = (int)(t->rows * t->group);
    int64_t from = t->length, last_first = 0, shared = t->text;  // all rows see [last_first, shared)
    for (int64_t row = 0; row < t->rows; row++) {
        if (t->firsts[row] < from) from = t->firsts[row];
        if (t->firsts[row] > last_first) last_first = t->firsts[row];
        if (t->limits[row] < shared) shared = t->limits[row];
    }
    if (shared < last_first) shared = last_first;
    for (int64_t d = 0; d < t->dim; d++)
        for (int lane = 0; lane < 16; lane++)
            qt[16 * d + lane] = lane < queries ? t->q[lane / t->group * t->ldq + lane % t->group * t->dim + d] * t->scale : 0;
    int64_t p = from;
    for (; p + 8 <= t->length; p += 8) score_keys<8>(t, qt, p);
    for (; p < t->length; p++) score_keys<1>(t, qt, p);
    F most = set1(-INFINITY);
    for (p = from; p < t->length; p++) {
        float* s = t->scores + 16 * p;
        if (p < last_first || p >= shared)
            for (int lane = 0; lane < queries; lane++)
                if (!sees(t, lane / t->group, p)) s[lane] = -INFINITY;
        most = max(most, load(s));
    }
    F total = set1(0);
    for (p = from; p < t->length; p++) {
        F weight = exponential(sub(load(t->scores + 16 * p), most));
        store(t->scores + 16 * p, weight);
        total = add(total, weight);
    }
    float totals[16];
    store(totals, total);
    int lane = 0;
    for (; lane + 4 <= queries; lane += 4) mix_queries<4>(t, totals, lane, last_first, shared);
    for (; lane < queries; lane++) mix_queries<1>(t, totals, lane, last_first, shared);
}
