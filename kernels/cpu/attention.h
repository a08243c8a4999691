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

#include "pages.h"

namespace draftwire {
namespace {

inline V exp(V x) {  // x <= 0; NaN stays; below e^-87 saturates, which no sum can see
    x = max(splat(-87.0f), x);
    V n = round(x * splat(1.44269504088896341f));
    V r = fma(n, splat(-0.693359375f), x);  // ln 2 in two parts, the first short enough to be exact
    r = fma(n, splat(2.12194440e-4f), r);
    V y = splat(1.0f / 5040);
    const float taylor[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
    for (float c : taylor) y = fma(y, r, splat(c));
    return scale2(y, n);
}

inline float exp(float x) {
    float lanes[16];
    store(lanes, exp(splat(x)));
    return lanes[0];
}

inline float widen(float x) { return x; }
inline float widen(uint16_t x) {
    uint32_t bits = uint32_t(x) << 16;
    float y;
    std::memcpy(&y, &bits, sizeof y);
    return y;
}

template <class T>
inline void prepare(T* to, const T* from, int n) { std::memcpy(to, from, n * sizeof(T)); }
inline void prepare(float* to, const uint16_t* from, int n) {
    for (int i = 0; i < n; ++i) to[i] = widen(from[i]);
}

// Scratch of a tile, one record per query row.
struct Row {
    Span sees;               // absolute positions
    float max, sum;          // merged so far
    float range_max, range_sum;
};

template <class T, class Dot>
struct AttentionTile {
    using Query = typename Dot::Query;
    const Attention& call;
    const int dim, rows;
    const Pages<T> pages;
    const Lookahead<T> ahead;
    Row* row;        // [rows]
    Query* query;    // [rows][dim]
    float* score;    // [rows][RANGE], then the weights
    float* partial;  // [rows][dim], weighted V of this range
    float* total;    // [rows][dim]

    // Two sums per row, of every other pair of dims: one alone would wait for itself.
    template <int N>
    void score_block(const T* k, int first, float* out) const {
        Dot dot[N][2];
        const Query* q = query + int64_t(first) * dim;
        for (int d = 0; d < dim; d += 4)
            for (int half = 0; half < 2; ++half) {
                auto pair = Dot::key(k + (d + 2 * half) * BLOCK);
                for (int r = 0; r < N; ++r) dot[r][half].step(pair, q + r * dim + d + 2 * half);
            }
        for (int r = 0; r < N; ++r) {
            V both = dot[r][0].total() + dot[r][1].total();
            store(out + r * RANGE, both * splat(call.scale));
        }
    }

    void score_range(int base, Span blocks) const {
        for (int b = blocks.begin; b < blocks.end; ++b) {
            const T* k = pages.keys(b);
            float* out = score + (b * BLOCK - base);
            int r = 0;
            for (; r + Dot::ROWS <= rows; r += Dot::ROWS)
                score_block<Dot::ROWS>(k, r, out + r * RANGE);
            switch (rows - r) {
                case 3: score_block<3>(k, r, out + r * RANGE); break;
                case 2: score_block<2>(k, r, out + r * RANGE); break;
                case 1: score_block<1>(k, r, out + r * RANGE); break;
            }
        }
    }

    // Scores of the positions `s` become weights relative to their maximum.
    static void weigh(float* scores, Span s, Row& state) {
        const float infinity = __builtin_inff();
        int first = s.begin / BLOCK * BLOCK;
        V top = splat(-infinity);
        for (int i = first; i < s.end; i += BLOCK)
            top = max(top, select(load(scores + i), s.begin - i, s.end - i, -infinity));
        float highest = maximum(top);
        V all = splat(0.0f);
        for (int i = first; i < s.end; i += BLOCK) {
            V w = exp(load(scores + i) - splat(highest));
            w = select(w, s.begin - i, s.end - i, 0.0f);
            store(scores + i, w);
            all = all + w;
        }
        state.range_max = highest;
        state.range_sum = sum(all);
    }

    // partial[first .. first + R) += weights * V over `s`, for M vectors of V from dim d on.
    template <int R, int M>
    void weighted_values(int first, int base, Span s, int d) const {
        V acc[R][M];
        float* to = partial + int64_t(first) * dim + d;
        for (int r = 0; r < R; ++r)
            for (int m = 0; m < M; ++m) acc[r][m] = load(to + r * dim + m * 16);
        const float* weight = score + int64_t(first) * RANGE;
        for (int i = s.begin; i < s.end;) {
            const T* v = pages.values(i / BLOCK) + i % BLOCK * dim + d;
            int stop = least((i / BLOCK + 1) * BLOCK, s.end);
            for (; i < stop; ++i, v += dim) {
                V value[M];
                for (int m = 0; m < M; ++m) value[m] = load(v + m * 16);
                for (int r = 0; r < R; ++r) {
                    V w = splat(weight[r * RANGE + i - base]);
                    for (int m = 0; m < M; ++m) acc[r][m] = fma(w, value[m], acc[r][m]);
                }
            }
        }
        for (int r = 0; r < R; ++r)
            for (int m = 0; m < M; ++m) store(to + r * dim + m * 16, acc[r][m]);
    }

    template <int R>
    void weighted_values(int first, int base, Span s) const {
        if (s.empty()) return;
        int d = 0;
        for (; d + 16 * PV_VECTORS <= dim; d += 16 * PV_VECTORS)
            weighted_values<R, PV_VECTORS>(first, base, s, d);
        for (; d < dim; d += 16) weighted_values<R, 1>(first, base, s, d);
    }

    // R rows together where all of them see, each alone before and after: ascending for every row.
    template <int R>
    void value_rows(int first, int base, Span range) const {
        Span common = range;
        for (int r = 0; r < R; ++r) common = meet(common, row[first + r].sees);
        if (common.empty()) common = {range.end, range.end};
        for (int r = 0; r < R; ++r)
            weighted_values<1>(first + r, base,
                               meet(range, meet(row[first + r].sees, {0, common.begin})));
        weighted_values<R>(first, base, common);
        for (int r = 0; r < R; ++r)
            weighted_values<1>(first + r, base,
                               meet(range, meet(row[first + r].sees, {common.end, range.end})));
    }

    // weights * V of a strip for all rows, fetching the share of each group of rows before it.
    void value_strip(int base, Span strip) const {
        int n = strip.end - strip.begin, step;
        for (int r = 0; r < rows; r += step) {
            int left = rows - r;
            step = left >= PV_ROWS ? PV_ROWS : left >= 3 ? 3 : left;
            ahead.fetch({strip.begin + n * r / rows, strip.begin + n * (r + step) / rows});
            if (step == PV_ROWS) value_rows<PV_ROWS>(r, base, strip);
            else if (step == 3) value_rows<3>(r, base, strip);
            else if (step == 2) value_rows<2>(r, base, strip);
            else value_rows<1>(r, base, strip);
        }
    }

    void merge(int r) const {
        Row& state = row[r];
        float top = state.max > state.range_max ? state.max : state.range_max;
        float old_part = exp(state.max - top), new_part = exp(state.range_max - top);
        state.sum = state.sum * old_part + state.range_sum * new_part;
        state.max = top;
        for (int d = 0; d < dim; d += 16) {
            float* to = total + int64_t(r) * dim + d;
            V fresh = load(partial + int64_t(r) * dim + d) * splat(new_part);
            store(to, fma(load(to), splat(old_part), fresh));
        }
    }

    void attend(Span tile) const {
        // A strip costs reloading the sums, and a tile of one group of rows fetches once a strip.
        const int strip = rows > PV_ROWS ? 64 : 8;
        for (int base = tile.begin / RANGE * RANGE; base < tile.end; base += RANGE) {
            Span range = meet(tile, {base, base + RANGE});
            score_range(base, {range.begin / BLOCK, (range.end + BLOCK - 1) / BLOCK});
            for (int r = 0; r < rows; ++r) {
                Span s = meet(range, row[r].sees);
                if (!s.empty())
                    weigh(score + int64_t(r) * RANGE, {s.begin - base, s.end - base}, row[r]);
            }
            std::memset(partial, 0, sizeof(float) * rows * dim);
            for (int i = range.begin / strip * strip; i < range.end; i += strip)
                value_strip(base, meet(range, {i, i + strip}));
            for (int r = 0; r < rows; ++r)
                if (!meet(range, row[r].sees).empty()) merge(r);
        }
    }
};

inline int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

int64_t attention_scratch(int rows, int dim) {
    return aligned(rows * sizeof(Row)) + aligned(4LL * rows * dim) + aligned(4LL * rows * RANGE) +
           2 * aligned(4LL * rows * dim);
}

template <class T, class Dot>
void attention(const Attention& call, const Tile& tile, const Tile* next, void* scratch) {
    int dim = call.head_dim, group = call.heads / call.kv_heads, rows = tile.tokens * group;
    char* at = static_cast<char*>(scratch);
    auto take = [&at](int64_t bytes) {
        char* here = at;
        at += aligned(bytes);
        return here;
    };
    auto* row = reinterpret_cast<Row*>(take(rows * sizeof(Row)));
    auto* query = reinterpret_cast<typename Dot::Query*>(take(4LL * rows * dim));
    auto* score = reinterpret_cast<float*>(take(4LL * rows * RANGE));
    auto* partial = reinterpret_cast<float*>(take(4LL * rows * dim));
    auto* total = reinterpret_cast<float*>(take(4LL * rows * dim));
    std::memset(total, 0, sizeof(float) * rows * dim);

    int s = tile.sequence;
    int first_position = call.context_lens[s] - call.cu_query[s + 1] + tile.first;
    Span all = {first_position + tile.tokens, 0};
    for (int r = 0; r < rows; ++r) {
        int position = first_position + r / group;
        int begin = call.window > 0 ? most(0, position + 1 - call.window) : 0;
        row[r] = {{begin, position + 1}, -__builtin_inff(), 0.0f, 0.0f, 0.0f};
        all = {least(all.begin, begin), most(all.end, position + 1)};
        const T* q = static_cast<const T*>(call.q) + (tile.first + r / group) * call.q_row +
                     (tile.kv_head * group + r % group) * call.q_head;
        prepare(query + int64_t(r) * dim, q, dim);
    }
    Pages<T> pages(call, tile), next_pages(call, next ? *next : tile);
    Lookahead<T> ahead = {pages, next ? &next_pages : nullptr, dim};
    AttentionTile<T, Dot>{call, dim, rows, pages, ahead, row, query, score, partial, total}
        .attend(all);

    for (int r = 0; r < rows; ++r) {
        T* to = static_cast<T*>(call.out) + (tile.first + r / group) * call.out_row +
                (tile.kv_head * group + r % group) * call.out_head;
        V inverse = splat(row[r].sum == 0.0f ? 0.0f : 1.0f / row[r].sum);
        for (int d = 0; d < dim; d += 16)
            store(to + d, load(total + int64_t(r) * dim + d) * inverse);
    }
}

}  // namespace
}  // namespace draftwire
