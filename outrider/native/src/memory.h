#pragma once
#include <stdint.h>

#include <vector>

template <class T> T* sized(std::vector<T>& memory, int64_t count) {
    if ((int64_t)memory.size() < count) memory.resize(count);
    return memory.data();
}
