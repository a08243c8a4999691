// Sixteen float lanes as one AVX-512 register; bf16 dot products where AVX512_BF16 is on.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace draftwire {
namespace {

struct V {
    __m512 x;
};

inline V splat(float a) { return {_mm512_set1_ps(a)}; }
inline V load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline V load(const uint16_t* p) {
    __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))};
}
inline void store(float* p, V a) { _mm512_storeu_ps(p, a.x); }
inline void store(uint16_t* p, V a) {  // round to nearest even
    __m512i bits = _mm512_castps_si512(a.x);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i even = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __mmask16 nan = _mm512_cmp_ps_mask(a.x, a.x, _CMP_UNORD_Q);
    even = _mm512_mask_mov_epi32(even, nan, _mm512_set1_epi32(0x7fc00000));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtepi32_epi16(_mm512_srli_epi32(even, 16)));
}
inline V operator+(V a, V b) { return {_mm512_add_ps(a.x, b.x)}; }
inline V operator-(V a, V b) { return {_mm512_sub_ps(a.x, b.x)}; }
inline V operator*(V a, V b) { return {_mm512_mul_ps(a.x, b.x)}; }
inline V fma(V a, V b, V c) { return {_mm512_fmadd_ps(a.x, b.x, c.x)}; }
// b where either is NaN.
inline V max(V a, V b) { return {_mm512_max_ps(a.x, b.x)}; }
inline V round(V a) { return {_mm512_roundscale_ps(a.x, 8)}; }
// a * 2^n, n whole
inline V scale2(V a, V n) { return {_mm512_scalef_ps(a.x, n.x)}; }
// Lanes lo <= i < hi of a, `other` elsewhere.
inline V select(V a, int lo, int hi, float other) {
    uint32_t below_hi = hi >= 16 ? 0xffffu : hi <= 0 ? 0 : (1u << hi) - 1;
    uint32_t below_lo = lo >= 16 ? 0xffffu : lo <= 0 ? 0 : (1u << lo) - 1;
    return {_mm512_mask_mov_ps(_mm512_set1_ps(other), __mmask16(below_hi & ~below_lo), a.x)};
}
inline float sum(V a) { return _mm512_reduce_add_ps(a.x); }
inline float maximum(V a) { return _mm512_reduce_max_ps(a.x); }

constexpr int PV_ROWS = 6, PV_VECTORS = 4;

// Scores of one row against a block: K holds pairs of dims, interleaved per position.
struct DotF32 {
    using Query = float;
    static constexpr int ROWS = 4;
    struct Pair {
        __m512 lo, hi;  // (position, dim) pairs of eight positions each
    };
    __m512 lo = _mm512_setzero_ps(), hi = _mm512_setzero_ps();
    static Pair key(const float* k) { return {_mm512_loadu_ps(k), _mm512_loadu_ps(k + 16)}; }
    void step(Pair p, const float* q) {
        double two;
        std::memcpy(&two, q, sizeof two);
        __m512 both = _mm512_castpd_ps(_mm512_set1_pd(two));
        lo = _mm512_fmadd_ps(both, p.lo, lo);
        hi = _mm512_fmadd_ps(both, p.hi, hi);
    }
    V total() const {
        const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26,
                                               28, 30);
        const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
        return {_mm512_add_ps(_mm512_permutex2var_ps(lo, even, hi),
                              _mm512_permutex2var_ps(lo, odd, hi))};
    }
};

#ifdef __AVX512BF16__
struct DotBF16 {
    using Query = uint16_t;
    static constexpr int ROWS = 4;
    using Pair = __m512i;
    __m512 acc = _mm512_setzero_ps();
    static Pair key(const uint16_t* k) { return _mm512_loadu_si512(k); }
    void step(Pair k, const uint16_t* q) {
        int32_t two;
        std::memcpy(&two, q, sizeof two);
        acc = _mm512_dpbf16_ps(acc, (__m512bh)k, (__m512bh)_mm512_set1_epi32(two));
    }
    V total() const { return {acc}; }
};
#else
struct DotBF16 {
    using Query = float;
    static constexpr int ROWS = 4;
    struct Pair {
        __m512 even, odd;
    };
    __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
    static Pair key(const uint16_t* k) {
        __m512i bits = _mm512_loadu_si512(k);
        return {_mm512_castsi512_ps(_mm512_slli_epi32(bits, 16)),
                _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(int(0xffff0000u))))};
    }
    void step(Pair p, const float* q) {
        even = _mm512_fmadd_ps(_mm512_set1_ps(q[0]), p.even, even);
        odd = _mm512_fmadd_ps(_mm512_set1_ps(q[1]), p.odd, odd);
    }
    V total() const { return {_mm512_add_ps(even, odd)}; }
};
#endif

}  // namespace
}  // namespace draftwire
