/* What the kernels on AMX tiles share: eight tiles of 16 rows by 64 bytes. Functions that use them
   stand between TILES_BEGIN and TILES_END, and are called only where `cb_can_attend` says so. */

#include <immintrin.h>
#include <string.h>

#include "native.h"

#define TILES_TARGET "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,amx-tile,amx-bf16"
#define PRAGMA_(x) _Pragma(#x)
#define PRAGMA(x) PRAGMA_(x)
#ifdef __clang__
#define TILES_BEGIN                                                                       \
    PRAGMA(clang attribute push(__attribute__((target(TILES_TARGET))), apply_to = function))
#define TILES_END PRAGMA(clang attribute pop)
#else
#define TILES_BEGIN PRAGMA(GCC push_options) PRAGMA(GCC target(TILES_TARGET))
#define TILES_END PRAGMA(GCC pop_options)
#endif

TILES_BEGIN

enum { TILE = 16 }; /* rows of a tile, and its columns of 32 bits */

static inline void transpose(__m512i r[TILE]) {
    __m512i t[TILE];
    for (int i = 0; i < TILE; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < TILE; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

static inline void configure_tiles(void) {
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } __attribute__((packed, aligned(64))) config = {.palette = 1};
    for (int i = 0; i < 8; i++) config.bytes[i] = 64, config.rows[i] = TILE;
    /* Not _tile_loadconfig: older GCC has it read but the first eight bytes, and may leave the
       others unwritten. */
    __asm__ volatile("ldtilecfg %0" : : "m"(config));
}

/* In a function of its own: to clang the body of a parallel region is none of TILES_BEGIN's. */
static inline void release_tiles(void) { _tile_release(); }

/* GCC doesn't know that tile loads read memory: what they read is written by here. */
static inline void settle(void) { __asm__ volatile("" : : : "memory"); }

static inline void clear(void) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

/* 2^x for x up to 127, to 2e-7 relative; 0 far below. */
static inline __m512 exp2_ps(__m512 x) {
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 f = _mm512_sub_ps(x, whole);
    __m512 p = _mm512_set1_ps(1.33335581e-3f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.61812910e-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.55041087e-2f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.40226507e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.93147181e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, whole);
}

/* As exp2_ps, to 8e-5 relative: for probabilities, which are then rounded to bfloat16, and so 25 times
   as coarsely. */
static inline __m512 exp2_short(__m512 x) {
    const __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    __m512 p = _mm512_set1_ps(7.80245231e-2f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.26067168e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.95833529e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.99925220e-1f));
    return _mm512_scalef_ps(p, x); /* which counts x rounded down */
}

TILES_END
