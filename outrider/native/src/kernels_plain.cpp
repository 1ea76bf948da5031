#include <math.h>
#include <string.h>

#include "kernels.h"
#include "sizes.h"

// A namespace of its own: what is inline here must not be merged with what is compiled for other instructions. The
// system's headers come before it.
namespace plain {
#include "vector_plain.h"

constexpr int MAX_ROWS = 1;
constexpr int MAX_TURNS = 1;  // rows of a block that take turns: as many as there are registers for
#include "rows.inl"

#include "levels.inl"

#include "products.inl"

#include "attention.inl"

#include "choice.inl"

#include "tree.inl"
}  // namespace plain

const Kernels KERNELS_PLAIN = {
    "plain", plain::quantize, plain::product, plain::attend, plain::join, plain::finish, plain::noise, plain::rank,
    plain::norm, plain::add_rows, plain::silu_times, plain::rotate,
    plain::rotate_halves, plain::largest, plain::noisiest, plain::noisiest_of_target,
};
