// Sixteen float lanes as two AVX2 registers.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace draftwire {
namespace {

struct V {
    __m256 lo, hi;
};

inline V splat(float a) { return {_mm256_set1_ps(a), _mm256_set1_ps(a)}; }
// The compiler may not keep it for another use: registers are scarcer than loads.
inline V splat_from(const float* p) {
    __m256 x;
    asm volatile("vbroadcastss %1, %0" : "=x"(x) : "m"(*p));
    return {x, x};
}
inline V load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline __m256 widen8(const uint16_t* p) {
    __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}
inline V load(const uint16_t* p) { return {widen8(p), widen8(p + 8)}; }
inline void store(float* p, V a) {
    _mm256_storeu_ps(p, a.lo);
    _mm256_storeu_ps(p + 8, a.hi);
}
inline __m256i narrow8(__m256 a) {  // round to nearest even; the results in the low halves
    __m256i bits = _mm256_castps_si256(a);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i even = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    even = _mm256_blendv_epi8(even, _mm256_set1_epi32(0x7fc00000), nan);
    return _mm256_srli_epi32(even, 16);
}
inline void store(uint16_t* p, V a) {
    __m256i both = _mm256_packus_epi32(narrow8(a.lo), narrow8(a.hi));
    both = _mm256_permute4x64_epi64(both, 0xd8);  // packus works in 128-bit halves
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), both);
}
inline V operator+(V a, V b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline V operator-(V a, V b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline V operator*(V a, V b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline V operator/(V a, V b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline V fma(V a, V b, V c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
// b where either is NaN.
inline V max(V a, V b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline V round(V a) { return {_mm256_round_ps(a.lo, 8), _mm256_round_ps(a.hi, 8)}; }
inline __m256 power8(__m256 n) {
    __m256i whole = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(whole, 23));
}
// a * 2^n, n whole in [-126, 127]
inline V scale2(V a, V n) {
    return {_mm256_mul_ps(a.lo, power8(n.lo)), _mm256_mul_ps(a.hi, power8(n.hi))};
}
inline __m256 select8(__m256 a, int lo, int hi, float other, int first) {
    __m256i lane = _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7),
                                    _mm256_set1_epi32(first));
    __m256i in = _mm256_and_si256(_mm256_cmpgt_epi32(lane, _mm256_set1_epi32(lo - 1)),
                                  _mm256_cmpgt_epi32(_mm256_set1_epi32(hi), lane));
    return _mm256_blendv_ps(_mm256_set1_ps(other), a, _mm256_castsi256_ps(in));
}
// Lanes lo <= i < hi of a, `other` elsewhere.
inline V select(V a, int lo, int hi, float other) {
    return {select8(a.lo, lo, hi, other, 0), select8(a.hi, lo, hi, other, 8)};
}
inline float sum(V a) {
    __m256 s = _mm256_add_ps(a.lo, a.hi);
    __m128 t = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    t = _mm_add_ps(t, _mm_movehl_ps(t, t));
    return _mm_cvtss_f32(_mm_add_ss(t, _mm_movehdup_ps(t)));
}
inline float maximum(V a) {
    __m256 s = _mm256_max_ps(a.lo, a.hi);
    __m128 t = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    t = _mm_max_ps(t, _mm_movehl_ps(t, t));
    return _mm_cvtss_f32(_mm_max_ss(t, _mm_movehdup_ps(t)));
}

// Attention: rows and vectors of lanes that share the registers.
constexpr int ROWS = 3, GROUPS = 2;

// Sums of a tile of a linear layer, and blocks of columns side by side at many rows.
constexpr int SUMS = 6, WIDTH = 1;

// Of sixteen pairs of bf16 the first ones, or the second ones.
inline V firsts(const uint16_t* pairs) {
    auto* p = reinterpret_cast<const __m256i*>(pairs);
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(p), 16)),
            _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(p + 1), 16))};
}
inline V seconds(const uint16_t* pairs) {  // a mask would take a register that sums need
    auto high = [](__m256i x) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_srli_epi32(x, 16), 16));
    };
    auto* p = reinterpret_cast<const __m256i*>(pairs);
    return {high(_mm256_loadu_si256(p)), high(_mm256_loadu_si256(p + 1))};
}

