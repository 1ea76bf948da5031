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

static void quantize(Rows* rows, int64_t first, int64_t end) {
    for (int64_t r = first; r < end; r++) {
        for (int64_t b = 0; b < rows->blocks; b++) {
            const float* x = rows->x + r * rows->ldx + b * BLOCK;
            int64_t left = rows->columns - b * BLOCK;  // columns from here on
            F low = left >= 16 ? load(x) : load_n(x, (int)left);
            F high = left >= BLOCK ? load(x + 16) : left > 16 ? load_n(x + 16, (int)(left - 16)) : set1(0);
            float most = max_lane(max(absolute(low), absolute(high)));
            float broken = sum_lanes(add(sub(low, low), sub(high, high)));  // 0, or NaN where a number is not finite
            F scale = set1(most > 0 && broken == 0 ? 127.0f / most : 0.0f);
            I ql = whole(mul(low, scale)), qh = whole(mul(high, scale));
            int64_t at = rows->at(r, b);
            store_i8(rows->q + at * BLOCK, ql), store_i8(rows->q + at * BLOCK + 16, qh);
            rows->d[at] = most / 127.0f + broken;
            int32_t left_sum = sum_lanes_i(ql), right_sum = sum_lanes_i(qh);
            rows->sums[2 * at] = left_sum, rows->sums[2 * at + 1] = right_sum;
            rows->zeros[at] = -BYTE_ZERO * (left_sum + right_sum);
            rows->d_sums[at] = rows->d[at] * (float)(left_sum + right_sum);
        }
    }
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
