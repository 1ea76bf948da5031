// Attention of queries that share their keys, over one chunk of positions: see AttentionTask. A query's numbers are added
// in the same order whatever queries are beside it; keys and values that it does not see are not touched.

template <int N> struct Count { static constexpr int value = N; };

// Queries [0, count), by so many as the registers hold.
template <int N = QUERIES, class Body> INLINE void by_queries(int64_t count, const Body& body, int64_t first = 0) {
    for (; first + N <= count; first += N) body(first, Count<N>());
    if constexpr (N > 1) by_queries<N - 1>(count, body, first);
}

struct Chunk {
    static constexpr int64_t STRIDE = ATTENTION_CHUNK + 16;  // of scores, up to 3 of which are written beyond what is asked
    static constexpr int64_t AHEAD = 12;                      // keys that are fetched before they are needed

    const AttentionTask* t;
    int64_t base, width;           // the first position; dim in whole vectors
    float* sums;                   // [queries, width]
    int64_t at[ATTENTION_CHUNK];   // where the key of each position lies
    float q[MAX_QUERIES * MAX_HEAD_DIM], scores[MAX_QUERIES * STRIDE];

    void locate(int64_t from, int64_t to) {
        for (int64_t p = from; p < to; p++) {
            int64_t slot = ((int64_t)t->table[p >> t->page_bits] << t->page_bits) | (p & ((1 << t->page_bits) - 1));
            at[p - base] = slot * t->slot_stride;
        }
    }

    // Of a tree: the positions behind the text are those of the row's own path.
    void locate_path(int64_t row, int64_t from, int64_t to) {
        if (!t->paths) return;
        for (int64_t p = from > t->text ? from : t->text; p < to; p++) {
            int64_t place = t->text + t->paths[row * t->path_stride + p - t->text];
            int64_t slot = ((int64_t)t->table[place >> t->page_bits] << t->page_bits) | (place & ((1 << t->page_bits) - 1));
            at[p - base] = slot * t->slot_stride;
        }
    }

    void fetch(const float* cache, int64_t j, int64_t to) const {
        const char* line = (const char*)(cache + at[j + AHEAD < to ? j + AHEAD : to - 1]);
        for (int64_t byte = 0; byte < 4 * t->dim; byte += 64) __builtin_prefetch(line + byte);
    }

    template <int N> void score_keys(int64_t query, int64_t from, int64_t to) {
        for (int64_t j = from; j < to; j += 4) {
            const float* keys[4];
            for (int i = 0; i < 4; i++) keys[i] = t->keys + at[j + i < to ? j + i : to - 1];
            if (!query)  // what follows finds them in the cache
                for (int i = 0; i < 4; i++) fetch(t->keys, j + i, to);
            if (query == QUERIES)  // keys are in the cache: values come meanwhile
                for (int i = 0; i < 4; i++)
                    for (int64_t byte = 0; byte < 4 * t->dim; byte += 64)
                        __builtin_prefetch((const char*)(t->values + (keys[i] - t->keys)) + byte, 0, PREFETCH_HINT);
            F dots[N][4];
            for (int n = 0; n < N; n++)
                for (int i = 0; i < 4; i++) dots[n][i] = set1(0);
            int64_t d = 0;
            for (; d + 16 <= t->dim; d += 16)
                for (int i = 0; i < 4; i++) {
                    F key = load(keys[i] + d);
                    for (int n = 0; n < N; n++) dots[n][i] = fma(load(q + (query + n) * width + d), key, dots[n][i]);
                }
            if (d < t->dim)
                for (int i = 0; i < 4; i++) {
                    F key = load_n(keys[i] + d, (int)(t->dim - d));
                    for (int n = 0; n < N; n++) dots[n][i] = fma(load(q + (query + n) * width + d), key, dots[n][i]);
                }
            for (int n = 0; n < N; n++) sum_lanes_of_4(dots[n], scores + (query + n) * STRIDE + j);
        }
    }

    // Scores of queries [query, query + count) at positions [from, to) of the chunk.
    void score(int64_t query, int64_t count, int64_t from, int64_t to) {
        if (from < to) by_queries(count, [&](int64_t n, auto size) { score_keys<decltype(size)::value>(query + n, from, to); });
    }

    // Scores [from, to) of a query to weights; the largest score, and the sum of the weights.
    void weigh(int64_t query, int64_t from, int64_t to, float* most, float* total) {
        float* s = scores + query * STRIDE;
        int64_t first = from / 16 * 16, end = (to + 15) / 16 * 16;
        for (int64_t j = first; j < from; j++) s[j] = -INFINITY;
        for (int64_t j = to; j < end; j++) s[j] = -INFINITY;
        F largest = set1(-INFINITY), sum = set1(0);
        for (int64_t j = first; j < end; j += 16) largest = max(largest, load(s + j));
        *most = max_lane(largest), largest = set1(*most);
        for (int64_t j = first; j < end; j += 16) {
            F weight = exponential(sub(load(s + j), largest));
            store(s + j, weight), sum = add(sum, weight);
        }
        *total = sum_lanes(sum);
    }

