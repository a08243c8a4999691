#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

namespace draftwire {
namespace {

using Logits = std::vector<float>;

struct Row {
    const Kernels& kernels;
    const float* logits;
    int64_t size;
    std::vector<float> chunk_maxima;
    float max;

    int64_t chunk_size(int64_t chunk) const {
        return std::min<int64_t>(CHUNK, size - chunk * CHUNK);
    }

    Logits at_least(float edge) const {
        Logits found;
        for (int64_t c = 0; c < int64_t(chunk_maxima.size()); ++c) {
            if (!(chunk_maxima[c] >= edge)) continue;
            const float* chunk = logits + c * CHUNK;
            for (int64_t j = 0; j < chunk_size(c); ++j)
                if (chunk[j] >= edge) found.push_back(chunk[j]);
        }
        return found;
    }

    int64_t first_of(float value) const {
        auto chunk = std::find(chunk_maxima.begin(), chunk_maxima.end(), value);
        const float* from = logits + (chunk - chunk_maxima.begin()) * CHUNK;
        return std::find(from, logits + size, value) - logits;
    }
};

float kth_largest(Logits& values, int64_t k) {
    std::nth_element(values.begin(), values.begin() + (k - 1), values.end(), std::greater<float>());
    return values[k - 1];
}

// The k-th largest chunk maximum bounds the k-th largest logit from below: few are left to look at.
float top_k_edge(const Row& row, int64_t k) {
    float bound = std::numeric_limits<float>::lowest();
    if (k <= int64_t(row.chunk_maxima.size())) {
        Logits maxima = row.chunk_maxima;
        bound = kth_largest(maxima, k);
    }
    Logits left = row.at_least(bound);
    return k <= int64_t(left.size()) ? kth_largest(left, k) : bound;
}

struct Weighted {
    float logit;
    int64_t mass;
};

// The largest edge such that the masses of logits >= edge, plus `above`, are at least `need`.
float weighted_edge(std::vector<Weighted>& items, int64_t above, double need) {
    auto first = items.begin(), last = items.end();
    while (last - first > 1) {
        float a = first->logit, b = first[(last - first) / 2].logit, c = last[-1].logit;
        float pivot = std::max(std::min(a, b), std::min(std::max(a, b), c));
        auto equal = std::partition(first, last, [=](Weighted w) { return w.logit > pivot; });
        auto less = std::partition(equal, last, [=](Weighted w) { return w.logit == pivot; });
        int64_t larger = above, reached;
        for (auto i = first; i != equal; ++i) larger += i->mass;
        reached = larger;
        for (auto i = equal; i != less; ++i) reached += i->mass;
        if (double(larger) >= need && first != equal) {
            last = equal;
        } else if (double(reached) >= need || less == last) {
            return pivot;
        } else {
            above = reached;
            first = less;
        }
    }
    return first->logit;
}

// Top-p among `n` logits: a histogram of their masses finds the bin, and a selection the edge in it.
float nucleus_edge(const Kernels& kernels, const float* logits, int64_t n, float max,
                   const Sampling& s) {
    constexpr int64_t BLOCK_SIZE = 1024;  // what stays in L1
    int64_t mass[BLOCK_SIZE], histogram[BINS] = {}, total = 0;
    double inverse = std::min(1.0 / s.temperature, 1e300);  // times zero it must be zero
    std::unique_ptr<uint16_t[]> bins(new uint16_t[n]);
    for (int64_t i = 0; i < n; i += BLOCK_SIZE) {
        int64_t count = std::min(BLOCK_SIZE, n - i);
        uint16_t* bin = bins.get() + i;
        kernels.masses(logits + i, count, max, inverse, mass, bin);
        for (int64_t j = 0; j < count; ++j) histogram[bin[j]] += mass[j];
    }
    for (int64_t m : histogram) total += m;
    double need = s.top_p * double(total);
    int64_t above = 0;
    int at = 0;
    while (at < BINS - 1 && double(above + histogram[at]) < need) above += histogram[at++];
    std::vector<Weighted> items;
    for (int64_t i = 0; i < n; ++i) {
        if (bins[i] != at) continue;
        uint16_t bin;
        kernels.masses(logits + i, 1, max, inverse, mass, &bin);
        items.push_back({logits[i], mass[0]});
    }
    return weighted_edge(items, above, need);
}

// The smallest float whose x is at least `least`.
float logit_of(double least, float max, double temperature) {
    const float lowest = std::numeric_limits<float>::lowest();
    auto inside = [=](float f) { return (double(f) - double(max)) / temperature >= least; };
    auto step = [](float f, float to) { return std::nextafter(f, to); };
    float edge = float(std::max(double(lowest), double(max) + least * temperature));
    while (edge < max && !inside(edge)) edge = step(edge, max);
    while (edge > lowest && inside(step(edge, lowest))) edge = step(edge, lowest);
    return edge;
}

double gumbel(uint64_t key, int64_t id) {
    uint64_t bits = mix(key + uint64_t(id + 1) * GAMMA);
    double u = (double(bits >> 12) + 0.5) * 0x1p-52;
    return -std::log(-std::log(u));
}

// The survivor (logit >= edge, the maximum always among them) with the largest key.
int64_t argmax_key(const Row& row, const Sampling& s, float edge) {
    double inverse = std::min(1.0 / s.temperature, 1e30);
    Draw d = {mix(mix(s.seed) + uint64_t(s.position)), edge, row.max, float(inverse)};
    int64_t chosen = row.first_of(row.max);
    double best = gumbel(d.key, chosen);
    int32_t marks[CHUNK];
    for (int64_t c = 0; c < int64_t(row.chunk_maxima.size()); ++c) {
        if (!(row.chunk_maxima[c] >= edge)) continue;
        int64_t first = c * CHUNK;
        int n = int(row.chunk_size(c));
        const float* chunk = row.logits + first;
        if (!row.kernels.candidates(chunk, n, first, d, float(best), marks)) continue;
        for (int j = 0; j < n; ++j) {
            if (!marks[j]) continue;
            double x = (double(chunk[j]) - double(row.max)) / s.temperature;
            double key = x + gumbel(d.key, first + j);
            if (key > best || (key == best && first + j < chosen)) best = key, chosen = first + j;
        }
    }
    return chosen;
}

// Whether top-p keeps this logit, by so wide a margin that rough sums can tell.
bool surely_in_nucleus(const Row& row, const Sampling& s, float logit) {
    float inverse = float(std::min(1.0 / s.temperature, 1e30)), above, total;
    row.kernels.rough_masses(row.logits, row.size, row.max, inverse, logit, &above, &total);
    return above < (s.top_p - 1e-3) * total;
}

int64_t draw(const Row& row, const Sampling& s) {
    float edge = std::numeric_limits<float>::lowest();  // -inf never survives
    if (s.min_p > 0) edge = logit_of(std::min(0.0, std::log(s.min_p)), row.max, s.temperature);
    if (s.top_k > 0 && s.top_k < row.size) {
        float k_edge = top_k_edge(row, s.top_k);
        edge = std::max(edge, k_edge);
        if (s.top_p < 1) {
            Logits kept = row.at_least(k_edge);
            edge = std::max(edge, nucleus_edge(row.kernels, kept.data(), kept.size(), row.max, s));
        }
        return argmax_key(row, s, edge);
    }
    // Usually the winner without top-p is in the nucleus, and so the winner with it: its edge, which
    // takes an exact sum over the vocabulary, need not be known.
    int64_t chosen = argmax_key(row, s, edge);
    if (s.top_p >= 1 || surely_in_nucleus(row, s, row.logits[chosen])) return chosen;
    edge = std::max(edge, nucleus_edge(row.kernels, row.logits, row.size, row.max, s));
    return argmax_key(row, s, edge);
}

}  // namespace

int64_t sample(const Kernels& kernels, const float* logits, int64_t n, const Sampling& s) {
    Row row = {kernels, logits, n, std::vector<float>((n + CHUNK - 1) / CHUNK), 0.0f};
    if (!kernels.chunk_maxima(logits, n, row.chunk_maxima.data())) return -1;
    row.max = *std::max_element(row.chunk_maxima.begin(), row.chunk_maxima.end());
    if (!std::isfinite(row.max)) return -1;
    return s.temperature > 0 ? draw(row, s) : row.first_of(row.max);
}

}  // namespace draftwire
