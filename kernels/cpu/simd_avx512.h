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
inline V splat_from(const float* p) { return splat(*p); }
inline V load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline V load(const uint16_t* p) {
    __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))};
}
inline void store(float* p, V a) { _mm512_storeu_ps(p, a.x); }
inline void store(uint16_t* p, V a) {  // round to nearest even
#ifdef __AVX512BF16__
    // What is too small for a normal number becomes zero, as it is to the instruction for products.
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(a.x));
#else
    __m512i bits = _mm512_castps_si512(a.x);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i even = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __mmask16 nan = _mm512_cmp_ps_mask(a.x, a.x, _CMP_UNORD_Q);
    even = _mm512_mask_mov_epi32(even, nan, _mm512_set1_epi32(0x7fc00000));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtepi32_epi16(_mm512_srli_epi32(even, 16)));
#endif
}
inline V operator+(V a, V b) { return {_mm512_add_ps(a.x, b.x)}; }
inline V operator-(V a, V b) { return {_mm512_sub_ps(a.x, b.x)}; }
inline V operator*(V a, V b) { return {_mm512_mul_ps(a.x, b.x)}; }
inline V operator/(V a, V b) { return {_mm512_div_ps(a.x, b.x)}; }
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

// Attention: rows and vectors of lanes that share the registers.
constexpr int ROWS = 6, GROUPS = 4;

// Sums of a tile of a linear layer, and blocks of columns side by side at many rows.
constexpr int SUMS = 24, WIDTH = 3;

// Of sixteen pairs of bf16 the first ones, or the second ones.
inline V firsts(const uint16_t* pairs) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(pairs), 16))};
}
inline V seconds(const uint16_t* pairs) {
    __m512i high = _mm512_set1_epi32(int(0xffff0000u));
    return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(pairs), high))};
}

// Quantised weights: sixteen fp16, bytes, signed bytes, or halves of bytes.
inline V from_half(const uint8_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline __m128i bytes16(const uint8_t* p) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}
inline V from_bytes(const uint8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes16(p)))};
}
inline V from_signed(const uint8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes16(p)))};
}
inline V low_nibbles(const uint8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_and_si512(_mm512_cvtepu8_epi32(bytes16(p)), _mm512_set1_epi32(15)))};
}
inline V high_nibbles(const uint8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_srli_epi32(_mm512_cvtepu8_epi32(bytes16(p)), 4))};
}
// Of a pair of inputs one, for sixteen columns: of halves of bytes, where low ones are of the first
// eight columns, or of bytes.
inline V of_nibbles(const uint8_t* p, int half) {
    __m512i x = _mm512_broadcast_i32x8(
        _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
    const __m512i by = half ? _mm512_setr_epi32(8, 8, 8, 8, 8, 8, 8, 8, 12, 12, 12, 12, 12, 12, 12, 12)
                            : _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 4, 4, 4, 4);
    x = _mm512_and_si512(_mm512_srlv_epi32(x, by), _mm512_set1_epi32(15));
    return {_mm512_cvtepi32_ps(x)};
}
inline V of_bytes(const uint8_t* p, int half) {
    __m512i x =
        _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    x = half ? _mm512_srli_epi32(x, 8) : _mm512_and_si512(x, _mm512_set1_epi32(255));
    return {_mm512_cvtepi32_ps(x)};
}
// Rounded to bf16 as in simd_avx2.h; two instructions are better here, which share their ports.
inline V to_bf16(V a) {
    const __m512 far = _mm512_set1_ps(0x1p16f);
    return {_mm512_fnmadd_ps(a.x, far, _mm512_fmadd_ps(a.x, far, a.x))};
}
// Lanes 0 to 7, or 8 to 15, each twice.
inline V twice_low(V a) {
    const __m512i lanes = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    return {_mm512_permutexvar_ps(lanes, a.x)};
}
inline V twice_high(V a) {
    const __m512i lanes = _mm512_setr_epi32(8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15,
                                            15);
    return {_mm512_permutexvar_ps(lanes, a.x)};
}
inline void store_pairs(uint16_t* to, V a, V b) {
#ifdef __AVX512BF16__
    _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(b.x, a.x));
#else
    store(to, a);
    store(to + 16, b);
#endif
}

#ifdef __AVX512BF16__
struct PairBF16 {
    using Weight = uint16_t;
    using Input = uint16_t;
    static constexpr int HALVES = 1;
    // Quantised weights: two of them in a register, in one, or as bf16 in cache.
    using Piece = uint16_t;
    using OfPiece = PairBF16;
    static constexpr int TWO = 8;
    template <class Codes, class Scales>
    static __m512i quantised(const uint8_t* at, int, const Scales& by) {
        V first = fma(Codes::low(at), by.scale[0], by.shift[0]);
        V other = fma(Codes::high(at), by.scale[1], by.shift[1]);
        return (__m512i)_mm512_cvtne2ps_pbh(other.x, first.x);
    }
    static __m512i weights(const uint16_t* pairs, int) { return _mm512_loadu_si512(pairs); }
    using Weights = __m512i;
    static __m512i input(const uint16_t* x, int) {
        int32_t two;
        std::memcpy(&two, x, sizeof two);
        return _mm512_set1_epi32(two);
    }
    static V step(__m512i w, __m512i x, V sum) {
        return {_mm512_dpbf16_ps(sum.x, (__m512bh)w, (__m512bh)x)};
    }
};
#endif

inline V firsts(const float* p) {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28,
                                           30);
    return {_mm512_permutex2var_ps(_mm512_loadu_ps(p), even, _mm512_loadu_ps(p + 16))};
}
inline V seconds(const float* p) {
    const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29,
                                          31);
    return {_mm512_permutex2var_ps(_mm512_loadu_ps(p), odd, _mm512_loadu_ps(p + 16))};
}
inline __m512i pairs16(const int8_t* p) {  // as int16
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline V firsts(const int8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(pairs16(p), 16), 16))};
}
inline V seconds(const int8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_srai_epi32(pairs16(p), 16))};
}

#ifdef __AVX512BF16__
inline __m512i bf16_pairs(const uint16_t* p) { return _mm512_loadu_si512(p); }
inline __m512i bf16_pairs(const int8_t* p) {  // exact: 7 bits and a sign
    __m512i low = _mm512_srli_epi32(_mm512_castps_si512(firsts(p).x), 16);
    return _mm512_or_si512(low, _mm512_castps_si512(seconds(p).x));
}
// sum + x[0] * first + x[1] * second
inline V dot_pairs(__m512i pairs, const uint16_t* x, V sum) {
    int32_t two;
    std::memcpy(&two, x, sizeof two);
    return {_mm512_dpbf16_ps(sum.x, (__m512bh)pairs, (__m512bh)_mm512_set1_epi32(two))};
}
#endif

}  // namespace
}  // namespace draftwire
