// Sixteen float lanes in plain loops, which the compiler turns into what the target has.
#pragma once
#include <cstdint>
#include <cstring>

namespace draftwire {
namespace {

struct V {
    float x[16];
};

#define LANES for (int i = 0; i < 16; ++i)

inline V splat(float a) {
    V r;
    LANES r.x[i] = a;
    return r;
}
inline V splat_from(const float* p) { return splat(*p); }
inline V load(const float* p) { V r; LANES r.x[i] = p[i]; return r; }
inline V load(const uint16_t* p) {
    uint32_t bits[16];
    LANES bits[i] = uint32_t(p[i]) << 16;
    V r;
    std::memcpy(r.x, bits, sizeof bits);
    return r;
}
inline void store(float* p, const V& a) { LANES p[i] = a.x[i]; }
inline void store(uint16_t* p, const V& a) {
    uint32_t bits[16];
    std::memcpy(bits, a.x, sizeof bits);
    LANES {
        uint32_t even = (bits[i] + 0x7fff + (bits[i] >> 16 & 1)) >> 16;
        p[i] = uint16_t(a.x[i] == a.x[i] ? even : 0x7fc0);
    }
}
inline V operator+(const V& a, const V& b) { V r; LANES r.x[i] = a.x[i] + b.x[i]; return r; }
inline V operator-(const V& a, const V& b) { V r; LANES r.x[i] = a.x[i] - b.x[i]; return r; }
inline V operator*(const V& a, const V& b) { V r; LANES r.x[i] = a.x[i] * b.x[i]; return r; }
inline V operator/(const V& a, const V& b) { V r; LANES r.x[i] = a.x[i] / b.x[i]; return r; }
inline V fma(const V& a, const V& b, const V& c) {
    V r;
    LANES r.x[i] = a.x[i] * b.x[i] + c.x[i];
    return r;
}
// b where either is NaN.
inline V max(const V& a, const V& b) {
    V r;
    LANES r.x[i] = a.x[i] > b.x[i] ? a.x[i] : b.x[i];
    return r;
}
inline V round(const V& a) {  // for |a| < 2^22
    const float magic = 12582912.0f;
    V r;
    LANES r.x[i] = (a.x[i] + magic) - magic;
    return r;
}
inline V scale2(const V& a, const V& n) {  // a * 2^n, n whole in [-126, 127]
    uint32_t bits[16];
    LANES bits[i] = uint32_t(int32_t(n.x[i] == n.x[i] ? n.x[i] : 0.0f) + 127) << 23;
    V power;
    std::memcpy(power.x, bits, sizeof bits);
    return a * power;
}
// Lanes lo <= i < hi of a, `other` elsewhere.
inline V select(const V& a, int lo, int hi, float other) {
    V r;
    LANES r.x[i] = i >= lo && i < hi ? a.x[i] : other;
    return r;
}
inline float sum(const V& a) {
    float s[8];
    for (int i = 0; i < 8; ++i) s[i] = a.x[i] + a.x[i + 8];
    for (int i = 0; i < 4; ++i) s[i] += s[i + 4];
    return (s[0] + s[2]) + (s[1] + s[3]);
}
inline float maximum(const V& a) {
    float m = a.x[0];
    LANES m = m > a.x[i] ? m : a.x[i];
    return m;
}
#undef LANES

// Attention: rows and vectors of lanes that share the registers.
constexpr int ROWS = 1, GROUPS = 1;

// Sums of a tile of a linear layer, and blocks of columns side by side at many rows.
constexpr int SUMS = 4, WIDTH = 2;

// Of sixteen pairs of bf16 the first ones, or the second ones.
inline V firsts(const uint16_t* pairs) {
    uint16_t own[16];
    for (int i = 0; i < 16; ++i) own[i] = pairs[2 * i];
    return load(own);
}
inline V seconds(const uint16_t* pairs) {
    uint16_t own[16];
    for (int i = 0; i < 16; ++i) own[i] = pairs[2 * i + 1];
    return load(own);
}

// Quantised weights: sixteen fp16, bytes, signed bytes, or halves of bytes.
inline V from_half(const uint8_t* p) {
    V r;
    for (int i = 0; i < 16; ++i) {
        uint16_t half;
        std::memcpy(&half, p + 2 * i, sizeof half);
        // Its bits in the places of a float's; the power of two sets the exponents right, exactly.
        uint32_t bits = uint32_t(half & 0x8000) << 16 | uint32_t(half & 0x7fff) << 13;
        bool finite = (half & 0x7c00) != 0x7c00;
        if (!finite) bits |= 0x7f800000;
        float x;
        std::memcpy(&x, &bits, sizeof x);
        r.x[i] = finite ? x * 0x1p112f : x;
    }
    return r;
}
inline V from_bytes(const uint8_t* p) {
    V r;
    for (int i = 0; i < 16; ++i) r.x[i] = float(p[i]);
    return r;
}
inline V from_signed(const uint8_t* p) {
    V r;
    for (int i = 0; i < 16; ++i) r.x[i] = float(int8_t(p[i]));
    return r;
}
inline V low_nibbles(const uint8_t* p) {
    V r;
    for (int i = 0; i < 16; ++i) r.x[i] = float(p[i] & 15);
    return r;
}
inline V high_nibbles(const uint8_t* p) {
    V r;
    for (int i = 0; i < 16; ++i) r.x[i] = float(p[i] >> 4);
    return r;
}
// Of a pair of inputs one, for sixteen columns: of halves of bytes, where low ones are of the first
// eight columns, or of bytes.
inline V of_nibbles(const uint8_t* p, int half) {
    V r;
    for (int i = 0; i < 8; ++i) {
        r.x[i] = float(p[2 * i + half] & 15);
        r.x[8 + i] = float(p[2 * i + half] >> 4);
    }
    return r;
}
inline V of_bytes(const uint8_t* p, int half) {
    V r;
    for (int i = 0; i < 16; ++i) r.x[i] = float(p[2 * i + half]);
    return r;
}
inline V to_bf16(const V& a) {  // rounded
    uint16_t own[16];
    store(own, a);
    return load(own);
}
// Lanes 0 to 7, or 8 to 15, each twice.
inline V twice_low(const V& a) {
    V r;
    for (int i = 0; i < 16; ++i) r.x[i] = a.x[i / 2];
    return r;
}
inline V twice_high(const V& a) {
    V r;
    for (int i = 0; i < 16; ++i) r.x[i] = a.x[8 + i / 2];
    return r;
}
inline void store_pairs(uint16_t* to, const V& a, const V& b) {
    store(to, a);
    store(to + 16, b);
}

template <class T>
inline V every_second(const T* p) {
    V r;
    for (int i = 0; i < 16; ++i) r.x[i] = float(p[2 * i]);
    return r;
}
inline V firsts(const float* p) { return every_second(p); }
inline V seconds(const float* p) { return every_second(p + 1); }
inline V firsts(const int8_t* p) { return every_second(p); }
inline V seconds(const int8_t* p) { return every_second(p + 1); }

}  // namespace
}  // namespace draftwire
