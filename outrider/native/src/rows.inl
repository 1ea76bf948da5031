// What is computed of single rows: 8-bit blocks, norms, rotations, activations.

INLINE F exponential(F x) {  // NaN stays NaN
    F bounded = min(set1(88.0f), max(set1(-87.0f), x));
    F n = nearest(mul(bounded, set1(1.44269504f)));
    F r = fma(n, set1(-0.693359375f), bounded);
    r = fma(n, set1(2.12194440e-4f), r);
    F p = set1(1.9875691500e-4f);
    p = fma(p, r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    p = add(fma(mul(r, r), p, r), set1(1.0f));
    return zero_below(x, -87.0f, mul(p, power2(n)));
}

// One block of a row, whose numbers are finite.
INLINE void quantize_block(Rows* rows, int64_t at, const F (&low)[1], const F (&high)[1]) {
    float most = max_lane(max(absolute(low[0]), absolute(high[0])));
    F scale = set1(most > MIN_LARGEST ? 127.0f / most : 0.0f);
    I ql = whole(mul(low[0], scale)), qh = whole(mul(high[0], scale));
    int32_t* sums = rows->sums + 2 * at;
    store_block(rows->q + at * BLOCK, ql, qh, sums);
    rows->d[at] = most / 127.0f;
    rows->zeros[at] = -BYTE_ZERO * (sums[0] + sums[1]);
    rows->d_sums[at] = rows->d[at] * (float)(sums[0] + sums[1]);
}

// Rows of one group, side by side.
template <int ROWS> INLINE void quantize_together(Rows* rows, int64_t first) {
    int64_t begin = rows->at(first, 0), width = rows->width(first), at = begin;
    F broken[ROWS];  // 0, or NaN where a number of the row is not finite: all products with it are NaN then
    for (int r = 0; r < ROWS; r++) broken[r] = set1(0);
    const float* x = rows->x + first * rows->ldx;
    for (int64_t left = rows->columns; left > 0; left -= BLOCK, x += BLOCK, at += width) {
        F low[ROWS], high[ROWS];
        for (int r = 0; r < ROWS; r++) {
            const float* from = x + r * rows->ldx;
            low[r] = left >= 16 ? load(from) : load_n(from, (int)left);
            high[r] = left >= BLOCK ? load(from + 16) : left > 16 ? load_n(from + 16, (int)(left - 16)) : set1(0);
            broken[r] = fma(high[r], set1(0), fma(low[r], set1(0), broken[r]));
        }
        quantize_block(rows, at, low, high);
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) {
        float fault = sum_lanes(broken[r]);
        if (fault == 0) continue;
        for (at = begin + r; at < begin + r + rows->blocks * width; at += width) rows->d[at] = rows->d_sums[at] = fault;
    }
}

// first: a multiple of QUANTIZED_ROWS
static void quantize(Rows* rows, int64_t first, int64_t end) {
    for (; first + QUANTIZED_ROWS <= end; first += QUANTIZED_ROWS) quantize_together<QUANTIZED_ROWS>(rows, first);
    for (; first < end; first++) quantize_together<1>(rows, first);
}

static void norm(const float* x, const float* weight, float eps, int64_t n, float* out) {
    F squares = set1(0);
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) squares = fma(load(x + i), load(x + i), squares);
    if (i < n) squares = fma(load_n(x + i, (int)(n - i)), load_n(x + i, (int)(n - i)), squares);
    F scale = set1(1.0f / sqrtf(sum_lanes(squares) / (float)n + eps));
    for (i = 0; i + 16 <= n; i += 16) store(out + i, mul(mul(load(x + i), scale), load(weight + i)));
    if (i < n) store_n(out + i, mul(mul(load_n(x + i, (int)(n - i)), scale), load_n(weight + i, (int)(n - i))), (int)(n - i));
}

static void add_rows(float* x, const float* y, int64_t n) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) store(x + i, add(load(x + i), load(y + i)));
    if (i < n) store_n(x + i, add(load_n(x + i, (int)(n - i)), load_n(y + i, (int)(n - i))), (int)(n - i));
}

INLINE F silu_product(F gate, F up) { return mul(div(gate, add(set1(1.0f), exponential(sub(set1(0), gate)))), up); }

static void silu_times(const float* gate, const float* up, int64_t n, float* out) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) store(out + i, silu_product(load(gate + i), load(up + i)));
    int rest = (int)(n - i);
    if (rest) store_n(out + i, silu_product(load_n(gate + i, rest), load_n(up + i, rest)), rest);
}

static void rotate(float* x, const float* cos_sin, int64_t dim) {
    for (int64_t i = 0; i < dim; i += 2) {
        float a = x[i], b = x[i + 1], c = cos_sin[i], s = cos_sin[i + 1];
        x[i] = a * c - b * s, x[i + 1] = a * s + b * c;
    }
}

static void rotate_halves(float* x, const float* cos_sin, int64_t dim) {
    int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i++) {
        float a = x[i], b = x[i + half], c = cos_sin[i], s = cos_sin[i + half];
        x[i] = a * c - b * s, x[i + half] = b * c + a * s;
    }
}
