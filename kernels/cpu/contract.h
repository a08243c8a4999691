// The products of attention: rows times pages, sixteen lanes at a time.
//
// A page of K holds pairs of dims by position, a page of V pairs of positions by dim: in both, one
// vector of pairs belongs to two neighbours in the sum and to sixteen lanes of the result. A sum is
// one chain of multiply-adds, in ascending order; how many rows and vectors of lanes share the
// registers decides only what else is computed meanwhile.
#pragma once
#include <cstdint>
#include <cstring>

#include "each.h"
#include "pages.h"
#include "write_kv.h"

namespace draftwire {
namespace {

inline V splat_query(const float* q) { return splat_from(q); }
inline V splat_query(const uint16_t* q) { return splat(as_float(*q)); }

// How a row's pair meets a page's: as two multiply-adds in float.
template <class T, class Q>
struct Apart {
    using Element = T;
    using Query = Q;
    static constexpr int HALVES = 2;
    static V page(const T* pairs, int half) { return half ? seconds(pairs) : firsts(pairs); }
    static V step(const V& x, const Q* q, int half, const V& sum) {
        return fma(splat_query(q + half), x, sum);
    }
};

#ifdef __AVX512BF16__
// As the instruction for pairs of bf16 does.
template <class T>
struct Paired {
    using Element = T;
    using Query = uint16_t;
    static constexpr int HALVES = 1;
    static __m512i page(const T* pairs, int) { return bf16_pairs(pairs); }
    static V step(__m512i x, const uint16_t* q, int, V sum) { return dot_pairs(x, q, sum); }
};
#endif

constexpr int WEIGHTS_ROW = RANGE * 4;  // bytes from a row's weights to the next row's

// Everything that one tile computes with. Weights take the place of the scores that they come from.
template <class Dot>
struct Lanes {
    using T = typename Dot::Element;
    using Query = typename Dot::Query;
    using Base = Lanes;
    static constexpr int64_t WEIGHTS = WEIGHTS_ROW / int(sizeof(Query));

    const Pages<T>& pages;
    const Lookahead<T>& ahead;
    int dim, rows;
    const Query* query;  // [rows][dim]
    float* score;        // [rows][RANGE] positions of the range from `base` on
    float* partial;      // [rows][dim], weighted V of this range
    T* spare;            // [2 * dim]
    char* more;          // for other kinds of products

    Query* weights(int row) const { return reinterpret_cast<Query*>(score) + row * WEIGHTS; }

    template <int R, int G>
    INLINE static void contract(const T* const (&page)[G], int64_t stride, int pairs, const Query* q,
                         int64_t q_row, V (&sum)[R][G]) {
        for (int c = 0; c < pairs; ++c)
            each<G>([&](auto g) INLINE {
                each<Dot::HALVES>([&](auto half) INLINE {
                    auto x = Dot::page(page[INDEX(g)] + c * stride, INDEX(half));
                    each<R>([&](auto r) INLINE {
                        V& own = sum[INDEX(r)][INDEX(g)];
                        own = Dot::step(x, q + INDEX(r) * q_row + 2 * c, INDEX(half), own);
                    });
                });
            });
    }

    // Scores of R rows against G blocks.
    template <int R, int G>
    void score_blocks(int first, int block, float* out) const {
        V sum[R][G];
        const T* page[G];
        each<G>([&](auto g) INLINE { page[INDEX(g)] = pages.keys(block + INDEX(g)); });
        each<R>([&](auto r) INLINE {
            each<G>([&](auto g) INLINE { sum[INDEX(r)][INDEX(g)] = splat(0.0f); });
        });
        contract<R, G>(page, 2 * BLOCK, dim / 2, query + int64_t(first) * dim, dim, sum);
        each<R>([&](auto r) INLINE {
            each<G>([&](auto g) INLINE {
                store(out + INDEX(r) * RANGE + INDEX(g) * BLOCK, sum[INDEX(r)][INDEX(g)]);
            });
        });
    }

