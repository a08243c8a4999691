// Linear layers by matrix tiles: up to 32 rows and 32 columns at a time, 32 of k a step.
//
// A row of a product depends on its own row of inputs alone, and the sums of a tile go on from step
// to step, so a row has one chain of steps over k wherever it stands in a tile and whatever its
// neighbours hold; rows past the last one are computed and dropped.
#pragma once
#include "linear.h"
#include "tiles_amx.h"

namespace draftwire {
namespace {

constexpr int TILE_ROW = 16, TILE_DEPTH = 32, TILE_BYTES = 1024;

// The sums of 16 or 32 rows and one or two blocks: sums[block][row tile][16][16]; `more`: added to
// what is there.
template <int ROW_TILES, int BLOCKS>
void multiply_tiles(const Projection& p, const uint16_t* x, int64_t x_row, int block, bool more,
                    float* sums) {
    const int64_t stride = int64_t(p.depth) * 16;
    const uint16_t* w = static_cast<const uint16_t*>(p.weights) + block * stride;
    const int64_t row_bytes = x_row * 2;
    const int tile = TILE_ROW * 16;
    if (more) {
        tile_load<0>(sums, 64);
        if (ROW_TILES > 1) tile_load<1>(sums + tile, 64);
        if (BLOCKS > 1) tile_load<2>(sums + ROW_TILES * tile, 64);
        if (ROW_TILES > 1 && BLOCKS > 1) tile_load<3>(sums + (ROW_TILES + 1) * tile, 64);
    } else {
        tile_zero<0>();
        if (ROW_TILES > 1) tile_zero<1>();
        if (BLOCKS > 1) tile_zero<2>();
        if (ROW_TILES > 1 && BLOCKS > 1) tile_zero<3>();
    }
    for (int k = 0; k < p.depth; k += TILE_DEPTH) {
        tile_load<4>(x + k, row_bytes);
        if (ROW_TILES > 1) tile_load<5>(x + TILE_ROW * x_row + k, row_bytes);
        tile_load<6>(w + k * 16, 64);
        tile_dp<0, 4, 6>();
        if (ROW_TILES > 1) tile_dp<1, 5, 6>();
        if (BLOCKS > 1) {
            tile_load<7>(w + stride + k * 16, 64);
            tile_dp<2, 4, 7>();
            if (ROW_TILES > 1) tile_dp<3, 5, 7>();
        }
    }
    tile_store<0>(sums, 64);
    if (ROW_TILES > 1) tile_store<1>(sums + tile, 64);
    if (BLOCKS > 1) tile_store<2>(sums + ROW_TILES * tile, 64);
    if (ROW_TILES > 1 && BLOCKS > 1) tile_store<3>(sums + (ROW_TILES + 1) * tile, 64);
}

// A piece of the blocks is widened, and then multiplied with all rows.
template <int BLOCKS, class Done>
void quantised_tiles(const Projection& p, const uint16_t* x, int64_t x_row, int rows, int block,
                     const Done& done) {
    constexpr int STEP = 2 * TILE_ROW;  // rows
    alignas(64) uint16_t wide[BLOCKS * SUPER * 16];
    alignas(64) float sums[MOST_SUMS * BLOCKS * 16];
    for (int begin = 0; begin < rows; begin += MOST_SUMS) {
        const int own = rows - begin < MOST_SUMS ? rows - begin : MOST_SUMS;
        auto tall = [own](int first) { return own - first > TILE_ROW ? 2 : 1; };
        for (int k = 0; k < p.depth; k += SUPER) {
            const int depth = p.depth - k < SUPER ? p.depth - k : SUPER;
            for (int n = 0; n < BLOCKS; ++n)
                widen_piece(p.blocks[block + n], k, depth, wide + n * depth * 16);
            const Projection piece = {wide, nullptr, BLOCKS * 16, depth, nullptr};
            for (int first = 0; first < own; first += STEP) {
                auto multiply = tall(first) > 1 ? multiply_tiles<2, BLOCKS> : multiply_tiles<1, BLOCKS>;
                multiply(piece, x + (begin + first) * x_row + k, x_row, 0, k > 0,
                         sums + first * BLOCKS * 16);
            }
        }
        for (int first = 0; first < own; first += STEP)
            for (int n = 0; n < BLOCKS; ++n)
                for (int r = 0; r < STEP && first + r < own; ++r)
                    done(begin + first + r, block + n,
                         load(sums + first * BLOCKS * 16 + (n * tall(first) * TILE_ROW + r) * 16));
    }
}

template <int BLOCKS, class Done>
void tiled_blocks(const Projection& p, const uint16_t* x, int64_t x_row, int rows, int block,
                  const Done& done) {
    if (p.blocks) return quantised_tiles<BLOCKS>(p, x, x_row, rows, block, done);
    alignas(64) float sums[4 * TILE_BYTES / 4];
    for (int first = 0; first < rows; first += 2 * TILE_ROW) {
        int count = rows - first < 2 * TILE_ROW ? rows - first : 2 * TILE_ROW, tall = count > TILE_ROW ? 2 : 1;
        auto multiply = tall > 1 ? multiply_tiles<2, BLOCKS> : multiply_tiles<1, BLOCKS>;
        multiply(p, x + first * x_row, x_row, block, false, sums);
        for (int n = 0; n < BLOCKS; ++n)
            for (int r = 0; r < count; ++r)
                done(first + r, block + n, load(sums + (n * tall * TILE_ROW + r) * 16));
    }
}

struct TileBF16 {
    using Weight = uint16_t;
    using Input = uint16_t;
};

template <class Done>
inline void linear(TileBF16, const Projection& p, const uint16_t* x, int64_t x_row, int rows,
                   Columns blocks, const Done& done) {
    int block = blocks.begin;
    for (; block + 2 <= blocks.end; block += 2) tiled_blocks<2>(p, x, x_row, rows, block, done);
    if (block < blocks.end) tiled_blocks<1>(p, x, x_row, rows, block, done);
}

}  // namespace
}  // namespace draftwire
