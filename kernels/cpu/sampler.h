// One token from one row of logits; the rule is reference.sample_rows.
#pragma once
#include "kernels.h"

namespace draftwire {

struct Sampling {
    double temperature;
    int64_t top_k;
    double top_p, min_p;
    uint64_t seed;
    int64_t position;
};

int64_t sample(const Kernels&, const float* row, int64_t n, const Sampling&);

}  // namespace draftwire
