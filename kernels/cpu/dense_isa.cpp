// Compiled once per instruction set, as isa.cpp is: linear layers and the pass of a decoder.
#include "dense.h"

#if defined(__AVX512F__)
#include "simd_avx512.h"
#elif defined(__AVX2__)
#include "simd_avx2.h"
#else
#include "simd_generic.h"
#endif

#include "pass.h"

#define JOINED(a, b) a##b
#define TABLE_OF(x) JOINED(dense_, x)

namespace draftwire {

const Dense* TABLE_OF(DRAFTWIRE_ISA)() {
    static const Dense table = {sizeof(LinearBF16::Input) == 4, run_linear, run_pass};
    return &table;
}

}  // namespace draftwire
