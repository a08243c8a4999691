// One pass of a decoder (Llama and its kin: RMSNorm, rotary positions, grouped queries, SwiGLU) over
// a ragged batch, by all threads of a team together.
//
// The residual stream is float; what projections read is rounded to bf16 where the instruction set
// multiplies pairs of bf16, and float elsewhere. Everything between projections works on one row at
// a time, so a row's bits depend on its own sequence alone. Queries, keys and values are rounded to
// the weights' type and read back from the cache, so that a row is the same to all that see it,
// whenever it was computed.
#pragma once
#include <sched.h>

#include "exp.h"
#include "linear.h"
#ifdef DRAFTWIRE_TILES
#include "linear_amx.h"
#endif
#include "write_kv.h"

namespace draftwire {
namespace {

// y = x / rms(x) * weight
template <class Out>
inline void rms_norm(const float* x, const float* weight, int n, float eps, Out* y) {
    V squares = splat(0.0f);
    for (int i = 0; i < n; i += 16) squares = fma(load(x + i), load(x + i), squares);
    V scale = splat(1.0f / __builtin_sqrtf(sum(squares) / float(n) + eps));
    for (int i = 0; i < n; i += 16) store(y + i, load(x + i) * scale * load(weight + i));
}

// The two halves of a head turn against each other by the angle of the position.
inline void rotate(float* x, const float* cos, const float* sin, int half) {
    for (int i = 0; i < half; ++i) {
        float a = x[i], b = x[i + half];
        x[i] = a * cos[i] - b * sin[i];
        x[i + half] = b * cos[i] + a * sin[i];
    }
}

template <class To>
inline void convert(const float* from, int n, To* to) {
    for (int i = 0; i < n; i += 16) store(to + i, load(from + i));
}

// x / (1 + e^-x), by e^-|x| alone: exp takes x <= 0.
inline V silu(const V& x) {
    V zero = splat(0.0f), minus = zero - x;
    V power = exp(zero - max(minus, x));
    V above = max(zero, x), below = zero - max(zero, minus);  // one of them is zero
    return fma(below, power, above) / (splat(1.0f) + power);
}

inline void rest(int turn) {
    const int patience = 1000;  // some tens of microseconds, as long as threads usually differ
    if (turn > patience) sched_yield();
#if defined(__x86_64__)
    else __builtin_ia32_pause();
#endif
}

// Returns once all threads of the team have come. OpenMP's barrier spins for milliseconds, through
// which a thread that shares its core with the one it waits for keeps that one from coming; hundreds
// of times a pass. Here it soon lets go of the core.
inline void meet(Meeting& meeting, int threads) {
    int number = __atomic_load_n(&meeting.number, __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&meeting.arrived, 1, __ATOMIC_ACQ_REL) == threads) {
        __atomic_store_n(&meeting.arrived, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&meeting.number, number + 1, __ATOMIC_RELEASE);
        return;
    }
    for (int turn = 0; __atomic_load_n(&meeting.number, __ATOMIC_ACQUIRE) == number; ++turn)
        rest(turn);
}

// What becomes of the sums of a projection.
struct Put {
    float* y;
    int64_t row;
    const float* bias;
    void operator()(int r, int block, const V& sum) const {
        store(y + r * row + block * 16, bias ? sum + load(bias + block * 16) : sum);
    }
};
struct Add {
    float* y;
    int64_t row;
    const float* bias;
    void operator()(int r, int block, const V& sum) const {
        float* to = y + r * row + block * 16;
        store(to, load(to) + (bias ? sum + load(bias + block * 16) : sum));
    }
};
template <class Out>
struct GatedBy {  // blocks alternate: a gate, and what it lets through
    Out* y;
    int64_t row;
    const float* bias;
    float* gate;  // (rows, 16)
    void operator()(int r, int block, const V& product) const {
        V x = bias ? product + load(bias + block * 16) : product;
        if (block % 2 == 0) return store(gate + r * 16, x);
        store(y + r * row + block / 2 * 16, silu(load(gate + r * 16)) * x);
    }
};

template <class Dot>
struct DecoderPass {
    using Weight = typename Dot::Weight;
    using Input = typename Dot::Input;
    const Pass& pass;
    const Decoder& d = pass.decoder;
    const Batch& b = pass.batch;
    const Workspace& room = pass.room;
    const int first = share(b.rows, pass.thread, pass.threads);  // rows of this thread where rows
    const int last = share(b.rows, pass.thread + 1, pass.threads);  // are shared
    const int queries = d.heads * d.head_dim, keys = d.kv_heads * d.head_dim;

    void barrier() const { meet(*pass.meeting, pass.threads); }

    template <class Done>
    void project(const Projection& p, const void* x, int64_t x_row, int rows, int unit,
                 const Done& done) const {
        linear(Dot(), p, static_cast<const Input*>(x), x_row, rows,
                    columns_of(p, unit, pass.thread, pass.threads), done);
        barrier();
    }

    void embed() const {
        const int pair = sizeof(Weight) == 2 ? 2 : 1;  // how the head's weights are packed
        for (int r = first; r < last; ++r) {
            int64_t id = b.token_ids[r];
            float* to = room.residual + int64_t(r) * d.hidden;
            if (d.embedding) {
                const Weight* from = static_cast<const Weight*>(d.embedding) + id * d.hidden;
                for (int i = 0; i < d.hidden; i += 16) store(to + i, load(from + i));
                continue;
            }
            if (d.head.blocks) {
                widen_column(d.head, int(id), d.hidden, to);
                continue;
            }
            const Weight* from = static_cast<const Weight*>(d.head.weights) +
                                 id / 16 * 16 * d.head.depth + id % 16 * pair;
            for (int i = 0; i < d.hidden; ++i) to[i] = as_float(from[i / pair * 16 * pair + i % pair]);
        }
    }

