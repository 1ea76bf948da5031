// Attention of the rows of a pass: which positions each row sees, and what is computed by whom.
#pragma once
#include <string.h>

#include <vector>

#include "memory.h"
#include "pass.h"
#include "sizes.h"
#include "threads.h"

struct AttentionPiece { int64_t part, chunk; };

struct AttentionScratch {  // kept from pass to pass by each calling thread
    std::vector<int64_t> limits, firsts;
    std::vector<int32_t> paths;
    std::vector<float> sums;
    std::vector<AttentionPiece> pieces;
};

// Rows are computed in tiles, of one sequence each, and keys in chunks. Where there are few tiles, threads share the chunks.
struct Attention {
    const Kernels* kernels;
    const Model* model;
    const Pass* pass;
    AttentionScratch* scratch;

    struct Tile {
        const Sequence* sequence;
        int64_t first, rows;  // first: row of the pass
    };
    std::vector<Tile> tiles = {};
    int64_t path_stride = 0;

    void prepare(int64_t rows) {
        scratch->limits.resize(rows), scratch->firsts.resize(rows);
        find_paths(rows);
        int64_t group = model->heads / model->kv_heads, most = group > MAX_QUERIES ? 1 : MAX_QUERIES / group, first = 0;
        int64_t share = (rows * model->kv_heads + 4 * pass->threads - 1) / (4 * pass->threads);  // four tiles a thread
        if (pass->threads > 1 && share < most) most = share > MIN_TILE_ROWS ? share : MIN_TILE_ROWS;
        for (int64_t s = 0; s < pass->sequence_count; s++) {
            const Sequence* sequence = pass->sequences + s;
            for (int64_t row = 0; row < sequence->rows; row += most)
                tiles.push_back({sequence, first + row, sequence->rows - row < most ? sequence->rows - row : most});
            first += sequence->rows;
        }
    }

    // Of the nodes of trees: the nodes from the text down to each, which lie at the positions behind the text.
    void find_paths(int64_t rows) {
        int64_t* limits = scratch->limits.data();
        path_stride = 0;
        int64_t row = 0;
        for (int64_t s = 0; s < pass->sequence_count; s++) {
            const Sequence& sequence = pass->sequences[s];
            for (int64_t i = 0; i < sequence.rows; i++, row++) {
                int64_t node = i - (sequence.text - sequence.start);
                limits[row] = sequence.start + (sequence.whole ? sequence.rows : i + 1);
                if (!sequence.parents || node < 0) continue;
                int64_t parent = sequence.parents[node];
                limits[row] = parent < 0 ? sequence.text + 1 : limits[row - node + parent] + 1;
                if (limits[row] - sequence.text > path_stride) path_stride = limits[row] - sequence.text;
            }
        }
        scratch->paths.resize(rows * path_stride);
        row = 0;
        for (int64_t s = 0; s < pass->sequence_count; row += pass->sequences[s++].rows) {
            const Sequence& sequence = pass->sequences[s];
            int64_t text_rows = sequence.text - sequence.start;
            for (int64_t node = 0; sequence.parents && node < sequence.rows - text_rows; node++) {
                int32_t* path = scratch->paths.data() + (row + text_rows + node) * path_stride;
                int64_t depth = limits[row + text_rows + node] - sequence.text, parent = sequence.parents[node];
                if (depth > 1) memcpy(path, path + (parent - node) * path_stride, 4 * (depth - 1));
                path[depth - 1] = (int32_t)node;
            }
        }
    }

    // From which position on each row sees, by a layer's window and what the model skips.
    void find_firsts(int64_t window) {
        for (size_t row = 0; row < scratch->firsts.size(); row++) {
            int64_t at = pass->positions[row], first = window ? at + 1 - window : 0;
            int64_t skipped = at < model->skip ? at : model->skip;
            scratch->firsts[row] = first > skipped ? first : skipped;
        }
    }

