// Compiled once per instruction set: -DDRAFTWIRE_ISA=name and the flags of the set.
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

#define QUOTED(x) #x
#define NAME_OF(x) QUOTED(x)
#define JOINED(a, b) a##b
#define TABLE_OF(x) JOINED(kernels_, x)

namespace draftwire {

const Kernels* TABLE_OF(DRAFTWIRE_ISA)() {
    static const Kernels table = {
        NAME_OF(DRAFTWIRE_ISA),
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
