// Loops that are written out, so that what they index by the loop's variable can live in registers.
#pragma once
#include <utility>

namespace draftwire {
namespace {

template <int N>
struct Constant {
    static constexpr int value = N;
};

template <class F, int... i>
__attribute__((always_inline)) inline void each_of(std::integer_sequence<int, i...>, F f) {
    (f(Constant<i>()), ...);
}

// f(Constant<0>()), ... f(Constant<N - 1>()). GCC keeps an array that a plain loop goes over in
// memory, and stores sums once an iteration, even if it unrolls the loop afterwards.
template <int N, class F>
__attribute__((always_inline)) inline void each(F f) {
    each_of(std::make_integer_sequence<int, N>(), f);
}

#define INDEX(x) decltype(x)::value
#define INLINE __attribute__((always_inline))

}  // namespace
}  // namespace draftwire
