#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "kernels.h"
#include "sizes.h"

// A namespace of its own: what is inline here must not be merged with what is compiled for other instructions. The
// system's headers come before it.
namespace avx2 {
#include "vector_avx2.h"

constexpr int MAX_ROWS = 8;
constexpr int MAX_TURNS = 1;  // rows of a block that take turns: as many as there are registers for
#include "rows.inl"

#include "levels.inl"

#include "products.inl"

#include "attention.inl"

#include "choice.inl"

#include "tree.inl"
}  // namespace avx2

const Kernels KERNELS_AVX2 = {
    "avx2", avx2::quantize, avx2::product, avx2::attend, avx2::join, avx2::finish, avx2::noise, avx2::rank,
    avx2::norm, avx2::add_rows, avx2::silu_times, avx2::rotate,
    avx2::rotate_halves, avx2::largest, avx2::noisiest, avx2::noisiest_of_target,
};
