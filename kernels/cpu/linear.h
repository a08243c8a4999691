// y = x W^T for rows of any number: a row's bits depend on that row and the weights alone.
//
// A sum of a row and a column is one chain of multiply-adds in ascending order of k, in one lane of
// one register. How many rows and blocks of columns share the registers of a tile only decides what
// else is computed meanwhile. Threads share columns, never k.
//
// At few rows a step costs what it takes to read the weights, so they are read once, in order: for
// each block of columns all groups of rows follow each other while the block is in cache (L1 or L2),
// and meanwhile the next blocks come from memory, a part of them with each group.
// At many rows it costs the multiply-adds; tiles are as large as registers allow.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "dense.h"
#include "each.h"
#include "quantised.h"

namespace draftwire {
namespace {

struct Columns {  // blocks of 16
    int begin, end;
};

inline int share(int n, int part, int parts) { return int(int64_t(n) * part / parts); }

// This thread's columns in units of `unit` blocks.
inline Columns columns_of(const Projection& p, int unit, int thread, int threads) {
    int units = p.columns / (16 * unit);
    return {share(units, thread, threads) * unit, share(units, thread + 1, threads) * unit};
}

// How a tile multiplies: an input, or a pair of inputs, with those of sixteen columns.
template <class T>
struct Wide {
    using Weight = T;
    using Input = float;
    static constexpr int HALVES = 2;
    // Quantised weights: in registers, or as floats in cache.
    using Piece = float;
    using OfPiece = Wide<float>;
    static constexpr int TWO = 0;
    template <class Codes, class Scales>
    static V quantised(const uint8_t* at, int half, const Scales& by) {
        return to_bf16(fma(Codes::input(at, half), by.scale, by.shift));
    }
    static V weights(const uint16_t* pairs, int half) {
        return half ? seconds(pairs) : firsts(pairs);
    }
    static V weights(const float* rows, int half) { return load(rows + 16 * half); }
    using Weights = V;
    static V input(const float* x, int half) { return splat(x[half]); }
    static V step(const V& w, const V& x, const V& sum) { return fma(x, w, sum); }
};

// What a tile brings from memory while it multiplies: for every pair of inputs, `pace` bytes of each
// of its blocks, from `lead` bytes after the block's first on, and from input `turn` on `skip` bytes
// further.
struct Ahead {
    int64_t lead;
    int pace;
    int turn;
    int64_t skip;
};

constexpr int FAR = 4096, NEAR = 1024;  // bytes ahead: into L2, and from there into L1

// The sums of R rows and N blocks: sums[n][r][16]; `more`: added to what is there. Not inlined: each
// is compiled once, whatever becomes of the sums.
template <class Dot, int R, int N>
__attribute__((noinline)) void linear_tile(const Projection& p, const typename Dot::Input* x,
                                           int64_t x_row, int block, Ahead ahead, bool more,
                                           float* sums) {
    using Weight = typename Dot::Weight;
    constexpr int LINES = int(sizeof(Weight)) / 2;  // of cache, for a pair of inputs
    const int64_t stride = int64_t(p.depth) * 16, bytes = stride * int(sizeof(Weight));
    const Weight* w = static_cast<const Weight*>(p.weights) + block * stride;
    V sum[R][N];
    each<R>([&](auto r) INLINE {
        each<N>([&](auto n) INLINE {
            const float* before = sums + (INDEX(n) * R + INDEX(r)) * 16;
            sum[INDEX(r)][INDEX(n)] = more ? load(before) : splat(0.0f);
        });
    });
    // Written out (each.h), and each input against all blocks at once: else GCC spills the sums.
    const char* far = reinterpret_cast<const char*>(w) + ahead.lead;
    const int stops[] = {ahead.turn, p.depth};
    int k = 0;
    for (int stop : stops) {
        for (; k < stop; k += 2, far += ahead.pace)
            each<Dot::HALVES>([&](auto half) INLINE {
                typename Dot::Weights weights[N];
                each<N>([&](auto n) INLINE {
                    const Weight* pair = w + INDEX(n) * stride + k * 16;
                    weights[INDEX(n)] = Dot::weights(pair, INDEX(half));
                    if (INDEX(half) < LINES) {
                        const int64_t line = 64 * INDEX(half);
                        __builtin_prefetch(far + INDEX(n) * bytes + line, 0, 2);
                        __builtin_prefetch(reinterpret_cast<const char*>(pair) + NEAR + line);
                    }
                });
                each<R>([&](auto r) INLINE {
                    auto input = Dot::input(x + INDEX(r) * x_row + k, INDEX(half));
                    each<N>([&](auto n) INLINE {
                        V& own = sum[INDEX(r)][INDEX(n)];
                        own = Dot::step(weights[INDEX(n)], input, own);
                    });
                });
            });
        far += ahead.skip;
    }
    each<N>([&](auto n) INLINE {
        each<R>([&](auto r) INLINE {
            store(sums + (INDEX(n) * R + INDEX(r)) * 16, sum[INDEX(r)][INDEX(n)]);
        });
    });
}

// The tile for `rows` <= R rows.
template <class Dot, int R, int N>
inline void rows_tile(const Projection& p, const typename Dot::Input* x, int64_t x_row, int rows,
                      int block, Ahead ahead, bool more, float* sums) {
    if (rows == R) return linear_tile<Dot, R, N>(p, x, x_row, block, ahead, more, sums);
    if constexpr (R > 1) rows_tile<Dot, R - 1, N>(p, x, x_row, rows, block, ahead, more, sums);
}

// The sums of R rows and N blocks whose weights are widened in registers; as linear_tile.
template <class Dot, int CODES, int R, int N>
__attribute__((noinline)) void quantised_tile(const QuantisedBlock* blocks, int depth,
                                              const typename Dot::Input* x, int64_t x_row,
                                              float* sums) {
    using C = Codes<CODES>;
    V sum[R][N];
    each<R>([&](auto r) INLINE {
        each<N>([&](auto n) INLINE { sum[INDEX(r)][INDEX(n)] = splat(0.0f); });
    });
    Reader readers[N];
    Group groups[N];
    const uint8_t* codes[N];
    for (int n = 0; n < N; ++n) readers[n].begin(blocks[n]);
    for (int k = 0; k < depth;) {
        for (int n = 0; n < N; ++n) codes[n] = readers[n].next(k, groups[n]);
        std::conditional_t<Dot::HALVES == 2, Group, Twice> scales[N];  // in registers
        each<N>([&](auto n) INLINE { scales[INDEX(n)] = groups[INDEX(n)]; });
        for (int end = k + C::group; k < end; k += 2) {
            each<Dot::HALVES>([&](auto half) INLINE {
                typename Dot::Weights weights[N];
                each<N>([&](auto n) INLINE {
                    weights[INDEX(n)] = Dot::template quantised<C>(codes[INDEX(n)], INDEX(half),
                                                                   scales[INDEX(n)]);
                });
                each<R>([&](auto r) INLINE {
                    auto input = Dot::input(x + INDEX(r) * x_row + k, INDEX(half));
                    each<N>([&](auto n) INLINE {
                        V& own = sum[INDEX(r)][INDEX(n)];
                        own = Dot::step(weights[INDEX(n)], input, own);
                    });
                });
            });
            each<N>([&](auto n) INLINE { codes[INDEX(n)] += C::bytes; });
        }
    }
    each<N>([&](auto n) INLINE {
        each<R>([&](auto r) INLINE {
            store(sums + (INDEX(n) * R + INDEX(r)) * 16, sum[INDEX(r)][INDEX(n)]);
        });
    });
}

template <class Dot, int CODES, int R, int N>
inline void quantised_rows(const QuantisedBlock* blocks, int depth, const typename Dot::Input* x,
                           int64_t x_row, int rows, float* sums) {
    if (rows == R) return quantised_tile<Dot, CODES, R, N>(blocks, depth, x, x_row, sums);
    if constexpr (R > 1) quantised_rows<Dot, CODES, R - 1, N>(blocks, depth, x, x_row, rows, sums);
}

// All rows at once, if they are at most R and codes of the N blocks are alike: whether so.
template <class Dot, int R, int N>
inline bool quantised_at_once(const QuantisedBlock* blocks, int depth,
                              const typename Dot::Input* x, int64_t x_row, int rows, float* sums) {
    if (rows > R) return false;
    const int codes = codes_of(blocks[0].format);
    for (int n = 1; n < N; ++n)
        if (codes_of(blocks[n].format) != codes) return false;
    if (codes == NIBBLES) quantised_rows<Dot, NIBBLES, R, N>(blocks, depth, x, x_row, rows, sums);
    else if (codes == BYTES) quantised_rows<Dot, BYTES, R, N>(blocks, depth, x, x_row, rows, sums);
    else quantised_rows<Dot, SHORT, R, N>(blocks, depth, x, x_row, rows, sums);
    return true;
}

constexpr int MOST_SUMS = 256;  // rows between which a piece of quantised weights is shared

// As linear_blocks; a piece of N blocks is widened, and then multiplied with all groups of rows.
template <class Dot, int R, int N, class Done>
inline int quantised_blocks(const Projection& p, const typename Dot::Input* x, int64_t x_row,
                            int rows, Columns blocks, const Done& done) {
    alignas(64) typename Dot::Piece wide[N * SUPER * 16];
    alignas(64) float sums[MOST_SUMS * N * 16];
    int block = blocks.begin;
    for (; block + N <= blocks.end; block += N) {
        if (quantised_at_once<Dot, R, N>(p.blocks + block, p.depth, x, x_row, rows, sums)) {
            for (int n = 0; n < N; ++n)
                for (int r = 0; r < rows; ++r)
                    done(r, block + n, load(sums + (n * rows + r) * 16));
            continue;
        }
        for (int begin = 0; begin < rows; begin += MOST_SUMS) {
            const int own = rows - begin < MOST_SUMS ? rows - begin : MOST_SUMS;
            const int groups = (own + R - 1) / R;
            for (int k = 0; k < p.depth; k += SUPER) {
                const int depth = p.depth - k < SUPER ? p.depth - k : SUPER;
                for (int n = 0; n < N; ++n)
                    widen_piece(p.blocks[block + n], k, depth, wide + n * depth * 16);
                const Projection piece = {wide, nullptr, N * 16, depth, nullptr};
                for (int g = 0; g < groups; ++g) {
                    int first = share(own, g, groups), count = share(own, g + 1, groups) - first;
                    rows_tile<typename Dot::OfPiece, R, N>(piece, x + (begin + first) * x_row + k, x_row, count, 0,
                                         Ahead{0, 64, 0, 0}, k > 0, sums + first * N * 16);
                }
            }
            for (int g = 0; g < groups; ++g) {
                int first = share(own, g, groups), count = share(own, g + 1, groups) - first;
                for (int n = 0; n < N; ++n)
                    for (int r = 0; r < count; ++r)
                        done(begin + first + r, block + n,
                             load(sums + (first * N + n * count + r) * 16));
            }
        }
    }
    return block;
}

// `blocks` of all rows, N blocks at a time, in groups of up to R rows of nearly the same size; the
// first block that was left over.
template <class Dot, int R, int N, class Done>
inline int linear_blocks(const Projection& p, const typename Dot::Input* x, int64_t x_row, int rows,
                         Columns blocks, const Done& done) {
    float sums[R * N * 16];
    const int groups = (rows + R - 1) / R, pair = 32 * int(sizeof(typename Dot::Weight));
    const int64_t bytes = int64_t(p.depth) / 2 * pair;  // of a block
    int block = blocks.begin;
    if constexpr (sizeof(typename Dot::Weight) == 2)
        if (p.blocks) return quantised_blocks<Dot, R, N>(p, x, x_row, rows, blocks, done);
    for (; block + N <= blocks.end; block += N)
        for (int g = 0; g < groups; ++g) {
            int first = share(rows, g, groups), count = share(rows, g + 1, groups) - first;
            // With one group the rest of the blocks, then where the next ones begin; with more, each
            // group its part of the next.
            Ahead ahead = {FAR, pair, p.depth - FAR / pair * 2, (N - 1) * bytes};
            if (groups > 1) ahead = {N * bytes + bytes * g / groups, pair / groups, 0, 0};
            rows_tile<Dot, R, N>(p, x + first * x_row, x_row, count, block, ahead, false, sums);
            for (int n = 0; n < N; ++n)
                for (int r = 0; r < count; ++r)
                    done(first + r, block + n, load(sums + (n * count + r) * 16));
        }
    return block;
}

// As many blocks side by side as registers have room for: few rows alone would wait for themselves.
// `done(row, block, sums)` gets each once, a row's blocks in ascending order.
template <class Dot, class Done>
inline void linear(Dot, const Projection& p, const typename Dot::Input* x, int64_t x_row, int rows,
                   Columns blocks, const Done& done) {
    if (p.blocks && rows <= Dot::TWO)
        blocks.begin = linear_blocks<Dot, Dot::TWO ? Dot::TWO : 1, 2>(p, x, x_row, rows, blocks, done);
    else if (p.blocks && rows <= SUMS)  // widened once for all of them
        blocks.begin = linear_blocks<Dot, SUMS, 1>(p, x, x_row, rows, blocks, done);
    else if (rows * 4 <= SUMS)
        blocks.begin = linear_blocks<Dot, SUMS / 4, 4>(p, x, x_row, rows, blocks, done);
    else if (rows * 2 <= SUMS)
        blocks.begin = linear_blocks<Dot, SUMS / 2, 2>(p, x, x_row, rows, blocks, done);
    else
        blocks.begin = linear_blocks<Dot, SUMS / WIDTH, WIDTH>(p, x, x_row, rows, blocks, done);
    linear_blocks<Dot, SUMS / WIDTH, 1>(p, x, x_row, rows, blocks, done);
}

}  // namespace
}  // namespace draftwire
