#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "kernels.h"
#include "sizes.h"

// A namespace of its own: what is inline here must not be merged with what is compiled for other instructions. The
// system's headers come before it.
namespace avx512 {
#include "vector_avx512.h"

constexpr int MAX_ROWS = 8;
constexpr int MAX_TURNS = 8;  // rows of a block that take turns: as many as there are registers for
#include "rows.inl"

#include "levels.inl"

#include "products.inl"

#include "attention.inl"

#include "choice.inl"

#include "tree.inl"
}  // namespace avx512

const Kernels KERNELS_AVX512 = {
    "avx512", avx512::quantize, avx512::product, avx512::attend, avx512::join, avx512::finish, avx512::noise, avx512::rank,
    avx512::norm, avx512::add_rows, avx512::silu_times, avx512::rotate,
    avx512::rotate_halves, avx512::largest, avx512::noisiest, avx512::noisiest_of_target,
};