    AttentionTask task_of(const Layer& layer, const Tile& tile, int64_t head, int64_t split, const float* qkv, float* mixed) const {
        int64_t dim = model->head_dim, kv = model->kv_heads, group = model->heads / kv;
        int64_t from = head * group + split * MAX_QUERIES, left = (head + 1) * group - from, width = model->heads + 2 * kv;
        AttentionTask task;
        task.q = qkv + (tile.first * width + from) * dim, task.ldq = width * dim;
        task.out = mixed + (tile.first * model->heads + from) * dim, task.ldo = model->heads * dim;
        task.rows = tile.rows, task.group = left < MAX_QUERIES ? left : MAX_QUERIES, task.dim = dim;
        task.keys = layer.keys + head * dim, task.values = layer.values + head * dim, task.slot_stride = kv * dim;
        task.table = tile.sequence->table, task.page_bits = model->page_bits;
        task.firsts = scratch->firsts.data() + tile.first, task.limits = scratch->limits.data() + tile.first;
        task.text = tile.sequence->text;
        task.paths = tile.sequence->parents ? scratch->paths.data() + tile.first * path_stride : nullptr;
        task.path_stride = path_stride, task.scale = model->scale;
        return task;
    }

    // qkv: [rows, heads + 2 * kv_heads, dim]; mixed: [rows, heads, dim]
    void run(const Layer& layer, const float* qkv, float* mixed) {
        find_firsts(layer.window);
        int64_t group = model->heads / model->kv_heads, splits = (group + MAX_QUERIES - 1) / MAX_QUERIES;
        int64_t shares = model->kv_heads * splits, parts = (int64_t)tiles.size() * shares;
        auto task_at = [&](int64_t part) {  // a head's tiles follow each other, as parts of one thread do: it reads the keys of fewer heads
            int64_t count = (int64_t)tiles.size(), share = part / count;
            const Tile& tile = tiles[count - 1 - part % count];  // the longest first
            return task_of(layer, tile, share / splits, share % splits, qkv, mixed);
        };
        if (pass->threads > 1 && parts < 4 * pass->threads && share_chunks(parts, task_at)) return;
        for_parts(pass->threads, parts, [&](int64_t part) {
            static thread_local std::vector<float> memory;
            AttentionTask task = task_at(part);
            float *sum = sized(memory, 2 * part_size()), *next = sum + part_size();
            Range chunks = chunks_of(task);
            kernels->attend(&task, chunks.first, sum);
            for (int64_t chunk = chunks.first + 1; chunk < chunks.end; chunk++)
                kernels->attend(&task, chunk, next), kernels->join(&task, sum, next);
            kernels->finish(&task, sum);
        });
    }

    struct Range { int64_t first, end; };

    int64_t part_size() const { return MAX_QUERIES * (attention_width(model->head_dim) + 2); }

    static Range chunks_of(const AttentionTask& task) {
        int64_t first = task.firsts[0], end = 0;
        for (int64_t row = 0; row < task.rows; row++) {
            if (task.firsts[row] < first) first = task.firsts[row];
            if (task.limits[row] > end) end = task.limits[row];
        }
        return {first / ATTENTION_CHUNK, (end + ATTENTION_CHUNK - 1) / ATTENTION_CHUNK};
    }

    // Every chunk of each part on its own, joined in the same order. False where each part has one, or that would take too much memory.
    template <class TaskAt> bool share_chunks(int64_t parts, const TaskAt& task_at) {
        std::vector<AttentionPiece>& pieces = scratch->pieces;
        pieces.clear();
        for (int64_t part = 0; part < parts; part++) {
            Range chunks = chunks_of(task_at(part));
            for (int64_t chunk = chunks.first; chunk < chunks.end; chunk++) pieces.push_back({part, chunk});
        }
        if ((int64_t)pieces.size() == parts || (int64_t)pieces.size() * part_size() > MAX_SHARED_NUMBERS) return false;
        float* sums = sized(scratch->sums, (int64_t)pieces.size() * part_size());
        for_parts(pass->threads, (int64_t)pieces.size(), [&](int64_t i) {
            AttentionTask task = task_at(pieces[i].part);
            kernels->attend(&task, pieces[i].chunk, sums + i * part_size());
        });
        for (size_t i = 0; i < pieces.size();) {
            AttentionTask task = task_at(pieces[i].part);
            float* sum = sums + i * part_size();
            size_t next = i + 1;
            for (; next < pieces.size() && pieces[next].part == pieces[i].part; next++)
                kernels->join(&task, sum, sums + next * part_size());
            kernels->finish(&task, sum);
            i = next;
        }
        return true;
    }
};
