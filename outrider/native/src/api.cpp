// The C interface. Functions that can fail return null or a text that says why.
#include <stdlib.h>
#include <string.h>

#include <new>

#include "heads.h"
#include "pack.h"
#include "pass.h"
#include "sizes.h"
#include "threads.h"
#ifdef __linux__
#include <sys/mman.h>
#ifdef OUTRIDER_ARM
#include <sys/auxv.h>
#endif
#endif

#define API extern "C" __attribute__((visibility("default")))

namespace {

constexpr int64_t HUGE_PAGE = 2 << 20;

const Kernels* best_kernels() {
#ifdef OUTRIDER_X86
    __builtin_cpu_init();
    bool fma = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");  // and so f16c, whose name not all know
    if (fma && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni"))
        return kernels_amx() ? kernels_amx() : &KERNELS_AVX512;
    if (fma) return &KERNELS_AVX2;
#endif
#ifdef OUTRIDER_ARM
#ifdef __linux__
    if (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) return &KERNELS_NEON_DOT;
#endif
    return &KERNELS_NEON;
#endif
    return &KERNELS_PLAIN;
}

const Kernels* chosen = best_kernels();

uint8_t* allocate(int64_t bytes) {
    bool large = bytes >= 2 * HUGE_PAGE;
    void* memory = nullptr;
    if (posix_memalign(&memory, large ? HUGE_PAGE : 64, (size_t)bytes + 4096)) return nullptr;  // may be read ahead of
#ifdef __linux__
    if (large) madvise(memory, (size_t)bytes, MADV_HUGEPAGE);
#endif
    return (uint8_t*)memory;
}

}  // namespace

API int32_t outrider_version() { return 3; }

API int64_t outrider_struct_bytes(int32_t index) {
    constexpr int64_t SIZES[] = {sizeof(Layer), sizeof(Model), sizeof(Sequence), sizeof(Pass),
                                 sizeof(BlockHead), sizeof(StepHead), sizeof(Drafts)};
    return index >= 0 && index < 7 ? SIZES[index] : 0;
}

API const char* outrider_kernels() { return chosen->name; }

// For tests: false where this machine or build lacks them.
API int32_t outrider_use_kernels(const char* name) {
    const Kernels* best = best_kernels();
    const Kernels* all[] = {
        &KERNELS_PLAIN,
#ifdef OUTRIDER_X86
        &KERNELS_AVX2, &KERNELS_AVX512, best,
#endif
#ifdef OUTRIDER_ARM
        &KERNELS_NEON, &KERNELS_NEON_DOT,
#endif
    };
    for (const Kernels* each : all) {
        if (!strcmp(each->name, name)) return chosen = each, 1;
        if (each == best) break;  // those behind it need more than this machine has
    }
    return 0;
}

// Rows in the blocks of `kind`, `bytes` in all. order: null, or for each row which of the source's it is.
API const char* outrider_pack(int32_t kind, const uint8_t* source, int64_t bytes, int64_t rows, int64_t columns,
                              const int64_t* order, int64_t threads, Tensor** out) {
    const KindInfo* info = kind_info(kind);
    if (!info) return "this storage type has no kernel";
    if (rows < 1 || rows > MAX_SIZE || columns < 1 || columns > MAX_SIZE || columns % info->block_columns) return "rows are no whole blocks";
    if (bytes != rows * (columns / info->block_columns) * info->block_bytes) return "the rows' bytes are not those of this storage type";
    for (int64_t i = 0; order && i < rows; i++)
        if (order[i] < 0 || order[i] >= rows) return "the order names a row that is not there";
    Tensor* t = new (std::nothrow) Tensor{info, rows, columns, (rows + STRIP - 1) / STRIP, strip_size(info, columns), nullptr};
    if (!t || !(t->data = allocate(t->strips * t->strip_bytes))) {
        delete t;
        return "there is not enough memory";
    }
    int64_t parts = (t->strips + 15) / 16;
    for_parts(threads, parts, [&](int64_t part) {
        for (int64_t strip = 16 * part; strip < 16 * part + 16 && strip < t->strips; strip++) pack_strip(t, source, order, strip);
    });
    *out = t;
    return nullptr;
}

// A tensor with room for so many rows of the same kind and width, all zero.
API const char* outrider_like(const Tensor* t, int64_t rows, Tensor** out) {
    if (rows < 1 || rows > MAX_SIZE) return "a size is out of bounds";
    Tensor* made = new (std::nothrow) Tensor(*t);
    if (made) made->rows = rows, made->strips = (rows + STRIP - 1) / STRIP, made->data = allocate(made->strips * made->strip_bytes);
    if (!made || !made->data) {
        delete made;
        return "there is not enough memory";
    }
    memset(made->data, 0, (size_t)(made->strips * made->strip_bytes));
    *out = made;
    return nullptr;
}

// Rows places[i] of `to` become copies of rows ids[i] of `from`.
API const char* outrider_copy_rows(const Tensor* from, const int64_t* ids, Tensor* to, const int64_t* places, int64_t count) {
    if (from->info != to->info || from->columns != to->columns) return "the two tensors differ in kind or width";
    for (int64_t i = 0; i < count; i++) {
        if (ids[i] < 0 || ids[i] >= from->rows || places[i] < 0 || places[i] >= to->rows) return "there is no such row";
        copy_row(from, ids[i], to, places[i]);
    }
    return nullptr;
}

API void outrider_free(Tensor* t) {
    if (!t) return;
    free(t->data);
    delete t;
}

API int64_t outrider_bytes(const Tensor* t) { return t->strips * t->strip_bytes; }

// float32 [count, columns]
API const char* outrider_rows(const Tensor* t, const int64_t* ids, int64_t count, float* out) {
    for (int64_t i = 0; i < count; i++) {
        if (ids[i] < 0 || ids[i] >= t->rows) return "there is no such row";
        unpack_row(t, ids[i], out + i * t->columns);
    }
    return nullptr;
}

// y = x times the transposed product: float32 [count, columns] to [count, outputs]
API const char* outrider_product(const Product* product, const float* x, int64_t count, int64_t columns, int64_t threads, float* y) {
    int64_t outputs = 0, blocks = (columns + BLOCK - 1) / BLOCK;
    if (!product->parts[0] || count < 0 || count > MAX_SIZE || threads < 1) return "a size is out of bounds";
    for (const Tensor* part : product->parts) {
        if (!part) continue;
        if (part->columns != (is_float(part->info) ? columns : blocks * BLOCK)) return "the rows have another width";
        outputs += part->rows;
    }
    int64_t all = count * blocks + SPARE_BLOCKS;
    int8_t* q = (int8_t*)calloc((size_t)all, BLOCK + 20);
    if (!q) return "there is not enough memory";
    float* d = (float*)(q + all * BLOCK);
    float* d_sums = d + all;
    int32_t* sums = (int32_t*)(d_sums + all);
    Rows rows = {count, columns, blocks, x, columns, q, d, d_sums, sums, sums + 2 * all};
    quantize_rows(chosen, &rows, threads);
    run_product(chosen, product, &rows, threads, y, outputs);
    free(q);
    return nullptr;
}

// The 8-bit blocks of rows, for tests: see Rows.
API void outrider_quantize(const float* x, int64_t count, int64_t columns, int8_t* q, float* d, float* d_sums, int32_t* sums, int32_t* zeros) {
    Rows rows = {count, columns, (columns + BLOCK - 1) / BLOCK, x, columns, q, d, d_sums, sums, zeros};
    chosen->quantize(&rows, 0, count);
}

template <class Run> static const char* with_memory(const Run& run) {
    try {
        return run();
    } catch (const std::bad_alloc&) {
        return "there is not enough memory";
    }
}

API const char* outrider_pass(const Model* model, const Pass* pass) {
    return with_memory([&] { return run_pass(chosen, model, pass); });
}

API const char* outrider_draft_blocks(const BlockHead* head, const Drafts* drafts) {
    return with_memory([&] { return draft_blocks(chosen, head, drafts); });
}

API const char* outrider_draft_steps(const StepHead* head, const Drafts* drafts) {
    return with_memory([&] { return draft_steps(chosen, head, drafts); });
}
