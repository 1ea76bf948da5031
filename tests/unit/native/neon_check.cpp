// Every NEON kernel beside the plain one, on random numbers: prints what differs in any bit, and ends with 1 then.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <vector>

#include "kernels.h"
#include "pack.h"

static uint32_t state = 1;
static uint32_t random_bits() { return (state = state * 1664525u + 1013904223u) >> 8; }
static float random_float() { return (float)((int)(random_bits() % 20001) - 10000) / 3000.0f; }

static int differing = 0;

template <class T> void compare(const char* what, const Kernels* kernels, const std::vector<T>& a, const std::vector<T>& b) {
    if (!memcmp(a.data(), b.data(), a.size() * sizeof(T))) return;
    printf("%s of %s differs from plain\n", what, kernels->name);
    differing = 1;
}

struct Blocks {
    std::vector<int8_t> q;
    std::vector<float> d, d_sums;
    std::vector<int32_t> sums, zeros;
    Rows rows;

    Blocks(const Kernels* kernels, const std::vector<float>& x, int64_t count, int64_t columns) {
        int64_t blocks = (columns + BLOCK - 1) / BLOCK, all = count * blocks + SPARE_BLOCKS;
        q.resize(all * BLOCK), d.resize(all), d_sums.resize(all), sums.resize(2 * all), zeros.resize(all);
        rows = {count, columns, blocks, x.data(), columns, q.data(), d.data(), d_sums.data(), sums.data(), zeros.data()};
        kernels->quantize(&rows, 0, count);
    }
};

static void check_products(const Kernels* kernels, const KindInfo* info) {
    constexpr int64_t OUTPUTS = 35, COLUMNS = 512;
    std::vector<uint8_t> source(OUTPUTS * (COLUMNS / info->block_columns) * info->block_bytes);
    for (uint8_t& byte : source) byte = (uint8_t)(random_bits() & 0xbb);  // scales of 16 bits stay finite
    Tensor t = {info, OUTPUTS, COLUMNS, (OUTPUTS + STRIP - 1) / STRIP, strip_size(info, COLUMNS), nullptr};
    std::vector<uint8_t> memory(t.strips * t.strip_bytes + 4096);
    t.data = memory.data();
    for (int64_t s = 0; s < t.strips; s++) pack_strip(&t, source.data(), nullptr, s);
    for (int64_t count : {1, 3, 7, 18}) {
        std::vector<float> x(count * COLUMNS), y(count * OUTPUTS), plain(count * OUTPUTS);
        for (float& each : x) each = random_float();
        Blocks own(kernels, x, count, COLUMNS), of_plain(&KERNELS_PLAIN, x, count, COLUMNS);
        compare("quantize", kernels, own.q, of_plain.q), compare("quantize (d)", kernels, own.d, of_plain.d);
        compare("quantize (sums)", kernels, own.sums, of_plain.sums), compare("quantize (d_sums)", kernels, own.d_sums, of_plain.d_sums);
        kernels->product(&t, &own.rows, 0, t.strips, y.data(), OUTPUTS);
        KERNELS_PLAIN.product(&t, &of_plain.rows, 0, t.strips, plain.data(), OUTPUTS);
        char what[64];
        snprintf(what, sizeof what, "product of kind %d, %d rows", info->kind, (int)count);
        compare(what, kernels, y, plain);
    }
}

