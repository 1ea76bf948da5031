// One tile's levels and scales in registers.

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
