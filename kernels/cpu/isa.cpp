// Compiled once per instruction set: -DDRAFTWIRE_ISA=name and the flags of the set. With
// DRAFTWIRE_TILES matrix tiles are used too.
#include "kernels.h"

#if defined(__AVX512F__)
#include "simd_avx512.h"
#elif defined(__AVX2__)
#include "simd_avx2.h"
#else
#include "simd_generic.h"
#endif

#include "attention.h"
#include "scan.h"
#ifdef DRAFTWIRE_TILES
#include "matrix.h"
#endif

#define QUOTED(x) #x
#define NAME_OF(x) QUOTED(x)
#define JOINED(a, b) a##b
#define TABLE_OF(x) JOINED(kernels_, x)

namespace draftwire {
namespace {

#if defined(__AVX512BF16__)
template <class T>
using DotBF16 = Paired<T>;
#elif defined(DRAFTWIRE_TILES)
template <class T>
using DotBF16 = Apart<T, uint16_t>;
#else
template <class T>
using DotBF16 = Apart<T, float>;
#endif

#ifdef DRAFTWIRE_TILES
void tile_begin() { tile_configure(whole_tiles()); }
void tile_end() { tile_release(); }

template <class T>
void attention_bf16(const Attention& call, const Tile& tile, const Tile* next, void* scratch) {
    tile_configure(attention_tiles());
    attention<uint16_t, Matrix<DotBF16<T>>>(call, tile, next, scratch);
    tile_configure(whole_tiles());
}
#else
void tile_begin() {}
void tile_end() {}

template <class T>
void attention_bf16(const Attention& call, const Tile& tile, const Tile* next, void* scratch) {
    attention<uint16_t, Lanes<DotBF16<T>>>(call, tile, next, scratch);
}
#endif

template <class T>
void attention_f32(const Attention& call, const Tile& tile, const Tile* next, void* scratch) {
    attention<float, Lanes<Apart<T, float>>>(call, tile, next, scratch);
}

}  // namespace

const Kernels* TABLE_OF(DRAFTWIRE_ISA)() {
    static const Kernels table = {
        NAME_OF(DRAFTWIRE_ISA),
        tile_begin,
        tile_end,
        attention_scratch,
        attention_bf16<uint16_t>,
        attention_f32<float>,
        attention_bf16<int8_t>,
        attention_f32<int8_t>,
        chunk_maxima,
        masses,
        rough_masses,
        candidates,
        widen,
    };
    return &table;
}

}  // namespace draftwire