    // partial += weights * V over pairs of positions, for R rows and G vectors of V from dim d on.
    template <int R, int G>
    void value_pairs(int first, int base, Span pairs, int d, int part, int parts) const {
        V sum[R][G];
        float* to = partial + int64_t(first) * dim + d;
        each<R>([&](auto r) INLINE {
            each<G>([&](auto g) INLINE {
                sum[INDEX(r)][INDEX(g)] = load(to + INDEX(r) * dim + INDEX(g) * 16);
            });
        });
        for (int i = pairs.begin; i < pairs.end;) {
            int block = i / (BLOCK / 2), inside = i % (BLOCK / 2);
            int stop = least(pairs.end, (block + 1) * (BLOCK / 2));
            ahead.values(block, part, parts);
            const T* page[G];
            const T* pair = pages.values(block) + (int64_t(inside) * dim + d) * 2;
            each<G>([&](auto g) INLINE { page[INDEX(g)] = pair + INDEX(g) * 32; });
            contract<R, G>(page, 2 * dim, stop - i, weights(first) + 2 * i - base, WEIGHTS, sum);
            i = stop;
        }
        each<R>([&](auto r) INLINE {
            each<G>([&](auto g) INLINE {
                store(to + INDEX(r) * dim + INDEX(g) * 16, sum[INDEX(r)][INDEX(g)]);
            });
        });
    }

    // partial += weight * V for one position, its neighbour in the pair taken for zero.
    void value_alone(int first, int count, int base, int position) const {
        const T* pair = pages.values(position / BLOCK) + position % BLOCK / 2 * 2 * int64_t(dim);
        for (int d = 0; d < 2 * dim; ++d) spare[d] = d % 2 == position % 2 ? pair[d] : T(0);
        Query both[2] = {};
        for (int r = first; r < first + count; ++r) {
            both[position % 2] = weights(r)[position - base];
            for (int d = 0; d < dim; d += 16) {
                float* to = partial + int64_t(r) * dim + d;
                V sum[1][1] = {{load(to)}};
                const T* const page[1] = {spare + 2 * d};
                contract<1, 1>(page, 0, 1, both, 0, sum);
                store(to, sum[0][0]);
            }
        }
    }

    // Groups of up to ROWS rows of nearly the same size.
    static int groups(int count) { return (count + ROWS - 1) / ROWS; }

    template <int R, int G>
    void score_rows(int count, int first, int block, float* out) const {
        if (count == R) return score_blocks<R, G>(first, block, out);
        if constexpr (R > 1) score_rows<R - 1, G>(count, first, block, out);
    }

    template <int G>
    int score_columns(int base, Span blocks) const {
        int b = blocks.begin, n = groups(rows);
        for (; b + G <= blocks.end; b += G)
            for (int i = 0; i < n; ++i) {
                int first = rows * i / n, last = rows * (i + 1) / n;
                for (int g = 0; g < G; ++g) ahead.keys(b + g, i, n);
                score_rows<ROWS, G>(last - first, first, b,
                                    score + int64_t(first) * RANGE + b * BLOCK - base);
            }
        return b;
    }

    // Unscaled, of all rows with all positions of the blocks.
    void scores(int base, Span blocks) const {
        blocks.begin = score_columns<GROUPS>(base, blocks);
        score_columns<1>(base, blocks);
    }

    template <int R>
    void value_rows(int count, int first, int base, Span pairs, int part, int parts) const {
        if (count != R) {
            if constexpr (R > 1) value_rows<R - 1>(count, first, base, pairs, part, parts);
            return;
        }
        int d = 0, wide = dim / (16 * GROUPS), all = wide + dim / 16 % GROUPS;
        for (; d < 16 * GROUPS * wide; d += 16 * GROUPS)
            value_pairs<R, GROUPS>(first, base, pairs, d, part * all + d / (16 * GROUPS),
                                   parts * all);
        for (int i = wide; d < dim; d += 16, ++i)
            value_pairs<R, 1>(first, base, pairs, d, part * all + i, parts * all);
    }

    // Rows that see all of these pairs.
    void values(int first, int count, int base, Span pairs) const {
        const int strip = 4 * BLOCK / 2, n = groups(count);  // V of a strip stays in L1
        while (!pairs.empty()) {
            Span now = {pairs.begin, n == 1 ? pairs.end : least(pairs.end, pairs.begin + strip)};
            for (int i = 0; i < n; ++i) {
                int begin = first + count * i / n, end = first + count * (i + 1) / n;
                value_rows<ROWS>(end - begin, begin, base, now, i, n);
            }
            pairs.begin = now.end;
        }
    }

    // Rows that see all of these blocks.
    void value_blocks(int first, int count, int base, Span blocks) const {
        values(first, count, base, {blocks.begin * (BLOCK / 2), blocks.end * (BLOCK / 2)});
    }
};

}  // namespace
}  // namespace draftwire
