// What one pass of a decoder is given: its weights, a ragged batch, and room to work in.
//
// Padding: columns of a projection are a multiple of 16, its depth a multiple of 32, rows of a
// buffer a multiple of 16 more than the batch has; what pads weights is zero.
#pragma once
#include <cstdint>

#include "kernels.h"

namespace draftwire {

// Formats of quantised weights, named as in GGUF; what they are is in quantised.h.
enum { Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K };

struct QuantisedBlock {
    const uint8_t* at;
    int format;
};

// y = W x + bias. Weights in blocks of 16 columns, each (depth / 2, 16, 2) of bf16 or (depth, 16) of
// float; or, with bf16 elements, `blocks` of them, each by itself, where that is not null. bias
// (columns) or null.
struct Projection {
    const void* weights;
    const float* bias;
    int columns, depth;
    const QuantisedBlock* blocks;
};

// `gate_up` alternates: a block of the gate, then the same block of the up projection.
struct Layer {
    Projection qkv, out, gate_up, down;
    const float *attention_norm, *mlp_norm;
    const float *q_norm, *k_norm;  // (head_dim), or null
    Pool pool;
    int window;
};

struct Decoder {
    const Layer* layers;
    const void* embedding;  // (vocabulary, hidden) in the weights' type; null: it is the head's
    const float* norm;
    const float *cos, *sin;  // (context, head_dim / 2)
    Projection head;
    int count, hidden, heads, kv_heads, head_dim, element_bytes;
    float eps, scale;
};

// As engine's ModelInput: T rows of S sequences, of which R are sampled.
struct Batch {
    const int64_t *token_ids, *positions, *slots, *logit_rows;
    const int32_t *block_tables, *cu_query, *context_lens;
    int64_t table_row;
    int rows, sequences, sampled;
};

// Rows as wide as their names say; `input` and `middle` are what projections read.
struct Workspace {
    float* residual;  // (T, hidden)
    void* input;      // (T, widest input but the MLP's)
    float* qkv;       // (T, columns of qkv)
    void* query;      // (T, heads * head_dim)
    void* attended;   // likewise
    void* middle;     // (T, intermediate)
    float* gate;      // (threads, T, 16)
    float* logits;    // (R, columns of the head)
    char* scratch;    // (threads, attention's)
    int64_t scratch_bytes;
    int most_rows;  // T that the buffers have room for
};

// Where the threads of a team wait for each other.
struct Meeting {
    int arrived = 0, number = 0;
};

// A pass as every thread of a team sees it.
struct Pass {
    AttendTile attend;
    const Decoder& decoder;
    const Batch& batch;
    const Workspace& room;
    const Tile* tiles;
    int tile_count;
    int* taken;  // (layers), zero: tiles that threads have taken
    Meeting* meeting;
    int thread, threads;
};

// rows x columns, in the type that the instruction set multiplies: `Dense::wide` says whether that
// is float even where the weights are bf16.
struct LinearCall {
    Projection projection;
    const void* x;
    int64_t x_row;
    float* y;
    int64_t y_row;
    int rows;
};

struct Dense {
    bool wide;
    void (*linear)(const LinearCall&, int element_bytes, int thread, int threads);
    // To be called by all threads of one OpenMP team at once.
    void (*pass)(const Pass&);
};

const Dense* dense_generic();
const Dense* dense_avx2();
const Dense* dense_avx512();
const Dense* dense_avx512bf16();
const Dense* dense_amx();
const Dense* dense_amx_emulated();

}  // namespace draftwire
