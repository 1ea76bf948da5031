#include "checks.h"

#include "sizes.h"

bool product_fits(const Product& product, int64_t columns, int64_t outputs) {
    int64_t found = 0;
    for (const Tensor* part : product.parts)
        if (part) {
            if (part->columns != (is_float(part->info) ? columns : (columns + BLOCK - 1) / BLOCK * BLOCK)) return false;
            found += part->rows;
        }
    return product.parts[0] && found == outputs;
}

const char* check_model(const Model* m) {
    bool sizes = within(m->layer_count, 1, 4096) && within(m->hidden, 1, MAX_SIZE) && within(m->wide, 1, MAX_SIZE) &&
                 within(m->kv_heads, 1, 4096) && within(m->heads, m->kv_heads, 4096) && m->heads % m->kv_heads == 0 &&
                 within(m->head_dim, 2, MAX_HEAD_DIM) && m->head_dim % 2 == 0 && within(m->page_bits, 0, 16) &&
                 within(m->slots, 1, (int64_t)1 << 40) && within(m->positions, 1, (int64_t)1 << 40);
    if (!sizes) return "a size of the model is out of bounds";
    if (m->head.parts[0] && !product_fits(m->head, m->hidden, m->vocab)) return "the head has another shape";
    int64_t q = m->heads * m->head_dim, kv = m->kv_heads * m->head_dim;
    for (int64_t i = 0; i < m->layer_count; i++) {
        const Layer& layer = m->layers[i];
        if (!product_fits(layer.qkv, layer.inputs, q + 2 * kv) || !product_fits(layer.out, q, m->hidden) ||
            !product_fits(layer.gate_up, m->hidden, 2 * m->wide) || !product_fits(layer.down, m->wide, m->hidden))
            return "a layer's product has another shape";
        if (layer.attention_norm && layer.inputs != m->hidden) return "a layer's norm has another width";
        if (!layer.mlp_norm || !layer.keys || !layer.values || !layer.cos_sin) return "a layer lacks a part";
    }
    return nullptr;
}

const char* check_sequence(const Model* m, const Sequence& s) {
    if (!within(s.rows, 1, MAX_SIZE) || !within(s.start, 0, MAX_SIZE) || !within(s.text, s.start, s.start + s.rows)) return "a sequence's rows are out of bounds";
    if (s.pages << m->page_bits < s.start + s.rows) return "a sequence's table is too short for its rows";
    for (int64_t i = 0; i < s.pages; i++)
        if (!within(s.table[i], 0, (m->slots >> m->page_bits) - 1)) return "a page is out of bounds";
    for (int64_t node = 0; s.parents && node < s.start + s.rows - s.text; node++)
        if (!within(s.parents[node], -1, node - 1)) return "a node's parent does not come before it";
    return nullptr;
}
