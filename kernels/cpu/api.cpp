// The C ABI. All pointers are the caller's; nothing is kept between calls. Strides in elements.
#include <omp.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "kernels.h"
#include "sampler.h"
#include "tiles.h"
#include "tiles_permitted.h"
#include "write_kv.h"

using namespace draftwire;

namespace {

constexpr int ABI = 4;  // cpu/library.py's; raise both with any change to what follows `extern "C"`

template <class T>
void write_rows(const void* k, const void* v, const Pool& pool, const int64_t* slots, int64_t rows,
                int64_t k_row, int64_t v_row) {
    for (int64_t t = 0; t < rows; ++t)
        for (int h = 0; slots[t] >= 0 && h < pool.kv_heads; ++h)
            write_row(static_cast<const T*>(k) + t * k_row + int64_t(h) * pool.head_dim,
                      static_cast<const T*>(v) + t * v_row + int64_t(h) * pool.head_dim, pool,
                      slots[t], h);
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

int draftwire_abi() { return ABI; }

// A hash of the sources this was built from.
const char* draftwire_version() { return DRAFTWIRE_VERSION; }

// The table of an instruction set; the best one for a null name. Null: unknown or not on this CPU.
const Kernels* draftwire_kernels(const char* name) {
    const Kernels* found[6] = {};
    int n = 0, best = 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                __builtin_cpu_supports("f16c");
    bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
    if (avx2) found[n++] = kernels_amx_emulated(), ++best;  // by name only
    if (bf16 && tiles_permitted()) found[n++] = kernels_amx();
    if (bf16) found[n++] = kernels_avx512bf16();
    if (avx512) found[n++] = kernels_avx512();
    if (avx2) found[n++] = kernels_avx2();
#endif
    found[n++] = kernels_generic();
    for (int i = name ? 0 : best; i < n; ++i)
        if (!name || !std::strcmp(name, found[i]->name)) return found[i];
    return nullptr;
}

const char* draftwire_isa(const Kernels* kernels) { return kernels->name; }

void draftwire_write_kv(const void* k, const void* v, const Pool* pool, const int64_t* slots,
                        int64_t rows, int64_t k_row, int64_t v_row, int element_bytes) {
    auto write = element_bytes == 2 ? write_rows<uint16_t> : write_rows<float>;
    write(k, v, *pool, slots, rows, k_row, v_row);
}

// False if there was no memory for scratch.
bool draftwire_attention(const Kernels* kernels, const Attention* call, int sequences,
                         int element_bytes, int threads) {
    AttendTile attend = attention_of(*kernels, *call, element_bytes);
    std::vector<Tile> tiles = tiles_of(*call, sequences);
    int rows = most_rows(call->heads, call->kv_heads);
    int64_t scratch_bytes = kernels->attention_scratch(rows, call->head_dim);
    int64_t count = int64_t(tiles.size());
    std::atomic<int64_t> taken{0};
    bool ok = true;
#pragma omp parallel num_threads(threads) if (threads > 1 && count > 1) reduction(&& : ok)
    {
        void* scratch = std::aligned_alloc(64, scratch_bytes);
        ok = scratch != nullptr;
        kernels->tile_begin();
        int64_t i = taken++;
        while (scratch && i < count) {
            int64_t next = taken++;  // known early, so that its pages can be on their way
            attend(*call, tiles[i], next < count ? &tiles[next] : nullptr, scratch);
            i = next;
        }
        kernels->tile_end();
        std::free(scratch);
    }
    return ok;
}

void draftwire_sample(const Kernels* kernels, const void* logits, int element_bytes, int64_t rows,
                      int64_t vocabulary, int64_t stride, const double* temperature,
                      const int64_t* top_k, const double* top_p, const double* min_p,
                      const int64_t* seeds, const int64_t* positions, int64_t* ids, int threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1 && rows > 1)
    for (int64_t r = 0; r < rows; ++r) {
        std::vector<float> wide;
        const float* row = static_cast<const float*>(logits) + r * stride;
        if (element_bytes == 2) {
            wide.resize(vocabulary);
            kernels->widen(static_cast<const uint16_t*>(logits) + r * stride, vocabulary,
                           wide.data());
            row = wide.data();
        }
        Sampling s = {temperature[r], top_k[r], top_p[r], min_p[r], uint64_t(seeds[r]),
                      positions[r]};
        ids[r] = sample(*kernels, row, vocabulary, s);
    }
}

}  // extern "C"
#pragma GCC visibility pop
