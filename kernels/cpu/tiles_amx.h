// Matrix tiles (Intel AMX): eight registers of up to 16 rows of 64 bytes, per thread.
//
// A thread configures its tiles before it uses them and releases them after; `tile_begin` and
// `tile_end` of the table do that. With DRAFTWIRE_EMULATE_TILES the same functions are plain C++,
// so that what is written against them can be tested anywhere. They follow the manual's operation
// section (Intel SDM vol. 2, TDPBF16PS): every row of a product depends on its own row of A alone,
// in one order; even and odd elements are summed apart and then added to C. Only denormals differ:
// tiles flush them to zero, the emulation keeps them.
#pragma once
#include <cstdint>
#include <cstring>

namespace draftwire {

constexpr int TILES = 8;

#ifdef DRAFTWIRE_EMULATE_TILES
// One set for all units of a thread, as a processor has it: shapes, then tiles. Bytes, since a type
// would bring functions that units of different instruction sets could take from each other.
alignas(64) inline thread_local unsigned char tile_memory[64 + TILES * 16 * 64];
#endif

namespace {

// What LDTILECFG reads. An unused tile has no rows.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
    void set(int tile, int its_rows, int its_row_bytes) {
        rows[tile] = uint8_t(its_rows);
        row_bytes[tile] = uint16_t(its_row_bytes);
    }
};
static_assert(sizeof(TileShapes) == 64, "the layout is the processor's");

// All tiles 16 x 64 bytes.
inline TileShapes whole_tiles() {
    TileShapes shapes;
    for (int i = 0; i < TILES; ++i) shapes.set(i, 16, 64);
    return shapes;
}

#ifdef DRAFTWIRE_EMULATE_TILES

struct TileRegisters {
    TileShapes shapes;
    unsigned char data[TILES][16][64];
};
static_assert(sizeof(TileRegisters) == sizeof tile_memory, "all of it");

inline TileRegisters& tile_registers() {
    return *reinterpret_cast<TileRegisters*>(tile_memory);
}

// As on the processor, a tile that is not configured ends the process.
inline TileRegisters& tiles_with(int tile) {
    if (tile_registers().shapes.rows[tile] == 0) __builtin_trap();
    return tile_registers();
}

inline void tile_configure(const TileShapes& shapes) {
    std::memset(tile_registers().data, 0, sizeof tile_registers().data);
    tile_registers().shapes = shapes;
}
inline void tile_release() { tile_configure(TileShapes()); }

template <int T>
inline void tile_zero() {
    std::memset(tiles_with(T).data[T], 0, sizeof tile_registers().data[T]);
}
// Rows `stride` bytes apart.
template <int T>
inline void tile_load(const void* from, int64_t stride) {
    TileRegisters& r = tiles_with(T);
    std::memset(r.data[T], 0, sizeof r.data[T]);
    for (int i = 0; i < r.shapes.rows[T]; ++i)
        std::memcpy(r.data[T][i], static_cast<const char*>(from) + i * stride,
                    r.shapes.row_bytes[T]);
}
template <int T>
inline void tile_store(void* to, int64_t stride) {
    TileRegisters& r = tiles_with(T);
    for (int i = 0; i < r.shapes.rows[T]; ++i)
        std::memcpy(static_cast<char*>(to) + i * stride, r.data[T][i], r.shapes.row_bytes[T]);
}
inline float tile_bf16(uint32_t high_half) {
    float x;
    std::memcpy(&x, &high_half, sizeof x);
    return x;
}
// C (M x N float) += A (M x 2K bf16) * B (K x N pairs of bf16). A product of two bf16 is exact in
// float, so that a sum of it rounds as a fused one.
template <int C, int A, int B>
inline void tile_dp() {
    TileRegisters& r = tiles_with(C);
    tiles_with(A), tiles_with(B);
    int pairs = r.shapes.row_bytes[A] / 4, columns = r.shapes.row_bytes[C] / 4;
    if (pairs > r.shapes.rows[B] || r.shapes.rows[A] < r.shapes.rows[C]) __builtin_trap();
    for (int m = 0; m < r.shapes.rows[C]; ++m) {
        float even[16] = {}, odd[16] = {}, c[16];
        uint32_t a[16], b[16];
        std::memcpy(a, r.data[A][m], sizeof a);
        std::memcpy(c, r.data[C][m], sizeof c);
        for (int k = 0; k < pairs; ++k) {
            std::memcpy(b, r.data[B][k], sizeof b);
            float x = tile_bf16(a[k] << 16), y = tile_bf16(a[k] & 0xffff0000u);
            for (int n = 0; n < 16; ++n) {
                even[n] += x * tile_bf16(b[n] << 16);
                odd[n] += y * tile_bf16(b[n] & 0xffff0000u);
            }
        }
        for (int n = 0; n < columns; ++n) c[n] += even[n] + odd[n];
        std::memcpy(r.data[C][m], c, sizeof c);
    }
}

#else

// Written as assembly because the compilers' intrinsics want literal register numbers, and to say
// that loads read memory.
inline void tile_configure(const TileShapes& shapes) {
    asm volatile("ldtilecfg %0" ::"m"(shapes));
}
inline void tile_release() { asm volatile("tilerelease" ::: "memory"); }
template <int T>
inline void tile_zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int T>
inline void tile_load(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
}
template <int T>
inline void tile_store(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
}
template <int C, int A, int B>
inline void tile_dp() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

#endif

}  // namespace
}  // namespace draftwire