static void check_rows(const Kernels* kernels) {
    constexpr int64_t N = 83;
    std::vector<float> x(N), w(N), a(N), b(N);
    for (int64_t i = 0; i < N; i++) x[i] = 20 * random_float(), w[i] = random_float();
    kernels->norm(x.data(), w.data(), 1e-5f, N, a.data()), KERNELS_PLAIN.norm(x.data(), w.data(), 1e-5f, N, b.data());
    compare("norm", kernels, a, b);
    kernels->silu_times(x.data(), w.data(), N, a.data()), KERNELS_PLAIN.silu_times(x.data(), w.data(), N, b.data());
    compare("silu_times", kernels, a, b);
    kernels->add(a.data(), x.data(), N), KERNELS_PLAIN.add(b.data(), x.data(), N);
    compare("add", kernels, a, b);
    Scored scored = {x.data(), w.data(), nullptr, 0, N, 0.7, 12345};
    std::vector<Best> found = {kernels->largest(&scored), kernels->noisiest(&scored)};
    std::vector<Best> plain = {KERNELS_PLAIN.largest(&scored), KERNELS_PLAIN.noisiest(&scored)};
    compare("choice", kernels, found, plain);
    std::vector<Ranked> ranked(2), plain_ranked(2);
    for (int i = 0; i < 2; i++) {
        const float* noise = i ? a.data() : nullptr;
        kernels->rank(&scored, noise, 7, &ranked[i]), KERNELS_PLAIN.rank(&scored, noise, 7, &plain_ranked[i]);
    }
    compare("rank", kernels, ranked, plain_ranked);
}

// Rows of a chain, then nodes of a tree behind a text, over the end of a chunk.
static void check_attention(const Kernels* kernels, bool tree) {
    constexpr int64_t ROWS = 3, GROUP = 3, DIM = 72, LENGTH = ATTENTION_CHUNK + 29, PAGES = LENGTH / 8 + 1, QUERIES = ROWS * GROUP;
    std::vector<float> q(QUERIES * DIM), cache(2 * PAGES * 8 * DIM);
    for (float& each : q) each = random_float();
    for (float& each : cache) each = random_float();
    std::vector<int32_t> table(PAGES);
    for (int64_t i = 0; i < PAGES; i++) table[i] = (int32_t)((7 * i + 2) % PAGES);
    int64_t text = tree ? ATTENTION_CHUNK - 1 : LENGTH, firsts[ROWS] = {0, 2, 5};
    int64_t limits[ROWS] = {tree ? text + 1 : LENGTH - 2, tree ? text + 3 : LENGTH - 1, tree ? text + 2 : LENGTH};
    int32_t paths[ROWS][3] = {{1, 0, 0}, {0, 2, 4}, {1, 3, 0}};
    std::vector<float> outs[2], sums[2];
    for (int i = 0; i < 2; i++) {
        const Kernels* own = i ? &KERNELS_PLAIN : kernels;
        int64_t size = QUERIES * (attention_width(DIM) + 2);
        outs[i].resize(q.size()), sums[i].resize(2 * size);
        AttentionTask task = {};
        task.q = q.data(), task.ldq = GROUP * DIM, task.out = outs[i].data(), task.ldo = GROUP * DIM;
        task.rows = ROWS, task.group = GROUP, task.dim = DIM;
        task.keys = cache.data(), task.values = cache.data() + PAGES * 8 * DIM, task.slot_stride = DIM;
        task.table = table.data(), task.page_bits = 3, task.text = text, task.limits = limits, task.firsts = firsts;
        task.paths = tree ? paths[0] : nullptr, task.path_stride = 3, task.scale = 0.11f;
        for (int64_t chunk = 0; chunk < 2; chunk++) own->attend(&task, chunk, sums[i].data() + chunk * size);
        own->join(&task, sums[i].data(), sums[i].data() + size), own->finish(&task, sums[i].data());
    }
    compare(tree ? "attend (tree)" : "attend", kernels, outs[0], outs[1]);
    compare("attend (sums)", kernels, sums[0], sums[1]);
}

int main() {
    for (const Kernels* kernels : {&KERNELS_NEON, &KERNELS_NEON_DOT}) {
        for (const KindInfo& info : KINDS) check_products(kernels, &info);
        check_rows(kernels), check_attention(kernels, false), check_attention(kernels, true);
    }
    if (!differing) puts("the same bits");
    return differing;
}
