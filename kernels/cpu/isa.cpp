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
#include "tiles_amx.h"
#endif

#define QUOTED(x) #x
#define NAME_OF(x) QUOTED(x)
#define JOINED(a, b) a##b
#define TABLE_OF(x) JOINED(kernels_, x)

namespace draftwire {
namespace {

#ifdef DRAFTWIRE_TILES
void tile_begin() { tile_configure(whole_tiles()); }
void tile_end() { tile_release(); }
#else
void tile_begin() {}
void tile_end() {}
#endif

}  // namespace

const Kernels* TABLE_OF(DRAFTWIRE_ISA)() {
    static const Kernels table = {
        NAME_OF(DRAFTWIRE_ISA),
        tile_begin,
        tile_end,
        attention_scratch,
        attention<uint16_t, DotBF16>,
        attention<float, DotF32>,
        chunk_maxima,
        masses,
        rough_masses,
        candidates,
        widen,
    };
    return &table;
}

}  // namespace draftwire
