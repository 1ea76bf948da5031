// Products of tiles with rows. A block's integer sum is exact; floats are added block by block, in the order of columns.

template <int32_t KIND> struct Tile {
    static constexpr const KindInfo INFO = *kind_info(KIND);
    static constexpr int BITS = INFO.bits;
    static constexpr ScaleStyle STYLE = INFO.style;
    static constexpr int ZERO = BITS == 8 ? BYTE_ZERO : INFO.zero;
    static constexpr bool HAS_MIN = STYLE == TWO_F16 || STYLE == TWO_BF16 || STYLE == SUPER;
    static constexpr int64_t LEVELS = level_bytes(BITS), SIZE = LEVELS + scale_bytes(STYLE), HEADER = header_bytes(STYLE);
};

template <int BITS> INLINE void unpack(const uint8_t* p, B* g) {
    if constexpr (BITS == 8) {
        for (int i = 0; i < 8; i++) g[i] = bytes(p + 64 * i);
        return;
    }
    for (int i = 0; i < 4; i++) {
        B both = bytes(p + 64 * i);
        g[i] = low_half(both), g[i + 4] = high_half(both);
    }
    if constexpr (BITS == 5) {
        B high = bytes(p + 256);
        g[0] = with_bits<0, 1>(g[0], high), g[1] = with_bits<1, 1>(g[1], high);
        g[2] = with_bits<2, 1>(g[2], high), g[3] = with_bits<3, 1>(g[3], high);
        g[4] = with_bits<4, 1>(g[4], high), g[5] = with_bits<5, 1>(g[5], high);
        g[6] = with_bits<6, 1>(g[6], high), g[7] = with_bits<7, 1>(g[7], high);
    }
    if constexpr (BITS == 6) {
        for (int i = 0; i < 2; i++) {
            B high = bytes(p + 256 + 64 * i);
            B* part = g + 4 * i;
            part[0] = with_bits<0, 3>(part[0], high), part[1] = with_bits<2, 3>(part[1], high);
            part[2] = with_bits<4, 3>(part[2], high), part[3] = with_bits<6, 3>(part[3], high);
        }
    }
}

INLINE int32_t four_at(const int8_t* p) {
    int32_t four;
    memcpy(&four, p, 4);
    return four;
}

template <int BITS> INLINE I dot_half_block(I sum, const B* g, const int8_t* x) {
    for (int i = 0; i < 4; i++) sum = BITS == 8 ? dot8(sum, g[i], four_at(x + 4 * i)) : dot(sum, g[i], four_at(x + 4 * i));
    return sum;
}

// Of ROWS rows from `first` on, of which the first `kept` are stored: others are computed beside them.
template <int32_t KIND, int ROWS>
INLINE void strip_of_rows(const uint8_t* w, const Rows* rows, int64_t first, int64_t kept, float* y, int64_t ldy, int lanes) {
    using T = Tile<KIND>;
    const int64_t blocks = rows->blocks;
    const int8_t* xq = rows->q + first * blocks * BLOCK;
    const float* xd = rows->d + first * blocks;
    const float* xm = rows->d_sums + first * blocks;
    const int32_t* xs = rows->sums + first * blocks * 2;
    const int32_t* xz = rows->zeros + first * blocks;
    F sums[ROWS], whole_d = set1(0), whole_m = set1(0);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) sums[r] = set1(0);
    for (int64_t b = 0; b < blocks; b++) {
        if (T::HEADER && b % SUPER_BLOCKS == 0) {
            whole_d = load_f16(w);
            if (T::STYLE == SUPER) whole_m = sub(set1(0), load_f16(w + 2 * STRIP));
            w += T::HEADER;
        }
        for (int64_t line = 0; line < T::SIZE; line += 64) __builtin_prefetch(w + PREFETCH_BYTES + line);
        B g[8];
        unpack<T::BITS>(w, g);
        const uint8_t* scales = w + T::LEVELS;
        w += T::SIZE;
        F d = whole_d, m = whole_m;
        I sub_d[2] = {set1_i(1), set1_i(1)};
        if constexpr (T::STYLE == ONE_F16 || T::STYLE == TWO_F16) d = load_f16(scales);
        if constexpr (T::STYLE == TWO_F16) m = load_f16(scales + 2 * STRIP);
        if constexpr (T::STYLE == ONE_BF16 || T::STYLE == TWO_BF16) d = load_bf16(scales);
        if constexpr (T::STYLE == TWO_BF16) m = load_bf16(scales + 2 * STRIP);
        if constexpr (T::STYLE == SUPER) d = mul(d, load_u8(scales)), m = mul(m, load_u8(scales + STRIP));
        if constexpr (T::STYLE == SUPER_6) sub_d[0] = load_i8(scales), sub_d[1] = load_i8(scales + STRIP);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            const int8_t* x = xq + (r * blocks + b) * BLOCK;
            const int32_t* s = xs + (r * blocks + b) * 2;
            float dx = xd[r * blocks + b];
            I total;
            I left = dot_half_block<T::BITS>(set1_i(T::BITS == 8 ? xz[r * blocks + b] : -T::ZERO * s[0]), g, x);
            I right = dot_half_block<T::BITS>(set1_i(T::BITS == 8 ? 0 : -T::ZERO * s[1]), g + 4, x + 16);
            if constexpr (T::STYLE == SUPER_6) total = add_i(mul_i(left, sub_d[0]), mul_i(right, sub_d[1]));
            else total = add_i(left, right);
            sums[r] = fma(to_float(total), mul(d, set1(dx)), sums[r]);
            if constexpr (T::HAS_MIN) sums[r] = fma(m, set1(xm[r * blocks + b]), sums[r]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
        if (r >= kept) break;
        if (lanes == STRIP) store(y + (first + r) * ldy, sums[r]);
        else store_n(y + (first + r) * ldy, sums[r], lanes);
    }
}

