/* Scores of queries as rows: what kernels share that take a block of KEYS keys at a time, arranged as
   right operands for all queries of their KV head. */

#include "tiles.h"

TILES_BEGIN

enum {
    KEYS = 128,      /* a block */
    PART = 4 * TILE, /* keys of it that meet a tile of queries at a time */
    LANES = KEYS / TILE,
    MAX_DIM = 256,
};

/* KEYS keys from `key` on as right operands, [KEYS / TILE][dim / 32][16][32]; those not among the
   `keys` that there are become 0. */
static inline void arrange_keys(const uint16_t *k, long key, long keys, long dim, uint16_t *out) {
    for (long t = 0; t < LANES; t++, key += TILE) {
        for (long d = 0; d < dim; d += 32, out += TILE * 32) {
            __m512i tile[TILE];
            for (int i = 0; i < TILE; i++)
                tile[i] = key + i < keys ? _mm512_loadu_si512(k + (key + i) * dim + d)
                                         : _mm512_setzero_si512();
            transpose(tile);
            for (int i = 0; i < TILE; i++) _mm512_store_si512(out + i * 32, tile[i]);
        }
    }
}

/* Scores of TILE queries and PART keys: s[query][key], its rows KEYS apart. */
static inline void scores(const uint16_t *q, const uint16_t *k, long dim, float *s) {
    settle();
    clear();
    const long next = TILE * dim; /* from a tile of keys to the next */
    for (long d = 0; d < dim; d += 32, k += TILE * 32) {
        _tile_loadd(4, q + d, dim * 2);
        _tile_loadd(5, k, 64);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, k + next, 64);
        _tile_dpbf16ps(1, 4, 6);
        _tile_loadd(5, k + 2 * next, 64);
        _tile_dpbf16ps(2, 4, 5);
        _tile_loadd(6, k + 3 * next, 64);
        _tile_dpbf16ps(3, 4, 6);
    }
    _tile_stored(0, s, KEYS * 4);
    _tile_stored(1, s + TILE, KEYS * 4);
    _tile_stored(2, s + 2 * TILE, KEYS * 4);
    _tile_stored(3, s + 3 * TILE, KEYS * 4);
    settle();
}

/* Hides from a query the keys behind its position and out of its window. */
static inline void hide(float *s, long first, int32_t position, long window) {
    const __m512i last = _mm512_set1_epi32(position);
    const __m512i reach = _mm512_set1_epi32(position - (int32_t)window);
    const __m512i lanes =
        _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    for (long t = 0; t < LANES; t++) {
        const __m512i key = _mm512_add_epi32(lanes, _mm512_set1_epi32((int)(first + t * TILE)));
        __mmask16 seen = _mm512_cmple_epi32_mask(key, last);
        if (window) seen &= _mm512_cmpgt_epi32_mask(key, reach);
        const __m512 never = _mm512_set1_ps(-1e30f);
        _mm512_store_ps(s + t * TILE, _mm512_mask_mov_ps(never, seen, _mm512_load_ps(s + t * TILE)));
    }
}

TILES_END