    // To the sums of 16 * VECTORS dimensions from d on. rest: only so many of 16 are there; 0: all.
    template <int N, int VECTORS> void add_values(int64_t query, int64_t from, int64_t to, int64_t d, int rest) {
        F total[N][VECTORS];
        for (int n = 0; n < N; n++)
            for (int v = 0; v < VECTORS; v++) total[n][v] = load(sums + (query + n) * width + d + 16 * v);
        for (int64_t j = from; j < to; j++) {
            const float* value = t->values + at[j] + d;
            if (!query) fetch(t->values, j, to);
            F x[VECTORS];
            for (int v = 0; v < VECTORS; v++) x[v] = rest ? load_n(value, rest) : load(value + 16 * v);
            for (int n = 0; n < N; n++) {
                F weight = set1(scores[(query + n) * STRIDE + j]);
                for (int v = 0; v < VECTORS; v++) total[n][v] = fma(weight, x[v], total[n][v]);
            }
        }
        for (int n = 0; n < N; n++)
            for (int v = 0; v < VECTORS; v++) store(sums + (query + n) * width + d + 16 * v, total[n][v]);
    }

    void mix(int64_t query, int64_t count, int64_t from, int64_t to) {
        if (from >= to) return;
        by_queries(count, [&](int64_t n, auto size) {
            constexpr int N = decltype(size)::value;
            int64_t d = 0;
            for (; d + 64 <= t->dim; d += 64) add_values<N, 4>(query + n, from, to, d, 0);
            for (; d + 16 <= t->dim; d += 16) add_values<N, 1>(query + n, from, to, d, 0);
            if (d < t->dim) add_values<N, 1>(query + n, from, to, d, (int)(t->dim - d));
        });
    }
};

static void attend(const AttentionTask* t, int64_t chunk, float* part) {
    Chunk c;
    int64_t queries = t->rows * t->group, base = chunk * ATTENTION_CHUNK, end = base + ATTENTION_CHUNK;
    c.t = t, c.base = base, c.width = attention_width(t->dim), c.sums = part;
    float *most = part + queries * c.width, *total = most + queries;
    memset(part, 0, 4 * queries * c.width);
    int64_t from[MAX_QUERIES], to[MAX_QUERIES];  // of each row, in the chunk
    int64_t first = end, last = base, shared = base, shared_end = t->paths && t->text < end ? t->text : end;
    for (int64_t row = 0; row < t->rows; row++) {
        from[row] = t->firsts[row] > base ? t->firsts[row] : base, to[row] = t->limits[row] < end ? t->limits[row] : end;
        if (from[row] > shared) shared = from[row];
        if (to[row] < shared_end) shared_end = to[row];
        if (from[row] < first) first = from[row];
        if (to[row] > last) last = to[row];
    }
    if (shared_end < shared) shared_end = shared;  // all rows see [shared, shared_end)
    c.locate(first, t->paths && t->text < last ? t->text : last);
    for (int64_t i = 0; i < queries; i++) {
        const float* q = t->q + i / t->group * t->ldq + i % t->group * t->dim;
        for (int64_t d = 0; d < c.width; d++) c.q[i * c.width + d] = d < t->dim ? q[d] * t->scale : 0;
    }
    auto before = [&](int64_t row) { return (to[row] < shared ? to[row] : shared) - base; };
    auto behind = [&](int64_t row) { return (from[row] > shared_end ? from[row] : shared_end) - base; };
    for (int64_t row = 0; row < t->rows; row++)
        c.locate_path(row, from[row], to[row]), c.score(row * t->group, t->group, from[row] - base, before(row));
    c.score(0, queries, shared - base, shared_end - base);
    for (int64_t row = 0; row < t->rows; row++) {
        int64_t own = row * t->group;
        c.locate_path(row, from[row], to[row]), c.score(own, t->group, behind(row), to[row] - base);
        for (int64_t i = own; i < own + t->group; i++) {
            most[i] = -INFINITY, total[i] = 0;
            if (from[row] < to[row]) c.weigh(i, from[row] - base, to[row] - base, most + i, total + i);
        }
        c.mix(own, t->group, from[row] - base, before(row));
    }
    c.mix(0, queries, shared - base, shared_end - base);
    for (int64_t row = 0; row < t->rows; row++)
        c.locate_path(row, from[row], to[row]), c.mix(row * t->group, t->group, behind(row), to[row] - base);
}

static void join(const AttentionTask* t, float* sum, const float* part) {
    int64_t queries = t->rows * t->group, width = attention_width(t->dim);
    float *most = sum + queries * width, *total = most + queries;
    const float *part_most = part + queries * width, *part_total = part_most + queries;
    for (int64_t i = 0; i < queries; i++) {
        if (part_total[i] == 0) continue;  // it sees nothing there
        float *to = sum + i * width, both[16], scales[16];
        const float* from = part + i * width;
        if (total[i] == 0) {
            memcpy(to, from, 4 * width), most[i] = part_most[i], total[i] = part_total[i];
            continue;
        }
        float larger = most[i] > part_most[i] ? most[i] : part_most[i];
        for (int lane = 0; lane < 16; lane++) both[lane] = lane ? part_most[i] - larger : most[i] - larger;
        store(scales, exponential(load(both)));
        for (int64_t d = 0; d < width; d += 16) store(to + d, fma(load(from + d), set1(scales[1]), mul(load(to + d), set1(scales[0]))));
        most[i] = larger, total[i] = total[i] * scales[0] + part_total[i] * scales[1];
    }
}

static void finish(const AttentionTask* t, const float* sum) {
    int64_t queries = t->rows * t->group, width = attention_width(t->dim);
    for (int64_t i = 0; i < queries; i++) {
        float* out = t->out + i / t->group * t->ldo + i % t->group * t->dim;
        F total = set1(sum[queries * width + queries + i]);
        int64_t d = 0;
        for (; d + 16 <= t->dim; d += 16) store(out + d, div(load(sum + i * width + d), total));
        if (d < t->dim) store_n(out + d, div(load(sum + i * width + d), total), (int)(t->dim - d));
    }
}
