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

constexpr int PV_ROWS = 1, PV_VECTORS = 2;

// Scores of one row against a block: K holds pairs of dims, interleaved per position.
struct DotF32 {
    using Query = float;
    static constexpr int ROWS = 1;
    float even[16] = {}, odd[16] = {};
    struct Pair {
        V even, odd;
    };
    static Pair key(const float* k) {
        Pair p;
        for (int i = 0; i < 16; ++i) p.even.x[i] = k[2 * i], p.odd.x[i] = k[2 * i + 1];
        return p;
    }
    static Pair key(const uint16_t* k) {
        uint32_t bits[16], even[16], odd[16];
        std::memcpy(bits, k, sizeof bits);
        for (int i = 0; i < 16; ++i) even[i] = bits[i] << 16, odd[i] = bits[i] & 0xffff0000u;
        Pair p;
        std::memcpy(p.even.x, even, sizeof even);
        std::memcpy(p.odd.x, odd, sizeof odd);
        return p;
    }
    void step(const Pair& k, const float* q) {
        for (int i = 0; i < 16; ++i) even[i] += q[0] * k.even.x[i], odd[i] += q[1] * k.odd.x[i];
    }
    V total() const {
        V r;
        for (int i = 0; i < 16; ++i) r.x[i] = even[i] + odd[i];
        return r;
    }
};
using DotBF16 = DotF32;

}  // namespace
}  // namespace draftwire