// Quantised weights: sixteen fp16, bytes, signed bytes, or halves of bytes.
inline V from_half(const uint8_t* p) {
    auto* halves = reinterpret_cast<const __m128i*>(p);
    return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
}
inline __m128i bytes8(const uint8_t* p) {
    return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
}
inline V from_bytes(const uint8_t* p) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes8(p))),
            _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes8(p + 8)))};
}
inline V from_signed(const uint8_t* p) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes8(p))),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes8(p + 8)))};
}
inline __m256 low8(__m256i x) {
    return _mm256_cvtepi32_ps(_mm256_and_si256(x, _mm256_set1_epi32(15)));
}
inline V low_nibbles(const uint8_t* p) {
    return {low8(_mm256_cvtepu8_epi32(bytes8(p))), low8(_mm256_cvtepu8_epi32(bytes8(p + 8)))};
}
inline __m256 high8(__m256i x) { return _mm256_cvtepi32_ps(_mm256_srli_epi32(x, 4)); }
inline V high_nibbles(const uint8_t* p) {
    return {high8(_mm256_cvtepu8_epi32(bytes8(p))), high8(_mm256_cvtepu8_epi32(bytes8(p + 8)))};
}
// Of a pair of inputs one, for sixteen columns: of halves of bytes, where low ones are of the first
// eight columns, or of bytes.
inline __m256i pairs8(const uint8_t* p) {  // the codes of a column, two or four, in a lane
    return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline V of_nibbles(const uint8_t* p, int half) {
    __m256i x = pairs8(p);
    if (half) return {low8(_mm256_srli_epi32(x, 8)), _mm256_cvtepi32_ps(_mm256_srli_epi32(x, 12))};
    return {low8(x), low8(_mm256_srli_epi32(x, 4))};
}
inline __m256 byte8(__m256i x, int half) {
    return _mm256_cvtepi32_ps(half ? _mm256_srli_epi32(x, 8)
                                   : _mm256_and_si256(x, _mm256_set1_epi32(255)));
}
inline V of_bytes(const uint8_t* p, int half) {
    return {byte8(pairs8(p), half), byte8(pairs8(p + 16), half)};
}
// Rounded to bf16, to even where it is a tie, in a multiplication and two additions: 2^16 * a is
// exact, and a is rounded to the eight bits that are left of it in the sum, whose other bits are
// even. For finite a of less than 2^111, none of whose bits are below 2^-126.
inline __m256 bf16_8(__m256 a) {
    __m256 far = _mm256_mul_ps(a, _mm256_set1_ps(0x1p16f));
    return _mm256_sub_ps(_mm256_add_ps(far, a), far);
}
inline V to_bf16(V a) { return {bf16_8(a.lo), bf16_8(a.hi)}; }
// Lanes 0 to 7, or 8 to 15, each twice.
inline V twice8(__m256 a) {
    return {_mm256_permutevar8x32_ps(a, _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3)),
            _mm256_permutevar8x32_ps(a, _mm256_setr_epi32(4, 4, 5, 5, 6, 6, 7, 7))};
}
inline V twice_low(V a) { return twice8(a.lo); }
inline V twice_high(V a) { return twice8(a.hi); }
inline void store_pairs(uint16_t* to, V a, V b) {
    store(to, a);
    store(to + 16, b);
}

inline __m256 every_second(__m256 a, __m256 b, const int which) {
    __m256 mixed = which ? _mm256_shuffle_ps(a, b, 0xdd) : _mm256_shuffle_ps(a, b, 0x88);
    return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(mixed), 0xd8));
}
inline V firsts(const float* p) {
    V a = load(p), b = load(p + 16);
    return {every_second(a.lo, a.hi, 0), every_second(b.lo, b.hi, 0)};
}
inline V seconds(const float* p) {
    V a = load(p), b = load(p + 16);
    return {every_second(a.lo, a.hi, 1), every_second(b.lo, b.hi, 1)};
}
inline __m256i pairs8(const int8_t* p) {  // as int16
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline __m256 float8(__m256i pairs) { return _mm256_cvtepi32_ps(_mm256_srai_epi32(pairs, 16)); }
inline V firsts(const int8_t* p) {
    return {float8(_mm256_slli_epi32(pairs8(p), 16)), float8(_mm256_slli_epi32(pairs8(p + 16), 16))};
}
inline V seconds(const int8_t* p) { return {float8(pairs8(p)), float8(pairs8(p + 16))}; }

}  // namespace
}  // namespace draftwire
