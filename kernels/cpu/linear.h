// y = x W^T for rows of any number: a row's bits depend on that row and the weights alone.
//
// A sum of a row and a column is one chain of multiply-adds in ascending order of k, in one lane of
// one register. How many rows and blocks of columns share the registers of a tile only decides what
// else is computed meanwhile. Threads share columns, never k.
//
// At few rows a step costs what it takes to read the weights, so they are read once, in order: for
// each block of columns all groups of rows follow each other while the block is in cache (L1 or L2).
// At many rows it costs the multiply-adds; tiles are as large as registers allow.
#pragma once
#include <cstdint>
#include <cstring>

#include "dense.h"

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
    static V weights(const uint16_t* pairs, int half) {
        return half ? seconds(pairs) : firsts(pairs);
    }
    static V weights(const float* rows, int half) { return load(rows + 16 * half); }
    static V step(const V& w, const float* x, int half, const V& sum) {
        return fma(splat(x[half]), w, sum);
    }
};

constexpr int AHEAD = 1024;  // bytes of weights: what a core reads while it waits for memory

// The sums of R rows and N blocks: sums[n][r][16]. Not inlined: each is compiled once, whatever
// becomes of the sums.
template <class Dot, int R, int N>
__attribute__((noinline)) void linear_tile(const Projection& p, const typename Dot::Input* x,
                                           int64_t x_row, int block, float* sums) {
    using Weight = typename Dot::Weight;
    const int64_t stride = int64_t(p.depth) * 16;
    const Weight* w = static_cast<const Weight*>(p.weights) + block * stride;
    V sum[R][N];
    for (int r = 0; r < R; ++r)
        for (int n = 0; n < N; ++n) sum[r][n] = splat(0.0f);
    for (int k = 0; k < p.depth; k += 2) {
        for (int n = 0; n < N; ++n) {
            const Weight* pair = w + n * stride + k * 16;
            const char* next = reinterpret_cast<const char*>(pair) + AHEAD;
            for (int line = 0; line < 32 * int(sizeof(Weight)); line += 64)
                __builtin_prefetch(next + line);
            for (int half = 0; half < Dot::HALVES; ++half) {
                auto weights = Dot::weights(pair, half);
                for (int r = 0; r < R; ++r)
                    sum[r][n] = Dot::step(weights, x + r * x_row + k, half, sum[r][n]);
            }
        }
    }
    for (int n = 0; n < N; ++n)
        for (int r = 0; r < R; ++r) store(sums + (n * R + r) * 16, sum[r][n]);
}

// The tile for `rows` <= R rows.
template <class Dot, int R, int N>
inline void rows_tile(const Projection& p, const typename Dot::Input* x, int64_t x_row, int rows,
                      int block, float* sums) {
    if (rows == R) return linear_tile<Dot, R, N>(p, x, x_row, block, sums);
    if constexpr (R > 1) rows_tile<Dot, R - 1, N>(p, x, x_row, rows, block, sums);
}

// `blocks` of all rows, N blocks at a time, in groups of up to R rows of nearly the same size; the
// first block that was left over.
template <class Dot, int R, int N, class Done>
inline int linear_blocks(const Projection& p, const typename Dot::Input* x, int64_t x_row, int rows,
                         Columns blocks, const Done& done) {
    float sums[R * N * 16];
    int groups = (rows + R - 1) / R;
    int block = blocks.begin;
    for (; block + N <= blocks.end; block += N)
        for (int g = 0; g < groups; ++g) {
            int first = share(rows, g, groups), count = share(rows, g + 1, groups) - first;
            rows_tile<Dot, R, N>(p, x + first * x_row, x_row, count, block, sums);
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
    if (rows * 4 <= SUMS)
        blocks.begin = linear_blocks<Dot, SUMS / 4, 4>(p, x, x_row, rows, blocks, done);
    else if (rows * 2 <= SUMS)
        blocks.begin = linear_blocks<Dot, SUMS / 2, 2>(p, x, x_row, rows, blocks, done);
    else
        blocks.begin = linear_blocks<Dot, SUMS / WIDTH, WIDTH>(p, x, x_row, rows, blocks, done);
    linear_blocks<Dot, SUMS / WIDTH, 1>(p, x, x_row, rows, blocks, done);
}

}  // namespace
}  // namespace draftwire
