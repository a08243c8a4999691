// The sampler's passes over a row of logits, as loops that compilers turn into vectors.
//
// No product is fused with a sum (-ffp-contract=off), so every instruction set has the same results.
#pragma once
#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace draftwire {
namespace {

template <class To, class From>
inline To bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "same size");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

bool chunk_maxima(const float* row, int64_t n, float* maxima) {
    const int32_t sign_free = 0x7fffffff, infinity = 0x7f800000;
    int32_t largest = 0;
    for (int64_t i = 0; i < n; i += CHUNK) {
        int64_t count = n - i < CHUNK ? n - i : CHUNK;
        // Floats as integers of the same order, whose maximum vectorises.
        int32_t top = INT32_MIN;
        for (int64_t j = 0; j < count; ++j) {
            int32_t b = bits<int32_t>(row[i + j]);
            int32_t ordered = b ^ (b >> 31 & sign_free);
            top = ordered > top ? ordered : top;
            largest = (b & sign_free) > largest ? b & sign_free : largest;
        }
        maxima[i / CHUNK] = bits<float>(top ^ (top >> 31 & sign_free));
    }
    return largest <= infinity;
}

void masses(const float* row, int64_t n, float max, double inverse, int64_t* mass, uint16_t* bin) {
    const double magic = 0x1.8p52;  // adding it rounds to a whole number, left in the low bits
    for (int64_t i = 0; i < n; ++i) {
        double x = (double(row[i]) - double(max)) * inverse;
        x = x < -29.0 ? -29.0 : x;  // exp(-29) is under half a unit
        double shifted = x * 1.4426950408889634 + magic;
        double whole = shifted - magic;
        double r = x - whole * 0x1.62e42fefa38p-1;  // ln 2 in two parts, the first exact times whole
        r = r - whole * 0x1.ef35793c7673p-45;
        double y = 1.0 / 479001600;
        y = y * r + 1.0 / 39916800;
        y = y * r + 1.0 / 3628800;
        y = y * r + 1.0 / 362880;
        y = y * r + 1.0 / 40320;
        y = y * r + 1.0 / 5040;
        y = y * r + 1.0 / 720;
        y = y * r + 1.0 / 120;
        y = y * r + 1.0 / 24;
        y = y * r + 1.0 / 6;
        y = y * r + 0.5;
        y = y * r + 1.0;
        y = y * r + 1.0;
        y = bits<double>(bits<int64_t>(y) + (bits<int64_t>(shifted) << 52));
        mass[i] = bits<int64_t>(y * 0x1p40 + magic) - bits<int64_t>(magic);
        int32_t b = int32_t(x * -double(BINS_PER_UNIT));
        bin[i] = uint16_t(b < BINS ? b : BINS - 1);
    }
}

// A key is x + g with g = -log(-log u), and -log(u) >= 1 - u: it can reach `best` only if
// 1 - u <= exp(x - best). The left side is rounded down to 24 bits; on the right stands the chord of
// 2^t between whole t, which is what the bits of t * 2^23 read as a float are, and lies above it.
bool candidates(const float* row, int n, int64_t first_id, const Draw& draw, float best,
                int32_t* marks) {
    const float log2e = 1.44269504f, slack = 1.001f;
    int32_t gap[CHUNK];
    for (int j = 0; j < n; ++j)
        gap[j] = int32_t((1 << 24) - 1 - (mix(draw.key + uint64_t(first_id + j + 1) * GAMMA) >> 40));
    int32_t any = 0;
    for (int j = 0; j < n; ++j) {
        float half = row[j] * 0.5f - draw.max * 0.5f;  // of the difference, which may overflow
        float t = (half * (2 * draw.inverse) - best) * log2e;
        t = t < -126.0f ? -126.0f : t;
        t = t > 126.0f ? 126.0f : t;
        float reach = bits<float>(int32_t((t + 127.0f) * 0x1p23f)) * slack;
        marks[j] = (float(gap[j]) * 0x1p-24f <= reach) & (row[j] >= draw.edge);
        any |= marks[j];
    }
    return any != 0;
}

// Floats throughout, and sixteen sums side by side: right to about one in ten thousand.
void rough_masses(const float* row, int64_t n, float max, float inverse, float level, float* above,
                  float* total) {
    const float magic = 0x1.8p23f;
    float sum_above[16] = {}, sum[16] = {};
    for (int64_t i = 0; i < n; i += 16) {
        int count = n - i < 16 ? int(n - i) : 16;
        for (int j = 0; j < count; ++j) {
            float t = (row[i + j] * 0.5f - max * 0.5f) * (inverse * 2.88539008f);
            t = t < -126.0f ? -126.0f : t;
            float shifted = t + magic;
            float r = (t - (shifted - magic)) * 0.693147181f;
            float y = r * (1.0f / 120) + 1.0f / 24;
            y = y * r + 1.0f / 6;
            y = y * r + 0.5f;
            y = y * r + 1.0f;
            y = y * r + 1.0f;
            y = bits<float>(bits<int32_t>(y) + int32_t(bits<uint32_t>(shifted) << 23));
            sum[j] += y;
            sum_above[j] += row[i + j] > level ? y : 0.0f;
        }
    }
    *above = *total = 0.0f;
    for (int j = 0; j < 16; ++j) *above += sum_above[j], *total += sum[j];
}

void widen(const uint16_t* bf16, int64_t n, float* row) {
    for (int64_t i = 0; i < n; ++i) row[i] = bits<float>(uint32_t(bf16[i]) << 16);
}

}  // namespace
}  // namespace draftwire
