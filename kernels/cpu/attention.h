// Attention of one tile: the query rows of one KV head, over that sequence's pages.
//
// A row's bits depend on its own query and visible KV alone. Its scores accumulate over dims in one
// order; softmax partials (maximum, sum, weighted V) are taken over ranges of RANGE absolute
// positions, each from scratch, position by position in ascending order, and merged in range order.
// How rows share registers and how far their neighbours see changes neither. Positions a row does
// not see are left out by selection or by loop bounds, never multiplied by zero: pages hold anything.
#pragma once
#include <cstdint>
#include <cstring>

#include "contract.h"
#include "exp.h"

namespace draftwire {
namespace {

inline void prepare(float* to, const float* from, int n) { std::memcpy(to, from, n * 4); }
inline void prepare(uint16_t* to, const uint16_t* from, int n) { std::memcpy(to, from, n * 2); }
inline void prepare(float* to, const uint16_t* from, int n) {
    for (int i = 0; i < n; ++i) to[i] = as_float(from[i]);
}

struct Row {
    Span sees;       // absolute positions
    float max, sum;  // merged so far
    float range_max, range_sum;
};

// `Products` computes scores and weighted values: Lanes, or another with its members.
template <class Products>
struct AttentionTile {
    using T = typename Products::T;
    static constexpr bool SCALED = sizeof(T) == 1;
    const Products& products;
    const float scale;
    const int dim, rows, group;  // rows of one token
    Row* row;      // [rows]
    float* total;  // [rows][dim]

    V scores(const float* at, int block) const {
        if constexpr (SCALED)
            return load(at) * (load(products.pages.key_scales(block)) * splat(scale));
        return load(at) * splat(scale);
    }

    // Scores of the positions `s` become weights relative to their maximum.
    void weigh(int r, int base, Span s) const {
        const float infinity = __builtin_inff();
        float* own = products.score + int64_t(r) * RANGE;
        auto* weights = products.weights(r);
        auto seen = [&](const V& x, int i, float other) {
            bool whole = i >= s.begin && i + BLOCK <= s.end;
            return whole ? x : select(x, s.begin - i, s.end - i, other);
        };
        V top = splat(-infinity);
        for (int i = s.begin / BLOCK * BLOCK; i < s.end; i += BLOCK) {
            V x = scores(own + i - base, i / BLOCK);
            store(own + i - base, x);
            top = max(top, seen(x, i, -infinity));
        }
        float highest = maximum(top);
        V all = splat(0.0f);
        for (int i = s.begin / BLOCK * BLOCK; i < s.end; i += BLOCK) {
            V w = seen(exp(load(own + i - base) - splat(highest)), i, 0.0f);
            all = all + w;
            if constexpr (SCALED)
                w = seen(w * load(products.pages.value_scales(i / BLOCK)), i, 0.0f);
            store(weights + i - base, w);
        }
        row[r].range_max = highest;
        row[r].range_sum = sum(all);
    }

    // The blocks of `blocks` that all rows see all of; if there is none, an empty span at the end.
    Span common(Span blocks) const {
        for (int r = 0; r < rows; r += group) {
            Span s = row[r].sees;
            blocks = {most(blocks.begin, (s.begin + BLOCK - 1) / BLOCK),
                      least(blocks.end, s.end / BLOCK)};
        }
        return blocks;
    }

    // One block for the rows of one token, which may see part of it.
    void value_token(int first, int base, int block) const {
        Span whole = {block * BLOCK, (block + 1) * BLOCK}, s = meet(whole, row[first].sees);
        if (s.empty()) return;
        if (s.begin == whole.begin && s.end == whole.end)
            return products.value_blocks(first, group, base, {block, block + 1});
        if (s.begin % 2) products.value_alone(first, group, base, s.begin++);
        products.values(first, group, base, {s.begin / 2, s.end / 2});
        if (s.begin < s.end && s.end % 2) products.value_alone(first, group, base, s.end - 1);
    }

    void value_edges(int base, Span blocks) const {
        for (int b = blocks.begin; b < blocks.end; ++b)
            for (int r = 0; r < rows; r += group) value_token(r, base, b);
    }

