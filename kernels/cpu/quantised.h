// Weights of four to eight bits, widened to the bf16 values that a model made of the same file has,
// a piece of a few blocks' depth at a time. What multiplies reads the piece as if weights were bf16,
// in the same order, so sums have the same bits.
//
// A value is scale * code + shift in float, rounded to bf16. The product is exact (scales have at
// most 18 significant bits and codes 6, or 11 and 8), so whether it is rounded, too, is the same.
//
// In memory a block of 16 columns is its groups of 16 or 32 inputs, one after another:
//   plain: 16 scales and, if there are any, 16 shifts in fp16; codes.
//   super: every 256 inputs 16 scales and, if any, 16 shifts in fp16; then for each group 16 whole
//          factors of these and, if any, 16 of those, which are subtracted; codes.
// Without shifts a code of ZERO means zero. Codes of two inputs lie as their values will, 16 for the
// first 8 columns, a pair after another, and 16 for the others: in bytes one after the other; of four
// bits the former in low nibbles, the latter in high ones.
#pragma once
#include <cstdint>
#include <cstring>

#include "dense.h"
#include "write_kv.h"

namespace draftwire {
namespace {

constexpr int SUPER = 256;  // inputs; what is widened at a time, too

// What codes look like: in halves of bytes, in bytes, in groups of 16.
enum { NIBBLES, BYTES, SHORT };

constexpr int codes_of(int format) {
    return format == Q4_0 || format == Q4_1 || format == Q4_K ? NIBBLES
           : format == Q6_K                                   ? SHORT
                                                              : BYTES;
}

template <int CODES>
struct Codes {
    static constexpr int group = CODES == SHORT ? 16 : 32;
    static constexpr int bytes = CODES == NIBBLES ? 16 : 32;  // of two inputs
    // One of the inputs, for 16 columns.
    static V input(const uint8_t* at, int half) {
        return CODES == NIBBLES ? of_nibbles(at, half) : of_bytes(at, half);
    }
    // Both inputs, for the first 8 columns, and for the others.
    static V low(const uint8_t* at) { return CODES == NIBBLES ? low_nibbles(at) : from_bytes(at); }
    static V high(const uint8_t* at) {
        return CODES == NIBBLES ? high_nibbles(at) : from_bytes(at + 16);
    }
};

template <int FORMAT>
struct Kind {
    static constexpr bool super = FORMAT >= Q4_K;
    using C = Codes<codes_of(FORMAT)>;
    static constexpr int zero = FORMAT == Q4_0   ? 8
                                : FORMAT == Q5_0 ? 16
                                : FORMAT == Q8_0 ? 128
                                : FORMAT == Q6_K ? 32
                                                 : 0;  // there are shifts
    static constexpr int group = C::group;
    static constexpr int scale_bytes = (super ? 16 : 32) * (zero ? 1 : 2);
    static constexpr int group_bytes = scale_bytes + group / 2 * C::bytes;
    static constexpr int super_bytes = super ? (zero ? 32 : 64) : 0;
};

inline int64_t bytes_of(int inputs, int group, int group_bytes, int super_bytes) {
    return int64_t(inputs) / group * group_bytes + (inputs + SUPER - 1) / SUPER * super_bytes;
}

// Where input `k` of a block begins; a multiple of SUPER.
template <int FORMAT>
inline const uint8_t* piece_at(const uint8_t* block, int k) {
    using F = Kind<FORMAT>;
    return block + bytes_of(k, F::group, F::group_bytes, F::super_bytes);
}

// Scales and shifts of a group.
struct Group {
    V scale, shift;
};

// Those of the first 8 columns, each twice, and of the others.
struct Twice {
    V scale[2], shift[2];
    Twice() {}
    Twice(const Group& g)
        : scale{twice_low(g.scale), twice_high(g.scale)},
          shift{twice_low(g.shift), twice_high(g.shift)} {}
};

// Reads a block's groups one after another.
template <int FORMAT>
struct Groups {
    using F = Kind<FORMAT>;
    const uint8_t* at;
    V scale, shift;  // what groups have factors of

