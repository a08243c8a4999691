// Where a tile's keys and values lie, and bringing them near before they are read.
#pragma once
#include <cstdint>

#include "kernels.h"

namespace draftwire {
namespace {

inline int least(int a, int b) { return a < b ? a : b; }
inline int most(int a, int b) { return a > b ? a : b; }

struct Span {  // begin <= i < end
    int begin, end;
    bool empty() const { return begin >= end; }
};
inline Span meet(Span a, Span b) { return {most(a.begin, b.begin), least(a.end, b.end)}; }

// The KV of one head of one sequence, by block.
template <class T>
struct Pages {
    const int32_t* table;
    const T *k, *v;  // of block 0
    const float *k_scale, *v_scale;
    int64_t stride, scale_stride;
    Span blocks;  // those that the tile reads

    Pages(const Attention& call, const Tile& tile) {
        int64_t page = int64_t(call.head_dim) * BLOCK;
        int s = tile.sequence;
        int first = call.context_lens[s] - call.cu_query[s + 1] + tile.first;  // position
        int begin = call.window > 0 ? most(0, first + 1 - call.window) : 0;
        table = call.block_tables + s * call.table_row;
        k = static_cast<const T*>(call.k_cache) + tile.kv_head * page;
        v = static_cast<const T*>(call.v_cache) + tile.kv_head * page;
        k_scale = call.k_scale ? call.k_scale + tile.kv_head * BLOCK : nullptr;
        v_scale = call.v_scale ? call.v_scale + tile.kv_head * BLOCK : nullptr;
        stride = call.kv_heads * page;
        scale_stride = int64_t(call.kv_heads) * BLOCK;
        blocks = {begin / BLOCK, (first + tile.tokens + BLOCK - 1) / BLOCK};
    }
    const T* keys(int block) const { return k + table[block] * stride; }
    const T* values(int block) const { return v + table[block] * stride; }
    const float* key_scales(int block) const { return k_scale + table[block] * scale_stride; }
    const float* value_scales(int block) const { return v_scale + table[block] * scale_stride; }
};

// What will be read after what is being read now, in this tile and then in the thread's next one.
template <class T>
struct Lookahead {
    const Pages<T>& now;
    const Pages<T>* next;
    int dim;

    // The page of this tile or the next that is read a range after `block`; null past the last.
    const Pages<T>* find(int& block) const {
        block += RANGE / BLOCK;
        if (block < now.blocks.end) return &now;
        if (!next) return nullptr;
        int first = most(now.blocks.end, now.blocks.begin + RANGE / BLOCK);
        block += next->blocks.begin - first;
        return block < next->blocks.end ? next : nullptr;
    }

    // Of the keys, or of the values, that are read a range after those of `block`, one line in `parts`
    // on its way into L2: scattered pages come at half the speed of a stream without it. Not into
    // L1, which has too few miss buffers, and little at a time, between computing: a hint that finds
    // a queue full is lost. (Without the asm, GCC takes this for a function that does nothing;
    // inlined, it costs loops registers.)
    __attribute__((noinline)) void keys(int block, int part, int parts) const {
        asm volatile("");
        const Pages<T>* from = find(block);
        if (!from) return;
        fetch(from->keys(block), part, parts);
        if (part == 0 && from->k_scale) __builtin_prefetch(from->key_scales(block), 0, 2);
    }
    __attribute__((noinline)) void values(int block, int part, int parts) const {
        asm volatile("");
        const Pages<T>* from = find(block);
        if (!from) return;
        fetch(from->values(block), part, parts);
        if (part == 0 && from->v_scale) __builtin_prefetch(from->value_scales(block), 0, 2);
    }
    void fetch(const T* page, int part, int parts) const {
        const int line = 64 / int(sizeof(T));
        for (int i = part * line; i < dim * BLOCK; i += parts * line)
            __builtin_prefetch(page + i, 0, 2);
    }
};

}  // namespace
}  // namespace draftwire
