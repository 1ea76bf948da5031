#include <arm_neon.h>
#include <math.h>
#include <string.h>

#include "kernels.h"
#include "sizes.h"

// A namespace of its own: what is inline here must not be merged with what is compiled for other instructions. The
// system's headers come before it.
namespace neon_dot {
#include "vector_neon.h"

constexpr int MAX_ROWS = 4;
constexpr int MAX_TURNS = 4;  // rows of a block that take turns: as many as there are registers for
#include "rows.inl"

#include "levels.inl"

#include "products.inl"

#include "attention.inl"

#include "choice.inl"

#include "tree.inl"
}  // namespace neon_dot

const Kernels KERNELS_NEON_DOT = {
    "neon-dot", neon_dot::quantize, neon_dot::product, neon_dot::attend, neon_dot::join, neon_dot::finish, neon_dot::noise, neon_dot::rank,
    neon_dot::norm, neon_dot::add_rows, neon_dot::silu_times, neon_dot::rotate,
    neon_dot::rotate_halves, neon_dot::largest, neon_dot::noisiest, neon_dot::noisiest_of_target,
};
