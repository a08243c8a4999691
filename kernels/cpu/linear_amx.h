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

// The sums of 16 or 32 rows and one or two blocks: sums[block][row tile][16][16].
template <int ROW_TILES, int BLOCKS>
void multiply_tiles(const Projection& p, const uint16_t* x, int64_t x_row, int block, float* sums) {
    const int64_t stride = int64_t(p.depth) * 16;
    const uint16_t* w = static_cast<const uint16_t*>(p.weights) + block * stride;
    const int64_t row_bytes = x_row * 2;
    tile_zero<0>();
    if (ROW_TILES > 1) tile_zero<1>();
    if (BLOCKS > 1) tile_zero<2>();
    if (ROW_TILES > 1 && BLOCKS > 1) tile_zero<3>();
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
    const int tile = TILE_ROW * 16;
    tile_store<0>(sums, 64);
    if (ROW_TILES > 1) tile_store<1>(sums + tile, 64);
    if (BLOCKS > 1) tile_store<2>(sums + ROW_TILES * tile, 64);
    if (ROW_TILES > 1 && BLOCKS > 1) tile_store<3>(sums + (ROW_TILES + 1) * tile, 64);
}

template <int BLOCKS, class Done>
void tiled_blocks(const Projection& p, const uint16_t* x, int64_t x_row, int rows, int block,
                  const Done& done) {
    alignas(64) float sums[4 * TILE_BYTES / 4];
    for (int first = 0; first < rows; first += 2 * TILE_ROW) {
        int count = rows - first < 2 * TILE_ROW ? rows - first : 2 * TILE_ROW, tall = count > TILE_ROW ? 2 : 1;
        auto multiply = tall > 1 ? multiply_tiles<2, BLOCKS> : multiply_tiles<1, BLOCKS>;
        multiply(p, x + first * x_row, x_row, block, sums);
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