    void begin_super() {
        if constexpr (!F::super) return;
        scale = from_half(at);
        if constexpr (!F::zero) shift = splat(0.0f) - from_half(at + 32);
        at += F::super_bytes;
    }
    // The next one; `at` is then at its codes.
    Group next() {
        V own, by;
        if constexpr (F::super) {
            own = scale * (F::zero ? from_signed(at) : from_bytes(at));
            if constexpr (!F::zero) by = shift * from_bytes(at + 16);
        } else {
            own = from_half(at);
            if constexpr (!F::zero) by = from_half(at + 32);
        }
        if constexpr (F::zero != 0) by = own * splat(float(-F::zero));
        at += F::scale_bytes;
        return {own, by};
    }
};

// Two inputs of 16 columns: as bf16, pair by pair, or as the floats that these are, one after the
// other.
template <class C>
inline void widen_two(const uint8_t* at, const Twice& by, uint16_t* to) {
    store_pairs(to, fma(C::low(at), by.scale[0], by.shift[0]),
                fma(C::high(at), by.scale[1], by.shift[1]));
}
template <class C>
inline void widen_two(const uint8_t* at, const Group& by, float* to) {
    V first = to_bf16(fma(C::input(at, 0), by.scale, by.shift));
    V second = to_bf16(fma(C::input(at, 1), by.scale, by.shift));
    store(to, first);
    store(to + 16, second);
}
inline Twice scales_for(const uint16_t*, const Group& g) { return g; }
inline Group scales_for(const float*, const Group& g) { return g; }

// `inputs` (at most SUPER) of a block from `at` on.
template <int FORMAT, class T>
inline void widen_piece(const uint8_t* at, int inputs, T* to) {
    using F = Kind<FORMAT>;
    Groups<FORMAT> groups = {at, splat(0.0f), splat(0.0f)};
    groups.begin_super();
    for (int k = 0; k < inputs; k += F::group) {
        // The pieces of a block follow each other.
        for (int line = 0; line < F::group_bytes; line += 64)
            __builtin_prefetch(groups.at + F::group_bytes * (SUPER / F::group) + line, 0, 2);
        const auto by = scales_for(to, groups.next());
        for (int p = 0; p < F::group / 2; ++p, groups.at += F::C::bytes, to += 32)
            widen_two<typename F::C>(groups.at, by, to);
    }
}

// A block of any format, group by group.
struct Reader {
    const uint8_t* at;
    int format;
    V scale, shift;

    void begin(const QuantisedBlock& block) {
        at = block.at;
        format = block.format;
    }
    // The group of input `k`; where its codes are.
    const uint8_t* next(int k, Group& group) {
        switch (format) {
            case Q4_0: return next<Q4_0>(k, group);
            case Q4_1: return next<Q4_1>(k, group);
            case Q5_0: return next<Q5_0>(k, group);
            case Q5_1: return next<Q5_1>(k, group);
            case Q8_0: return next<Q8_0>(k, group);
            case Q4_K: return next<Q4_K>(k, group);
            case Q5_K: return next<Q5_K>(k, group);
            default: return next<Q6_K>(k, group);
        }
    }
    template <int FORMAT>
    const uint8_t* next(int k, Group& group) {
        using F = Kind<FORMAT>;
        Groups<FORMAT> groups = {at, scale, shift};
        if (F::super && k % SUPER == 0) {
            groups.begin_super();
            scale = groups.scale;
            shift = groups.shift;
        }
        for (int line = 0; line < F::group_bytes; line += 64)
            __builtin_prefetch(groups.at + 2048 + line);
        group = groups.next();
        at = groups.at + F::group / 2 * F::C::bytes;
        return groups.at;
    }
};

// The same by a block's number.
template <class T>
inline void widen_piece(const QuantisedBlock& block, int k, int inputs, T* to) {
    switch (block.format) {
        case Q4_0: return widen_piece<Q4_0>(piece_at<Q4_0>(block.at, k), inputs, to);
        case Q4_1: return widen_piece<Q4_1>(piece_at<Q4_1>(block.at, k), inputs, to);
        case Q5_0: return widen_piece<Q5_0>(piece_at<Q5_0>(block.at, k), inputs, to);
        case Q5_1: return widen_piece<Q5_1>(piece_at<Q5_1>(block.at, k), inputs, to);
        case Q8_0: return widen_piece<Q8_0>(piece_at<Q8_0>(block.at, k), inputs, to);
        case Q4_K: return widen_piece<Q4_K>(piece_at<Q4_K>(block.at, k), inputs, to);
        case Q5_K: return widen_piece<Q5_K>(piece_at<Q5_K>(block.at, k), inputs, to);
        default: return widen_piece<Q6_K>(piece_at<Q6_K>(block.at, k), inputs, to);
    }
}

// A column of `inputs`, a multiple of 32: what the embedding of a token is.
inline void widen_column(const Projection& p, int column, int inputs, float* to) {
    alignas(64) uint16_t pairs[SUPER * 16];
    const QuantisedBlock& block = p.blocks[column / 16];
    for (int k = 0; k < inputs; k += SUPER) {
        int count = inputs - k < SUPER ? inputs - k : SUPER;
        widen_piece(block, k, count, pairs);
        for (int i = 0; i < count; ++i)
            to[k + i] = as_float(pairs[i / 2 * 32 + column % 16 * 2 + i % 2]);
    }
}

}  // namespace
}  // namespace draftwire
