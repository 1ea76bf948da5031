// Products of tiles with rows. A block's integer sum is exact; floats are added block by block, in the order of columns.

// Adds the products of one group of columns to each row's sum. Rows take turns, as a sum waits for the one before it.
template <int BITS, int ROWS, int GROUP> INLINE void dot_group(I* sums, const uint8_t* levels, const Sixteen* x) {
    B g = unpack<BITS, GROUP>(levels);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) sums[r] = BITS == 8 ? dot8<GROUP % 4>(sums[r], g, x[r]) : dot<GROUP % 4>(sums[r], g, x[r]);
}

template <int BITS, int ROWS, int HALF> INLINE void dot_half_block(I* sums, const uint8_t* levels, const int8_t* q) {
    Sixteen x[ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) x[r] = sixteen(q + r * BLOCK + HALF * BLOCK / 2);
    dot_group<BITS, ROWS, 4 * HALF>(sums, levels, x), dot_group<BITS, ROWS, 4 * HALF + 1>(sums, levels, x);
    dot_group<BITS, ROWS, 4 * HALF + 2>(sums, levels, x), dot_group<BITS, ROWS, 4 * HALF + 3>(sums, levels, x);
}

// The integer sums of a block.
template <int32_t KIND, int ROWS>
INLINE void dot_block(I* totals, const Scales& scales, const uint8_t* levels, const Rows* rows, int64_t at) {
    using T = Tile<KIND>;
    const int8_t* q = rows->q + at * BLOCK;
    const int32_t* s = rows->sums + 2 * at;
    if constexpr (T::STYLE == SUPER_6) {
        I right[ROWS];
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) totals[r] = set1_i(-T::ZERO * s[2 * r]);
        dot_half_block<T::BITS, ROWS, 0>(totals, levels, q);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) right[r] = set1_i(-T::ZERO * s[2 * r + 1]);
        dot_half_block<T::BITS, ROWS, 1>(right, levels, q);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) totals[r] = add_i(mul_i(totals[r], scales.sub_d[0]), mul_i(right[r], scales.sub_d[1]));
    } else {
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) totals[r] = set1_i(SUM_START + (T::BITS == 8 ? rows->zeros[at + r] : -T::ZERO * (s[2 * r] + s[2 * r + 1])));
        dot_half_block<T::BITS, ROWS, 0>(totals, levels, q);
        dot_half_block<T::BITS, ROWS, 1>(totals, levels, q);
    }
}

// Of ROWS rows from `first` on, of which the first `kept` are stored: others are computed beside them.
template <int32_t KIND, int ROWS>
INLINE void strip_of_rows(const uint8_t* w, const Rows* rows, int64_t first, int64_t kept, float* y, int64_t ldy, int lanes) {
    using T = Tile<KIND>;
    const int64_t blocks = rows->blocks;
    const int64_t width = rows->width(first);
    int64_t at = rows->at(first, 0);
    Scales scales;
    F sums[ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) sums[r] = set1(0);
    for (int64_t b = 0; b < blocks; b++, at += width) {
        w = read_header<KIND>(scales, w, b);
        for (int64_t line = 0; line < T::SIZE; line += 64) __builtin_prefetch(w + PREFETCH_BYTES + line, 0, PREFETCH_HINT);
        read_scales<KIND>(scales, w + T::LEVELS);
        constexpr int TURNS = ROWS < MAX_TURNS ? ROWS : MAX_TURNS;
        I totals[TURNS];
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            if (r % TURNS == 0) dot_block<KIND, TURNS>(totals, scales, w, rows, at + r);
            F total = T::STYLE == SUPER_6 ? to_float(totals[r % TURNS]) : sum_to_float(totals[r % TURNS]);
            sums[r] = fma(total, mul(scales.d, set1(rows->d[at + r])), sums[r]);
            if constexpr (T::HAS_MIN) sums[r] = fma(scales.m, set1(rows->d_sums[at + r]), sums[r]);
        }
        w += T::SIZE;
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
        constexpr int64_t SPARE = is_float(kind_info(KIND)) ? 0 : 1;  // 3 rows are computed as 4, 5 as 6, 7 as 8
        if constexpr (MOST >= 8) for (; row + 8 - SPARE <= n; row += 8) strip<KIND, 8>(w, rows, row, out, ldy, lanes);
        if constexpr (MAX_TURNS >= 6 && SPARE) for (; row + 6 - SPARE <= n; row += 6) strip<KIND, 6>(w, rows, row, out, ldy, lanes);
        if constexpr (MOST >= 4) for (; row + 4 - SPARE <= n; row += 4) strip<KIND, 4>(w, rows, row, out, ldy, lanes);
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