// Columns are added in four turns, whose sums are added at the end: (0 + 1) + (2 + 3).
template <int32_t KIND, int ROWS>
INLINE void strip_of_floats(const uint8_t* w, const Rows* rows, int64_t first, float* y, int64_t ldy, int lanes) {
    constexpr int SIZE = kind_info(KIND)->bits / 8 * STRIP;
    F sums[ROWS][4];
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < 4; i++) sums[r][i] = set1(0);
    auto column = [&](int64_t c, int turn) __attribute__((always_inline)) {
        F v;
        if constexpr (KIND == F32) v = load((const float*)(w + c * SIZE));
        else if constexpr (KIND == F16) v = load_f16(w + c * SIZE);
        else v = load_bf16(w + c * SIZE);
        for (int r = 0; r < ROWS; r++) sums[r][turn] = fma(v, set1(rows->x[(first + r) * rows->ldx + c]), sums[r][turn]);
    };
    int64_t c = 0;
    for (; c + 4 <= rows->columns; c += 4) column(c, 0), column(c + 1, 1), column(c + 2, 2), column(c + 3, 3);
    if (c < rows->columns) column(c, 0);
    if (c + 1 < rows->columns) column(c + 1, 1);
    if (c + 2 < rows->columns) column(c + 2, 2);
    for (int r = 0; r < ROWS; r++)
        store_n(y + (first + r) * ldy, add(add(sums[r][0], sums[r][1]), add(sums[r][2], sums[r][3])), lanes);
}

template <int32_t KIND, int ROWS>
INLINE void strip(const uint8_t* w, const Rows* rows, int64_t first, float* y, int64_t ldy, int lanes) {
    if constexpr (is_float(kind_info(KIND))) strip_of_floats<KIND, ROWS>(w, rows, first, y, ldy, lanes);
    else strip_of_rows<KIND, ROWS>(w, rows, first, rows->count - first, y, ldy, lanes);
}

template <int32_t KIND> static void product_of(const Tensor* t, const Rows* rows, int64_t first, int64_t end, float* y, int64_t ldy) {
    constexpr int MOST = is_float(kind_info(KIND)) && MAX_ROWS > 4 ? 4 : MAX_ROWS;
    for (int64_t s = first; s < end; s++) {
        const uint8_t* w = t->data + s * t->strip_bytes;
        int lanes = t->rows - s * STRIP < STRIP ? (int)(t->rows - s * STRIP) : STRIP;
        float* out = y + s * STRIP;
        int64_t row = 0, n = rows->count;
        int64_t spare = is_float(kind_info(KIND)) ? 0 : SPARE_ROWS;  // 3 rows are computed as 4, 7 as 8
        if constexpr (MOST >= 8) for (; row + 8 - spare <= n; row += 8) strip<KIND, 8>(w, rows, row, out, ldy, lanes);
        if constexpr (MOST >= 4) for (; row + 4 - spare <= n; row += 4) strip<KIND, 4>(w, rows, row, out, ldy, lanes);
        if constexpr (MOST >= 2) for (; row + 2 <= n; row += 2) strip<KIND, 2>(w, rows, row, out, ldy, lanes);
        for (; row < n; row++) strip<KIND, 1>(w, rows, row, out, ldy, lanes);
    }
}

static void product(const Tensor* t, const Rows* rows, int64_t first, int64_t end, float* y, int64_t ldy) {
    switch (t->info->kind) {
        case F32: return product_of<F32>(t, rows, first, end, y, ldy);
        case F16: return product_of<F16>(t, rows, first, end, y, ldy);
        case BF16: return product_of<BF16>(t, rows, first, end, y, ldy);
        case Q4_0: return product_of<Q4_0>(t, rows, first, end, y, ldy);
        case Q4_1: return product_of<Q4_1>(t, rows, first, end, y, ldy);
        case Q5_0: return product_of<Q5_0>(t, rows, first, end, y, ldy);
        case Q5_1: return product_of<Q5_1>(t, rows, first, end, y, ldy);
        case Q8_0: return product_of<Q8_0>(t, rows, first, end, y, ldy);
        case Q4_K: return product_of<Q4_K>(t, rows, first, end, y, ldy);
        case Q5_K: return product_of<Q5_K>(t, rows, first, end, y, ldy);
        case Q6_K: return product_of<Q6_K>(t, rows, first, end, y, ldy);
        case INT4: return product_of<INT4>(t, rows, first, end, y, ldy);
        case INT8: return product_of<INT8>(t, rows, first, end, y, ldy);
    }
}
