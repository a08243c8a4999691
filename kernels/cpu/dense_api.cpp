// The C ABI of linear layers and whole passes. All pointers are the caller's; nothing is kept.
#include <omp.h>

#include <cstring>
#include <vector>

#include "dense.h"
#include "tiles.h"

using namespace draftwire;

namespace {

const Dense* dense_of(const Kernels* kernels) {
    auto is = [kernels](const char* name) { return !std::strcmp(kernels->name, name); };
#if defined(__x86_64__)
    if (is("amx")) return dense_amx();
    if (is("amx_emulated")) return dense_amx_emulated();
    if (is("avx512bf16")) return dense_avx512bf16();
    if (is("avx512")) return dense_avx512();
    if (is("avx2")) return dense_avx2();
#endif
    return dense_generic();
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// Whether projections with bf16 weights read float.
bool draftwire_wide(const Kernels* kernels) { return dense_of(kernels)->wide; }

int64_t draftwire_scratch(const Kernels* kernels, int heads, int kv_heads, int head_dim) {
    return kernels->attention_scratch(most_rows(heads, kv_heads), head_dim);
}

void draftwire_linear(const Kernels* kernels, const LinearCall* call, int element_bytes,
                      int threads) {
    const Dense* dense = dense_of(kernels);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        kernels->tile_begin();
        dense->linear(*call, element_bytes, omp_get_thread_num(), omp_get_num_threads());
        kernels->tile_end();
    }
}

void draftwire_pass(const Kernels* kernels, const Decoder* decoder, const Batch* batch,
                    const Workspace* room, int threads) {
    const Dense* dense = dense_of(kernels);
    Attention shape = {};
    shape.k_scale = decoder->layers[0].pool.k_scale;
    shape.cu_query = batch->cu_query;
    shape.heads = decoder->heads;
    shape.kv_heads = decoder->kv_heads;
    std::vector<Tile> tiles = tiles_of(shape, batch->sequences);
    AttendTile attend = attention_of(*kernels, shape, decoder->element_bytes);
    Meeting meeting;
    std::vector<int> taken(decoder->count);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        kernels->tile_begin();
        dense->pass({attend, *decoder, *batch, *room, tiles.data(), int(tiles.size()),
                     taken.data(), &meeting, omp_get_thread_num(), omp_get_num_threads()});
        kernels->tile_end();
    }
}

}  // extern "C"
#pragma GCC visibility pop