    void merge(int r) const {
        Row& state = row[r];
        float top = state.max > state.range_max ? state.max : state.range_max;
        float old_part = exp(state.max - top), new_part = exp(state.range_max - top);
        state.sum = state.sum * old_part + state.range_sum * new_part;
        state.max = top;
        for (int d = 0; d < dim; d += 16) {
            float* to = total + int64_t(r) * dim + d;
            V fresh = load(products.partial + int64_t(r) * dim + d) * splat(new_part);
            store(to, fma(load(to), splat(old_part), fresh));
        }
    }

    void attend(Span tile) const {
        for (int base = tile.begin / RANGE * RANGE; base < tile.end; base += RANGE) {
            Span range = meet(tile, {base, base + RANGE});
            Span blocks = {range.begin / BLOCK, (range.end + BLOCK - 1) / BLOCK};
            products.scores(base, blocks);
            for (int r = 0; r < rows; ++r) {
                Span s = meet(range, row[r].sees);
                if (!s.empty()) weigh(r, base, s);
            }
            std::memset(products.partial, 0, sizeof(float) * rows * dim);
            Span all = common(blocks);
            if (all.empty()) all = {blocks.end, blocks.end};
            value_edges(base, {blocks.begin, all.begin});
            products.value_blocks(0, rows, base, all);
            value_edges(base, {all.end, blocks.end});
            for (int r = 0; r < rows; ++r)
                if (!meet(range, row[r].sees).empty()) merge(r);
        }
    }
};

inline int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// A tile's scratch, cut from the caller's.
struct Scratch {
    char* at;
    template <class T>
    T* take(int64_t count) {
        char* here = at;
        at += aligned(4 * count);  // no element is larger
        return reinterpret_cast<T*>(here);
    }
};

inline int whole_rows(int rows) { return (rows + 15) / 16 * 16; }

int64_t attention_scratch(int rows, int dim) {
    int64_t all = whole_rows(rows);  // tiles read and write sixteen
    return aligned(rows * sizeof(Row)) + 2 * aligned(4 * all * dim) + aligned(4 * all * RANGE) +
           aligned(4LL * rows * dim) + aligned(8LL * dim) + aligned(4096 + 128LL * dim);
}

// Q: of queries and output.
template <class Q, class Products>
void attention(const Attention& call, const Tile& tile, const Tile* next, void* scratch) {
    using T = typename Products::T;
    int dim = call.head_dim, group = call.heads / call.kv_heads, rows = tile.tokens * group;
    int64_t all_rows = whole_rows(rows);
    Scratch free = {static_cast<char*>(scratch)};
    auto* row = free.take<Row>((rows * sizeof(Row) + 3) / 4);
    auto* query = free.take<typename Products::Query>(all_rows * dim);
    auto* score = free.take<float>(all_rows * RANGE);
    auto* partial = free.take<float>(all_rows * dim);
    auto* total = free.take<float>(int64_t(rows) * dim);
    auto* spare = free.take<T>(2 * dim);
    std::memset(total, 0, sizeof(float) * rows * dim);

    int s = tile.sequence;
    int first_position = call.context_lens[s] - call.cu_query[s + 1] + tile.first;
    Span all = {first_position + tile.tokens, 0};
    for (int r = 0; r < rows; ++r) {
        int position = first_position + r / group;
        int begin = call.window > 0 ? most(0, position + 1 - call.window) : 0;
        row[r] = {{begin, position + 1}, -__builtin_inff(), 0.0f, 0.0f, 0.0f};
        all = {least(all.begin, begin), most(all.end, position + 1)};
        const Q* q = static_cast<const Q*>(call.q) + (tile.first + r / group) * call.q_row +
                     (tile.kv_head * group + r % group) * call.q_head;
        prepare(query + int64_t(r) * dim, q, dim);
    }
    Pages<T> pages(call, tile), next_pages(call, next ? *next : tile);
    Lookahead<T> ahead = {pages, next ? &next_pages : nullptr, dim};
    Products products{
        typename Products::Base{pages, ahead, dim, rows, query, score, partial, spare, free.at}};
    AttentionTile<Products>{products, call.scale, dim, rows, group, row, total}.attend(all);

    for (int r = 0; r < rows; ++r) {
        Q* to = static_cast<Q*>(call.out) + (tile.first + r / group) * call.out_row +
                (tile.kv_head * group + r % group) * call.out_head;
        V inverse = splat(row[r].sum == 0.0f ? 0.0f : 1.0f / row[r].sum);
        for (int d = 0; d < dim; d += 16)
            store(to + d, load(total + int64_t(r) * dim + d) * inverse);
    }
}

}  // namespace
}  // namespace draftwire
