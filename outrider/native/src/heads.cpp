#include "heads.h"

#include <string.h>

#include "checks.h"
#include "pack.h"
#include "sizes.h"

void embed_token(const Table& table, int64_t token, float* out) {
    int64_t columns = table.columns;
    if (table.blocks) return unpack_row(table.blocks, token, out);
    if (table.kind == F32) {
        memcpy(out, (const float*)table.rows + token * columns, 4 * columns);
        return;
    }
    const uint16_t* row = (const uint16_t*)table.rows + token * columns;
    for (int64_t i = 0; i < columns; i++) {  // bfloat16: the upper half of a float
        uint32_t bits = (uint32_t)row[i] << 16;
        memcpy(out + i, &bits, 4);
    }
}

static const char* check_text(const Head* head, const Text& text, int64_t rows) {
    const Model& m = head->model;
    if (!within(text.length, 1, MAX_SIZE) || !within(text.first, 0, text.length) || !within(text.last, 0, head->embedding.count - 1))
        return "a text is out of bounds";
    if (text.length - 1 + rows > m.positions) return "a text is longer than the rotations";
    return check_sequence(&m, {rows, text.length - 1, text.length - 1, text.table, text.pages, nullptr, 0});
}

const char* check_head(const Head* head, const Drafts* drafts, int64_t rows) {
    const Model& m = head->model;
    if (const char* fault = check_model(&m)) return fault;
    const Table& table = head->embedding;
    bool floats = table.rows && (table.kind == F32 || table.kind == BF16);
    if (table.columns != m.hidden || (table.blocks ? table.blocks->columns != m.hidden || table.blocks->rows != table.count : !floats))
        return "the embedding has another shape";
    if (!m.norm || !m.head.parts[0] || !product_fits(head->fc, head->features, m.hidden)) return "the head lacks a part";
    if (!head->kept_tokens || !head->kept_features) return "nothing is kept of the target";
    for (int64_t i = 0; head->tokens && i < m.vocab; i++)
        if (!within(head->tokens[i], 0, table.count - 1)) return "a column's token is out of bounds";
    if (!within(drafts->count, 1, 1 << 16) || !within(drafts->tokens, 0, 1 << 10) || !within(drafts->threads, 1, 1 << 20))
        return "a size of the drafts is out of bounds";
    for (int64_t i = 0; i < drafts->count; i++)
        if (const char* fault = check_text(head, drafts->text(i), rows)) return fault;
    return nullptr;
}
