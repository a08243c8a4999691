// How one call of attention is divided: tiles that threads take one after the other.
#pragma once
#include <vector>

#include "kernels.h"

namespace draftwire {

constexpr int TILE_ROWS = 16;

// By the bytes of an element of queries and output.
inline AttendTile attention_of(const Kernels& kernels, const Attention& call, int element_bytes) {
    if (call.k_scale)
        return element_bytes == 2 ? kernels.attention_bf16_int8 : kernels.attention_f32_int8;
    return element_bytes == 2 ? kernels.attention_bf16 : kernels.attention_f32;
}

// Query rows of the largest tile: what `Kernels::attention_scratch` is to be asked for.
inline int most_rows(int heads, int kv_heads) {
    int group = heads / kv_heads;
    return group > TILE_ROWS ? group : TILE_ROWS;
}

// A tile's bits do not depend on how the rows of its sequence are divided, nor on its neighbours.
inline std::vector<Tile> tiles_of(const Attention& call, int sequences) {
    int tokens = TILE_ROWS * call.kv_heads / call.heads;
    if (tokens < 1) tokens = 1;
    std::vector<Tile> tiles;
    for (int s = 0; s < sequences; ++s)
        for (int first = call.cu_query[s]; first < call.cu_query[s + 1]; first += tokens) {
            int left = call.cu_query[s + 1] - first;
            for (int h = 0; h < call.kv_heads; ++h)
                tiles.push_back({s, h, first, left < tokens ? left : tokens});
        }
    return tiles;
}

}  // namespace draftwire
