#include "kernels.h"
#ifdef OUTRIDER_NO_AMX  // the compiler does not know tiles
const Kernels* kernels_amx() { return nullptr; }
#else
#include <cpuid.h>
#include <immintrin.h>
#include <string.h>

#include <vector>

#include "sizes.h"
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

// A namespace of its own: see kernels_avx512.cpp.
namespace amx {
#include "vector_avx512.h"

constexpr int64_t MIN_TILED_ROWS = 12;  // fewer are as fast with AVX-512
#include "levels.inl"

#include "tiles.inl"

// The processor has tiles of bytes, the system saves them, and it lets this process use them.
static bool allowed() {
#if defined(__linux__) && defined(SYS_arch_prctl)
    constexpr unsigned TILE = 1u << 24, INT8_TILE = 1u << 25, XSAVED = 1u << 27, XCR0_TILES = 3u << 17;
    constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & XSAVED)) return false;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (TILE | INT8_TILE)) != (TILE | INT8_TILE)) return false;
    unsigned low, high;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & XCR0_TILES) == XCR0_TILES && !syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA);
#else
    return false;
#endif
}
}  // namespace amx

const Kernels* kernels_amx() {
    static const Kernels kernels = [] {
        Kernels made = KERNELS_AVX512;
        made.name = "amx", made.product = amx::tiled_product;
        return made;
    }();
    static const bool allowed = amx::allowed();
    return allowed ? &kernels : nullptr;
}
#endif
