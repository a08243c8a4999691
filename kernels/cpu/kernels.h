// What the per-ISA translation units offer to the rest: one table of functions each.
//
// isa.cpp is compiled once per instruction set with the flags of that set. It must therefore emit
// no symbol that another unit could pick up (inline functions of the standard library, templates
// with external linkage): everything in it but the table sits in an unnamed namespace.
#pragma once
#include <cstdint>

namespace draftwire {

constexpr int BLOCK = 16;   // positions per KV block, and lanes of a vector of scores
constexpr int RANGE = 256;  // absolute positions per softmax partial

// KV of one layer. Scales (num_blocks, kv_heads, BLOCK) where the elements are int8, else null.
struct Pool {
    void *k, *v;
    float *k_scale, *v_scale;
    int kv_heads, head_dim;
};

// One call of paged attention; the contract is reference.paged_attention. Strides in elements.
struct Attention {
    const void* q;
    const void* k_cache;
    const void* v_cache;
    const float* k_scale;
    const float* v_scale;
    void* out;
    const int32_t* block_tables;
    const int32_t* cu_query;
    const int32_t* context_lens;
    int64_t q_row, q_head, out_row, out_head, table_row;
    int heads, kv_heads, head_dim, window;
    float scale;
};

// Query rows of one KV head: `tokens` from row `first` on, of sequence `sequence`.
struct Tile {
    int sequence, kv_head, first, tokens;
};

using AttendTile = void (*)(const Attention&, const Tile&, const Tile* next, void* scratch);

// What the noise of one row's draw depends on, and what a token must reach.
struct Draw {
    uint64_t key;
    float edge;     // survivors are logits >= edge
    float max;      // the row's maximum
    float inverse;  // 1 / temperature, or less
};

struct Kernels {
    const char* name;
    // Each thread calls these before and after all that follows; matrix tiles belong to a thread.
    void (*tile_begin)();
    void (*tile_end)();
    // Bytes of scratch for tiles of up to `rows` query rows.
    int64_t (*attention_scratch)(int rows, int head_dim);
    // By the type of queries and output; KV has it too, or is int8. `next` is what this thread
    // takes after `tile`, or null.
    void (*attention_bf16)(const Attention&, const Tile&, const Tile* next, void* scratch);
    void (*attention_f32)(const Attention&, const Tile&, const Tile* next, void* scratch);
    void (*attention_bf16_int8)(const Attention&, const Tile&, const Tile* next, void* scratch);
    void (*attention_f32_int8)(const Attention&, const Tile&, const Tile* next, void* scratch);

    // The maximum of each CHUNK of `n` logits; returns false if there is a NaN.
    bool (*chunk_maxima)(const float* row, int64_t n, float* maxima);
    // exp(x) in units of 2^-40 and x in bins of 1 / BINS_PER_UNIT, for x = (row[i] - max) * inverse.
    void (*masses)(const float* row, int64_t n, float max, double inverse, int64_t* mass,
                   uint16_t* bin);
    // Roughly the sum of exp(x), and of those whose logit is above `level`.
    void (*rough_masses)(const float* row, int64_t n, float max, float inverse, float level,
                         float* above, float* total);
    // Marks the logits of a chunk whose key might reach `best`. Misses none; few marks are vain.
    bool (*candidates)(const float* row, int n, int64_t first_id, const Draw&, float best,
                       int32_t* marks);
    void (*widen)(const uint16_t* bf16, int64_t n, float* row);
};

constexpr int CHUNK = 64;
constexpr int BINS_PER_UNIT = 64;
constexpr int BINS = 29 * BINS_PER_UNIT;  // the last one holds all that is further down: no mass
constexpr uint64_t GAMMA = 0x9E3779B97F4A7C15;

// The finaliser of SplitMix64 (Steele, Lea and Flood, 2014).
static inline uint64_t mix(uint64_t z) {
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
    z = (z ^ z >> 27) * 0x94D049BB133111EB;
    return z ^ z >> 31;
}

const Kernels* kernels_generic();
const Kernels* kernels_avx2();
const Kernels* kernels_avx512();
const Kernels* kernels_avx512bf16();
const Kernels* kernels_amx();
const Kernels* kernels_amx_emulated();  // the code of `amx` on tiles in plain C++, for tests

}  // namespace draftwire
