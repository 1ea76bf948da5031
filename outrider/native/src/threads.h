// A pool of threads that share the parts of one piece of work after another.
#pragma once
#include <stdint.h>

typedef void (*Work)(const void* context, int64_t part);

// Run work(context, part) for all parts [0, parts) on up to `threads` threads, this one among them. Which thread takes
// which part is left open. A thread that has no core does not hold the others up, but for a part that it has begun.
void run_parts(int64_t threads, int64_t parts, Work work, const void* context);

template <class Body> void for_parts(int64_t threads, int64_t parts, const Body& body) {
    run_parts(threads, parts, [](const void* context, int64_t part) { (*(const Body*)context)(part); }, &body);
}
