// One tile's levels and scales in registers.

template <int32_t KIND> struct Tile {
    static constexpr const KindInfo INFO = *kind_info(KIND);
    static constexpr int BITS = INFO.bits;
    static constexpr ScaleStyle STYLE = INFO.style;
    static constexpr int ZERO = BITS == 8 ? BYTE_ZERO : INFO.zero;
    static constexpr bool HAS_MIN = STYLE == TWO_F16 || STYLE == TWO_BF16 || STYLE == SUPER;
    static constexpr int64_t LEVELS = level_bytes(BITS), SIZE = LEVELS + scale_bytes(STYLE), HEADER = header_bytes(STYLE);
};

// The levels of one group of 4 columns.
template <int BITS, int GROUP> INLINE B unpack(const uint8_t* p) {
    if constexpr (BITS == 8) return bytes(p + 64 * GROUP);
    B both = bytes(p + 64 * (GROUP % 4));
    B level = GROUP < 4 ? low_half(both) : high_half(both);
    if constexpr (BITS == 5) level = with_bits<GROUP, 1>(level, bytes(p + 256));
    if constexpr (BITS == 6) level = with_bits<GROUP % 4 * 2, 3>(level, bytes(p + 256 + 64 * (GROUP / 4)));
    return level;
}

struct Scales {
    F whole_d, whole_m;  // of super-blocks
    F d, m;              // of the block
    I sub_d[2];          // SUPER_6: of each half of the block
};

// Reads what is before this block, and returns where the block begins.
template <int32_t KIND> INLINE const uint8_t* read_header(Scales& s, const uint8_t* w, int64_t block) {
    using T = Tile<KIND>;
    if (!T::HEADER || block % SUPER_BLOCKS) return w;
    s.whole_d = load_f16(w);
    if (T::STYLE == SUPER) s.whole_m = sub(set1(0), load_f16(w + 2 * STRIP));
    return w + T::HEADER;
}

template <int32_t KIND> INLINE void read_scales(Scales& s, const uint8_t* p) {
    constexpr ScaleStyle STYLE = Tile<KIND>::STYLE;
    if constexpr (STYLE == ONE_F16 || STYLE == TWO_F16) s.d = load_f16(p);
    if constexpr (STYLE == TWO_F16) s.m = load_f16(p + 2 * STRIP);
    if constexpr (STYLE == ONE_BF16 || STYLE == TWO_BF16) s.d = load_bf16(p);
    if constexpr (STYLE == TWO_BF16) s.m = load_bf16(p + 2 * STRIP);
    if constexpr (STYLE == SUPER) s.d = mul(s.whole_d, load_u8(p)), s.m = mul(s.whole_m, load_u8(p + STRIP));
    if constexpr (STYLE == SUPER_6) s.d = s.whole_d, s.sub_d[0] = load_i8(p), s.sub_d[1] = load_i8(p + STRIP);
}
