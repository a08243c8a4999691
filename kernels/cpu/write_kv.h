// Writing one row's K and V of one head into its slot.
//
// An int8 row has one scale for K and one for V, made from that row alone; the rule is
// reference.quantise. Nothing here depends on the instruction set, and no row touches what another
// wrote, so rows may be written by different threads.
#pragma once
#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace draftwire {
namespace {  // also included by units of one instruction set, see kernels.h

inline float as_float(float x) { return x; }
inline float as_float(uint16_t bf16) {
    uint32_t bits = uint32_t(bf16) << 16;
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

// Largest magnitude / 127; 0 if that is no normal number, NaN if the row holds what is not finite.
template <class T>
inline float scale_of(const T* row, int dim) {
    uint32_t top = 0;  // magnitudes of floats order as their bits do
    for (int d = 0; d < dim; ++d) {
        float x = as_float(row[d]);
        uint32_t bits;
        std::memcpy(&bits, &x, sizeof bits);
        bits &= 0x7fffffffu;
        top = bits > top ? bits : top;
    }
    if (top >= 0x7f800000u) return __builtin_nanf("");
    float largest;
    std::memcpy(&largest, &top, sizeof largest);
    float scale = largest / 127.0f;
    return scale < 1.17549435e-38f ? 0.0f : scale;
}

// x / scale to the nearest whole number, even on a tie; 0 where the scale is 0 or NaN.
template <class T>
inline int8_t quantised(T x, float scale) {
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it leaves no bits for a fraction
    return scale > 0.0f ? int8_t((as_float(x) / scale + magic) - magic) : int8_t(0);
}

// K and V are (dim,) each of one head. The pool's elements are T or, if it has scales, int8.
template <class T>
inline void write_row(const T* k, const T* v, const Pool& pool, int64_t slot, int head) {
    int dim = pool.head_dim;
    int64_t page = (slot / BLOCK * pool.kv_heads + head) * BLOCK * dim;
    int64_t offset = slot % BLOCK;
    if (!pool.k_scale) {
        T* keys = static_cast<T*>(pool.k) + page + offset * 2;
        T* values = static_cast<T*>(pool.v) + page + offset / 2 * 2 * dim + offset % 2;
        for (int d = 0; d < dim; d += 2) std::memcpy(keys + d * BLOCK, k + d, 2 * sizeof(T));
        for (int d = 0; d < dim; ++d) values[2 * d] = v[d];
        return;
    }
    int8_t* keys = static_cast<int8_t*>(pool.k) + page + offset * 2;
    int8_t* values = static_cast<int8_t*>(pool.v) + page + offset / 2 * 2 * dim + offset % 2;
    float k_scale = scale_of(k, dim), v_scale = scale_of(v, dim);
    for (int d = 0; d < dim; ++d) {
        keys[d / 2 * 2 * BLOCK + d % 2] = quantised(k[d], k_scale);
        values[2 * d] = quantised(v[d], v_scale);
    }
    int64_t at = (slot / BLOCK * pool.kv_heads + head) * BLOCK + offset;
    pool.k_scale[at] = k_scale;
    pool.v_scale[at] = v_scale;
}

}  // namespace
}  // namespace draftwire
