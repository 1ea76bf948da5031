// Products of many rows in tile registers: of each block a tile of integer sums [rows, 16 outputs], then floats as in
// products.inl, so that the bits are the same.

// Tile registers: two of sums and one of rows for whole groups of 16, the same for the last group, and weights.
enum TileRegister { WHOLE = 0, LAST = 3, SUMS = 0, SUMS_2 = 1, ROWS_IN = 2, WEIGHTS = 6 };

struct alignas(64) TileConfig {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    void set(int tile, int64_t count, int bytes) { rows[tile] = (uint8_t)count, row_bytes[tile] = (uint16_t)bytes; }
};

// The compiler's own functions do not say that they read memory.
template <int TILE> INLINE void load_tile(const void* p, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(TILE) : "memory");
}
template <int TILE> INLINE void store_tile(void* p) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"((int64_t)64), "i"(TILE) : "memory");
}
template <int SUM, int ROWS_TILE, int WEIGHTS_TILE> INLINE void multiply_tiles() {
    asm volatile("tilezero %%tmm%c0\n\ttdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUM), "i"(ROWS_TILE), "i"(WEIGHTS_TILE));
}

struct alignas(64) Unpacked {  // one block of a strip
    int8_t levels[512];        // without their zero
    float d[16], m[16];
    int32_t sub_d[2][16];      // SUPER_6
};

constexpr int64_t CHUNK = 4;  // blocks that are unpacked, then multiplied, then added: none waits for what was just stored

struct alignas(64) Sums {
    int32_t half[2][CHUNK][ROW_GROUP][16];  // SUPER_6: of each half of the block; others: the first alone
};

// Configures this thread's tiles; gives them back, so that switching threads does not save them.
template <int32_t KIND> struct UseTiles {
    explicit UseTiles(int64_t last_rows) {
        constexpr int BYTES = Tile<KIND>::STYLE == SUPER_6 ? BLOCK / 2 : BLOCK;  // columns of a sum
        TileConfig config;
        for (int i = 0; i < 2; i++) config.set(WHOLE + SUMS + i, ROW_GROUP, 64), config.set(LAST + SUMS + i, last_rows, 64);
        config.set(WEIGHTS, BYTES / 4, 64);
        config.set(WHOLE + ROWS_IN, ROW_GROUP, BYTES), config.set(LAST + ROWS_IN, last_rows, BYTES);
        asm volatile("ldtilecfg %0" : : "m"(config));
    }
    ~UseTiles() { asm volatile("tilerelease"); }
};

template <int32_t KIND> INLINE const uint8_t* unpack_block(Scales& scales, const uint8_t* w, int64_t b, Unpacked* out) {
    using T = Tile<KIND>;
    w = read_header<KIND>(scales, w, b);
    for (int64_t line = 0; line < T::SIZE; line += 64) __builtin_prefetch(w + PREFETCH_BYTES + line, 0, PREFETCH_HINT);
    const B g[8] = {unpack<T::BITS, 0>(w), unpack<T::BITS, 1>(w), unpack<T::BITS, 2>(w), unpack<T::BITS, 3>(w),
                    unpack<T::BITS, 4>(w), unpack<T::BITS, 5>(w), unpack<T::BITS, 6>(w), unpack<T::BITS, 7>(w)};
    for (int i = 0; i < 8; i++) _mm512_store_si512(out->levels + 64 * i, T::ZERO ? _mm512_sub_epi8(g[i], _mm512_set1_epi8((char)T::ZERO)) : g[i]);
    read_scales<KIND>(scales, w + T::LEVELS);
    store(out->d, scales.d);
    if constexpr (T::HAS_MIN) store(out->m, scales.m);
    if constexpr (T::STYLE == SUPER_6)
        for (int i = 0; i < 2; i++) _mm512_store_si512(out->sub_d[i], scales.sub_d[i]);
    return w + T::SIZE;
}

// Multiplies, and stores the tile before: one that has just been computed would have to be waited for.
template <int FIRST, int SUM> INLINE void multiply_and_store(const int8_t* w, const int8_t* x, void* before) {
    load_tile<WEIGHTS>(w, 64), load_tile<FIRST + ROWS_IN>(x, BLOCK);
    multiply_tiles<FIRST + SUM, FIRST + ROWS_IN, WEIGHTS>();
    store_tile<FIRST + SUMS + SUMS_2 - SUM>(before);
}

template <int32_t KIND, int FIRST> INLINE void multiply_block(const Unpacked* w, const int8_t* x, Sums* sums, int64_t i) {
    int64_t before = i ? i - 1 : 0;
    if constexpr (Tile<KIND>::STYLE == SUPER_6) {
        multiply_and_store<FIRST, SUMS>(w->levels, x, sums->half[1][before]);
        multiply_and_store<FIRST, SUMS_2>(w->levels + 256, x + BLOCK / 2, sums->half[0][i]);
    } else if (i % 2) multiply_and_store<FIRST, SUMS_2>(w->levels, x, sums->half[0][before]);
    else multiply_and_store<FIRST, SUMS>(w->levels, x, sums->half[0][before]);
}

template <int32_t KIND, int FIRST> INLINE void store_last(Sums* sums, int64_t i) {
    if constexpr (Tile<KIND>::STYLE == SUPER_6) store_tile<FIRST + SUMS_2>(sums->half[1][i]);
    else if (i % 2) store_tile<FIRST + SUMS_2>(sums->half[0][i]);
    else store_tile<FIRST + SUMS>(sums->half[0][i]);
}

template <int32_t KIND> INLINE F add_block(F sum, const Unpacked* w, const Sums* sums, int64_t i, int r, float d, float d_sum) {
    using T = Tile<KIND>;
    I total = _mm512_load_si512(sums->half[0][i][r]);
    if constexpr (T::STYLE == SUPER_6)
        total = add_i(mul_i(total, _mm512_load_si512(w->sub_d[0])), mul_i(_mm512_load_si512(sums->half[1][i][r]), _mm512_load_si512(w->sub_d[1])));
    sum = fma(to_float(total), mul(load(w->d), set1(d)), sum);
    if constexpr (T::HAS_MIN) sum = fma(load(w->m), set1(d_sum), sum);
    return sum;
}

struct Strip {
    const uint8_t* w;
    Sums* sums;
    Unpacked* unpacked;   // of all blocks, or of one chunk
    bool all;
    int lanes;
};

// Rows [first, first + count) of one group, count <= ROWS. UNPACK: the first group of the strip.
template <int32_t KIND, int ROWS, int FIRST, bool UNPACK>
static void strip_of_group(const Strip* strip, const Rows* rows, int64_t first, int64_t count, float* y, int64_t ldy) {
    const int64_t blocks = rows->blocks, start = rows->at(first, 0);
    const int8_t* x = rows->q + start * BLOCK;
    const float *d = rows->d + start, *d_sums = rows->d_sums + start;
    const uint8_t* w = strip->w;
    Sums* tiles = strip->sums;
    Scales scales;
    F sums[ROWS];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) sums[r] = set1(0);
    for (int64_t at = 0; at < blocks; at += CHUNK) {
        int64_t n = blocks - at < CHUNK ? blocks - at : CHUNK;
        Unpacked* unpacked = strip->unpacked + (strip->all ? at : 0);
        if constexpr (UNPACK)
            for (int64_t i = 0; i < n; i++) w = unpack_block<KIND>(scales, w, at + i, unpacked + i);
        for (int64_t i = 0; i < n; i++, x += count * BLOCK) multiply_block<KIND, FIRST>(unpacked + i, x, tiles, i);
        store_last<KIND, FIRST>(tiles, n - 1);
        for (int64_t i = 0; i < n; i++, d += count, d_sums += count) {
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; r++) sums[r] = add_block<KIND>(sums[r], unpacked + i, tiles, i, r, d[r], d_sums[r]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
        if (r >= count) break;
        if (strip->lanes == STRIP) store(y + (first + r) * ldy, sums[r]);
        else store_n(y + (first + r) * ldy, sums[r], strip->lanes);
    }
}

template <int32_t KIND, bool UNPACK>
INLINE void strip_of_last(const Strip* strip, const Rows* rows, int64_t first, int64_t count, float* y, int64_t ldy) {
    if (count <= 4) strip_of_group<KIND, 4, LAST, UNPACK>(strip, rows, first, count, y, ldy);
    else if (count <= 8) strip_of_group<KIND, 8, LAST, UNPACK>(strip, rows, first, count, y, ldy);
    else strip_of_group<KIND, 16, LAST, UNPACK>(strip, rows, first, count, y, ldy);
}

template <int32_t KIND> static void tiled_product_of(const Tensor* t, const Rows* rows, int64_t first, int64_t end, float* y, int64_t ldy) {
    static thread_local std::vector<Unpacked> memory;
    static thread_local std::vector<Sums> sums(1);
    int64_t last = rows->count % ROW_GROUP, whole = rows->count - last;
    int64_t kept = rows->count <= ROW_GROUP ? CHUNK : (rows->blocks + CHUNK - 1) / CHUNK * CHUNK;
    if ((int64_t)memory.size() < kept) memory.resize((size_t)kept);
    UseTiles<KIND> tiles(last ? last : ROW_GROUP);
    for (int64_t s = first; s < end; s++) {
        int lanes = t->rows - s * STRIP < STRIP ? (int)(t->rows - s * STRIP) : STRIP;
        Strip strip = {t->data + s * t->strip_bytes, sums.data(), memory.data(), kept > CHUNK, lanes};
        float* out = y + s * STRIP;
        if (whole) strip_of_group<KIND, 16, WHOLE, true>(&strip, rows, 0, ROW_GROUP, out, ldy);
        else strip_of_last<KIND, true>(&strip, rows, 0, last, out, ldy);
        for (int64_t row = ROW_GROUP; row < whole; row += ROW_GROUP) strip_of_group<KIND, 16, WHOLE, false>(&strip, rows, row, ROW_GROUP, out, ldy);
        if (whole && last) strip_of_last<KIND, false>(&strip, rows, whole, last, out, ldy);
    }
}

static void tiled_product(const Tensor* t, const Rows* rows, int64_t first, int64_t end, float* y, int64_t ldy) {
    if (rows->count < MIN_TILED_ROWS || is_float(t->info)) return KERNELS_AVX512.product(t, rows, first, end, y, ldy);
    switch (t->info->kind) {
        case Q4_0: return tiled_product_of<Q4_0>(t, rows, first, end, y, ldy);
        case Q4_1: return tiled_product_of<Q4_1>(t, rows, first, end, y, ldy);
        case Q5_0: return tiled_product_of<Q5_0>(t, rows, first, end, y, ldy);
        case Q5_1: return tiled_product_of<Q5_1>(t, rows, first, end, y, ldy);
        case Q8_0: return tiled_product_of<Q8_0>(t, rows, first, end, y, ldy);
        case Q4_K: return tiled_product_of<Q4_K>(t, rows, first, end, y, ldy);
        case Q5_K: return tiled_product_of<Q5_K>(t, rows, first, end, y, ldy);
        case Q6_K: return tiled_product_of<Q6_K>(t, rows, first, end, y, ldy);
        case INT4: return tiled_product_of<INT4>(t, rows, first, end, y, ldy);
        case INT8: return tiled_product_of<INT8>(t, rows, first, end, y, ldy);
    }
}