    void norm(const float* weight, int depth) const {
        for (int r = first; r < last; ++r)
            rms_norm(room.residual + int64_t(r) * d.hidden, weight, d.hidden, d.eps,
                     static_cast<Input*>(room.input) + int64_t(r) * depth);
        barrier();
    }

    void head(float* x, const float* weight, int r) const {
        if (weight) rms_norm(x, weight, d.head_dim, d.eps, x);
        int half = d.head_dim / 2;
        int64_t at = b.positions[r] * half;
        rotate(x, d.cos + at, d.sin + at, half);
    }

    // Queries to where attention reads them, keys and values to the cache.
    void rotate_and_write(const Layer& layer) const {
        for (int r = first; r < last; ++r) {
            float* qkv = room.qkv + int64_t(r) * layer.qkv.columns;
            Weight* query = static_cast<Weight*>(room.query) + int64_t(r) * queries;
            for (int h = 0; h < d.heads; ++h) head(qkv + h * d.head_dim, layer.q_norm, r);
            convert(qkv, queries, query);
            for (int h = 0; h < d.kv_heads; ++h) {
                float* k = qkv + queries + h * d.head_dim;
                head(k, layer.k_norm, r);
                Weight narrow[2][256];
                convert(k, d.head_dim, narrow[0]);
                convert(k + keys, d.head_dim, narrow[1]);
                if (b.slots[r] >= 0)
                    write_row(narrow[0], narrow[1], layer.pool, b.slots[r], h);
            }
        }
        barrier();
    }

    void attend(const Layer& layer, int* taken) const {
        Attention call = {room.query,         layer.pool.k,    layer.pool.v, layer.pool.k_scale,
                          layer.pool.v_scale, room.attended,   b.block_tables, b.cu_query,
                          b.context_lens,     queries,         d.head_dim,   layer.out.depth,
                          d.head_dim,         b.table_row,     d.heads,      d.kv_heads,
                          d.head_dim,         layer.window,    d.scale};
        void* scratch = room.scratch + pass.thread * room.scratch_bytes;
        auto take = [&] { return __atomic_fetch_add(taken, 1, __ATOMIC_RELAXED); };
        int i = take();
        while (i < pass.tile_count) {
            int next = take();
            pass.attend(call, pass.tiles[i], next < pass.tile_count ? &pass.tiles[next] : nullptr,
                        scratch);
            i = next;
        }
        barrier();
        if constexpr (sizeof(Weight) < sizeof(Input)) {
            for (int r = first; r < last; ++r)
                convert_wide(static_cast<const Weight*>(room.attended) + int64_t(r) * layer.out.depth,
                             static_cast<float*>(room.input) + int64_t(r) * layer.out.depth);
            barrier();
        }
    }
    void convert_wide(const Weight* from, float* to) const {
        for (int i = 0; i < queries; i += 16) store(to + i, load(from + i));
    }
    void layer(const Layer& l, int* taken) const {
        norm(l.attention_norm, l.qkv.depth);
        project(l.qkv, room.input, l.qkv.depth, b.rows, 1,
                Put{room.qkv, l.qkv.columns, l.qkv.bias});
        rotate_and_write(l);
        attend(l, taken);
        const void* attended = sizeof(Weight) < sizeof(Input) ? room.input : room.attended;
        project(l.out, attended, l.out.depth, b.rows, 1,
                Add{room.residual, d.hidden, l.out.bias});
        norm(l.mlp_norm, l.gate_up.depth);
        float* gate = room.gate + int64_t(pass.thread) * room.most_rows * 16;
        project(l.gate_up, room.input, l.gate_up.depth, b.rows, 2,
                GatedBy<Input>{static_cast<Input*>(room.middle), l.down.depth, l.gate_up.bias, gate});
        project(l.down, room.middle, l.down.depth, b.rows, 1,
                Add{room.residual, d.hidden, l.down.bias});
    }

    void run() const {
        embed();
        barrier();
        for (int i = 0; i < d.count; ++i) layer(d.layers[i], pass.taken + i);
        if (!b.sampled) return;
        for (int r = share(b.sampled, pass.thread, pass.threads);
             r < share(b.sampled, pass.thread + 1, pass.threads); ++r)
            rms_norm(room.residual + b.logit_rows[r] * d.hidden, d.norm, d.hidden, d.eps,
                     static_cast<Input*>(room.input) + int64_t(r) * d.head.depth);
        barrier();
        project(d.head, room.input, d.head.depth, b.sampled, 1,
                Put{room.logits, d.head.columns, d.head.bias});
    }
};

#if defined(DRAFTWIRE_TILES)
using LinearBF16 = TileBF16;
#elif defined(__AVX512BF16__)
using LinearBF16 = PairBF16;
#else
using LinearBF16 = Wide<uint16_t>;
#endif
using LinearF32 = Wide<float>;

void run_pass(const Pass& pass) {
    if (pass.decoder.element_bytes == 2) DecoderPass<LinearBF16>{pass}.run();
    else DecoderPass<LinearF32>{pass}.run();
}

template <class Dot>
void run_linear(const LinearCall& call, int thread, int threads) {
    Put done = {call.y, call.y_row, call.projection.bias};
    linear(Dot(), call.projection, static_cast<const typename Dot::Input*>(call.x), call.x_row,
                call.rows, columns_of(call.projection, 1, thread, threads), done);
}

void run_linear(const LinearCall& call, int element_bytes, int thread, int threads) {
    if (element_bytes == 2) run_linear<LinearBF16>(call, thread, threads);
    else run_linear<LinearF32>(call, thread, threads);
}

}  // namespace
}  // namespace draftwire
