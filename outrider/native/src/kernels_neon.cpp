#include <arm_neon.h>
#include <math.h>
#include <string.h>

#include "kernels.h"
#include "sizes.h"

// A namespace of its own: what is inline here must not be merged with what is compiled for other instructions. The
// system's headers come before it.
namespace neon {
#include "vector_neon.h"

constexpr int MAX_ROWS = 4;
constexpr int MAX_TURNS = 1;  // rows of a block that take turns: as many as there are registers for
#include "rows.inl"

#include "levels.inl"

#include "products.inl"

#include "attention.inl"

#include "choice.inl"

#include "tree.inl"
}  // namespace neon

const Kernels KERNELS_NEON = {
    "neon", neon::quantize, neon::product, neon::attend, neon::join, neon::finish, neon::noise, neon::rank,
    neon::norm, neon::add_rows, neon::silu_times, neon::rotate,
    neon::rotate_halves, neon::largest, neon::noisiest, neon::noisiest_of_target,
};
