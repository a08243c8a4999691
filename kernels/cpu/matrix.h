// The products of attention on matrix tiles: up to sixteen query rows of a KV head at once.
//
// A page of K is what a tile of pairs holds: a row for each pair of dims, in it sixteen positions;
// and half a tile holds sixteen dims of a page of V. A row of a product depends on that row alone,
// so whole blocks are multiplied for all sixteen rows and kept for those that see them; what a row
// sees a part of is left to Lanes.
#pragma once
#include <cstdint>
#include <cstring>
#include <utility>

#include "contract.h"
#include "tiles_amx.h"

namespace draftwire {
namespace {

// Tiles 0 to 3 are sums; then a whole tile of rows and one of pairs, and a half one of each.
constexpr int WHOLE_ROWS = 4, WHOLE_PAIRS = 5, HALF_ROWS = 6, HALF_PAIRS = 7, SUM_TILES = 4;

inline TileShapes attention_tiles() {
    TileShapes shapes = whole_tiles();
    shapes.set(HALF_ROWS, 16, 32);
    shapes.set(HALF_PAIRS, 8, 64);
    return shapes;
}

inline void widen_page(const int8_t* page, int n, uint16_t* bf16) {
    for (int i = 0; i < n; ++i) {
        float x = page[i];
        uint32_t bits;
        std::memcpy(&bits, &x, sizeof bits);
        bf16[i] = uint16_t(bits >> 16);  // exact: 7 bits and a sign
    }
}

template <class Dot>
struct Matrix : Lanes<Dot> {
    using Base = Lanes<Dot>;
    using T = typename Base::T;
    using Base::dim, Base::rows, Base::pages, Base::ahead, Base::partial, Base::more;
    static_assert(sizeof(typename Base::Query) == 2, "tiles multiply bf16");

    float* kept() const { return reinterpret_cast<float*>(more); }  // [16][16 * SUM_TILES]
    // A page as bf16; int8 in the n-th of SUM_TILES buffers.
    const uint16_t* widened(const uint16_t* page, int) const { return page; }
    const uint16_t* widened(const int8_t* page, int n) const {
        auto* to = reinterpret_cast<uint16_t*>(more + 4 * 16 * 16 * SUM_TILES) + n * BLOCK * dim;
        widen_page(page, BLOCK * dim, to);
        return to;
    }

    // Scores of sixteen rows against as many blocks as there are n.
    template <int... n>
    void score_tiles(std::integer_sequence<int, n...>, int first, int block, float* out) const {
        const uint16_t* page[] = {widened(pages.keys(block + n), n)...};
        const uint16_t* rows16 = Base::query + int64_t(first) * dim;
        (tile_zero<n>(), ...);
        int d = 0;
        for (; d + 32 <= dim; d += 32) {
            tile_load<WHOLE_ROWS>(rows16 + d, dim * 2);
            ((tile_load<WHOLE_PAIRS>(page[n] + d * BLOCK, 64),
              tile_dp<n, WHOLE_ROWS, WHOLE_PAIRS>()), ...);
        }
        if (d < dim) {
            tile_load<HALF_ROWS>(rows16 + d, dim * 2);
            ((tile_load<HALF_PAIRS>(page[n] + d * BLOCK, 64),
              tile_dp<n, HALF_ROWS, HALF_PAIRS>()), ...);
        }
        (tile_store<n>(out + n * BLOCK, RANGE * 4), ...);
    }

    void scores(int base, Span blocks) const {
        for (int b = blocks.begin; b < blocks.end; b += SUM_TILES) {
            int count = least(SUM_TILES, blocks.end - b);
            for (int i = 0; i < count; ++i) ahead.keys(b + i, 0, 1);
            for (int r = 0; r < rows; r += 16) {
                float* out = Base::score + int64_t(r) * RANGE + b * BLOCK - base;
                switch (count) {
                    case 4: score_tiles(std::integer_sequence<int, 0, 1, 2, 3>(), r, b, out); break;
                    case 3: score_tiles(std::integer_sequence<int, 0, 1, 2>(), r, b, out); break;
                    case 2: score_tiles(std::integer_sequence<int, 0, 1>(), r, b, out); break;
                    default: score_tiles(std::integer_sequence<int, 0>(), r, b, out);
                }
            }
        }
    }

    // partial += weights * V for sixteen rows, and as many vectors of dims from d on as there are n.
    template <int... n>
    void value_tiles(std::integer_sequence<int, n...>, int first, Span keep, int base, Span blocks,
                     int d) const {
        float* to = partial + int64_t(first) * dim + d;
        (tile_load<n>(to + n * 16, dim * 4), ...);
        for (int b = blocks.begin; b < blocks.end; ++b) {
            const uint16_t* page = widened(pages.values(b), 0) + 2 * d;
            tile_load<HALF_ROWS>(Base::weights(first) + b * BLOCK - base, WEIGHTS_ROW);
            ((tile_load<HALF_PAIRS>(page + n * 32, dim * 4), tile_dp<n, HALF_ROWS, HALF_PAIRS>()),
             ...);
        }
        const int width = 16 * int(sizeof...(n));
        (tile_store<n>(kept() + n * 16, width * 4), ...);
        for (int r = keep.begin; r < keep.end; ++r)
            std::memcpy(partial + int64_t(r) * dim + d, kept() + (r - first) * width, width * 4);
    }

    void value_blocks(int first, int count, int base, Span blocks) const {
        if (blocks.empty()) return;
        for (int b = blocks.begin; b < blocks.end; ++b) ahead.values(b, 0, 1);
        for (int r = first / 16 * 16; r < first + count; r += 16) {
            Span keep = meet({r, r + 16}, {first, first + count});
            int d = 0;
            for (; d + 64 <= dim; d += 64)
                value_tiles(std::integer_sequence<int, 0, 1, 2, 3>(), r, keep, base, blocks, d);
            for (; d < dim; d += 16)
                value_tiles(std::integer_sequence<int, 0>(), r, keep, base, blocks, d);
        }
    }
};

}  // namespace
}  // namespace draftwire
