// exp of sixteen lanes, for what softmax needs.
#pragma once

namespace draftwire {
namespace {

inline V exp(V x) {  // x <= 0; NaN stays; below e^-87 saturates, which no sum can see
    x = max(splat(-87.0f), x);
    V n = round(x * splat(1.44269504088896341f));
    V r = fma(n, splat(-0.693359375f), x);  // ln 2 in two parts, the first short enough to be exact
    r = fma(n, splat(2.12194440e-4f), r);
    V y = splat(1.0f / 5040);
    const float taylor[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
    for (float c : taylor) y = fma(y, r, splat(c));
    return scale2(y, n);
}

inline float exp(float x) {
    float lanes[16];
    store(lanes, exp(splat(x)));
    return lanes[0];
}

}  // namespace
}  // namespace draftwire
