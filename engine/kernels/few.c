/* Exact causal attention of few queries, in bfloat16 on AMX tiles.

   With few queries reading K and V is most of the work, so both are read once, arranged block by
   block for all queries of their KV head, and never written back. A row of scores is a query: K's
   parts are transposed, V's only interleaved. A task takes a span of keys; what the spans make of a
   query, each relative to its own maximum, is put together at the end (FlashDecoding), in an order
   that doesn't depend on threads. Scores, maxima, sums and the output are float32; probabilities are
   rounded to bfloat16 for the second product. */

#include "native.h"

#ifdef CB_TILES

#include "scores.h"

TILES_BEGIN

enum {
    GROUP = 32,      /* keys that share a step of the second product */
    SPAN = 8 * KEYS, /* keys of a task */
};

typedef struct {
    const uint16_t *q, *k, *v;
    uint16_t *out;
    const int64_t *positions;
    long heads, kv_heads, dim, kv_stride, window, keys;
    long shared, rows, padded; /* rows of a KV head: its heads of each query, query by query */
    float scale;               /* of scores, in powers of two */
    uint16_t *packed;          /* [kv_heads, padded, dim] */
    float *parts, *tops, *sums; /* [spans, kv_heads, padded, dim], and one a row */
} Work;

/* Values of KEYS keys from `key` on as right operands, [KEYS / GROUP][dim / TILE][16][32]: a row
   holds two keys' values in turn. Keys that are not there are 0. */
static inline void arrange_values(const uint16_t *v, long key, long keys, long dim, uint16_t *out) {
    const __m512i pairs = _mm512_set_epi16(
        31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
        23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    for (long group = 0; group < KEYS / GROUP; group++, out += GROUP * dim) {
        for (long i = 0; i < TILE; i++, key += 2) {
            const uint16_t *row = v + key * dim;
            for (long d = 0; d < dim; d += TILE) {
                const __m256i none = _mm256_setzero_si256();
                const __m256i a = key < keys ? _mm256_loadu_si256((const void *)(row + d)) : none;
                const __m256i b =
                    key + 1 < keys ? _mm256_loadu_si256((const void *)(row + dim + d)) : none;
                const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1);
                _mm512_store_si512(out + d * GROUP + i * 32, _mm512_permutexvar_epi16(pairs, both));
            }
        }
    }
}

/* Brings a tile of queries up to date with the scores s [TILE, KEYS] of a block: maxima, sums, and
   probabilities p [TILE, KEYS], unnormalised. Returns whether a maximum rose; by *shrink the outputs
   so far are then multiplied. */
static inline int soften(const float *s, uint16_t *p, __m512 scale, float *tops, float *sums,
                         float *shrink) {
    float highest[TILE] __attribute__((aligned(64)));
    for (int i = 0; i < TILE; i++) {
        __m512 a = _mm512_load_ps(s + i * KEYS), b = _mm512_load_ps(s + i * KEYS + TILE);
        for (int t = 2; t < LANES; t += 2) {
            a = _mm512_max_ps(a, _mm512_load_ps(s + i * KEYS + t * TILE));
            b = _mm512_max_ps(b, _mm512_load_ps(s + i * KEYS + (t + 1) * TILE));
        }
        highest[i] = _mm512_reduce_max_ps(_mm512_max_ps(a, b));
    }
    const __m512 before = _mm512_load_ps(tops);
    const __m512 now = _mm512_max_ps(before, _mm512_mul_ps(_mm512_load_ps(highest), scale));
    const __m512 less = exp2_ps(_mm512_sub_ps(before, now));
    const int rose = _mm512_cmp_ps_mask(now, before, _CMP_GT_OQ) != 0;
    _mm512_store_ps(tops, now);
    _mm512_store_ps(shrink, less);
    _mm512_store_ps(sums, _mm512_mul_ps(_mm512_load_ps(sums), less));
    for (int i = 0; i < TILE; i++) {
        const __m512 top = _mm512_set1_ps(tops[i]);
        __m512 a = _mm512_setzero_ps(), b = a;
        for (int t = 0; t < LANES; t += 2) {
            /* Scaled and rounded before, as the maximum was: however large, none is above it. */
            const __m512 x = _mm512_mul_ps(_mm512_load_ps(s + i * KEYS + t * TILE), scale);
            const __m512 y = _mm512_mul_ps(_mm512_load_ps(s + i * KEYS + (t + 1) * TILE), scale);
            const __m512 e = exp2_short(_mm512_sub_ps(x, top));
            const __m512 f = exp2_short(_mm512_sub_ps(y, top));
            a = _mm512_add_ps(a, e);
            b = _mm512_add_ps(b, f);
            _mm512_store_si512(p + i * KEYS + t * TILE, (__m512i)_mm512_cvtne2ps_pbh(f, e));
        }
        sums[i] += _mm512_reduce_add_ps(_mm512_add_ps(a, b));
    }
    return rose;
}

/* Adds the values of a block, weighted by p [TILE, KEYS], to o [TILE, dim]. */
static inline void weigh(const uint16_t *p, const uint16_t *values, long dim, float *o) {
    settle();
    for (long d = 0; d < dim; d += 2 * TILE) {
        _tile_loadd(0, o + d, dim * 4);
        _tile_loadd(1, o + d + TILE, dim * 4);
        for (long g = 0; g < KEYS / GROUP; g++) {
            const uint16_t *v = values + g * GROUP * dim + d * GROUP;
            _tile_loadd(4, p + g * GROUP, KEYS * 2);
            _tile_loadd(5, v, 64);
            _tile_dpbf16ps(0, 4, 5);
            _tile_loadd(6, v + TILE * GROUP, 64);
            _tile_dpbf16ps(1, 4, 6);
        }
        _tile_stored(0, o + d, dim * 4);
        _tile_stored(1, o + d + TILE, dim * 4);
    }
    settle();
}

static inline int64_t position(const Work *w, long row) {
    return w->positions[(row < w->rows ? row : w->rows - 1) / w->shared];
}

/* All queries of a KV head over the keys of a span. */
static void attend_span(const Work *w, long head, long span) {
    uint16_t k[MAX_DIM * KEYS] __attribute__((aligned(64)));
    uint16_t v[MAX_DIM * KEYS] __attribute__((aligned(64)));
    float s[TILE * KEYS] __attribute__((aligned(64)));
    uint16_t p[TILE * KEYS] __attribute__((aligned(64)));
    float shrink[TILE] __attribute__((aligned(64)));
    const long dim = w->dim, at = (span * w->kv_heads + head) * w->padded;
    const __m512 scale = _mm512_set1_ps(w->scale);
    for (long row = 0; row < w->padded; row += TILE) {
        _mm512_store_ps(w->tops + at + row, _mm512_set1_ps(-1e20f)); /* far above hidden scores */
        _mm512_store_ps(w->sums + at + row, _mm512_setzero_ps());
    }
    memset(w->parts + at * dim, 0, w->padded * dim * sizeof(float));
    const long end = (span + 1) * SPAN < w->keys ? (span + 1) * SPAN : w->keys;
    for (long first = span * SPAN; first < end; first += KEYS) {
        if (w->window && first + KEYS <= w->positions[0] - w->window + 1) continue;
        arrange_keys(w->k + head * w->kv_stride, first, w->keys, dim, k);
        arrange_values(w->v + head * w->kv_stride, first, w->keys, dim, v);
        for (long row = 0; row < w->padded; row += TILE) {
            const int64_t low = position(w, row), high = position(w, row + TILE - 1);
            if (first > high || (w->window && first + KEYS <= low - w->window + 1)) continue;
            const uint16_t *q = w->packed + (head * w->padded + row) * dim;
            for (long part = 0; part < KEYS; part += PART) scores(q, k + part * dim, dim, s + part);
            if (first + KEYS > low + 1 || (w->window && first <= high - w->window))
                for (long i = 0; i < TILE; i++)
                    hide(s + i * KEYS, first, (int32_t)position(w, row + i), w->window);
            float *o = w->parts + (at + row) * dim;
            if (soften(s, p, scale, w->tops + at + row, w->sums + at + row, shrink))
                for (long i = 0; i < TILE; i++)
                    for (long d = 0; d < dim; d += TILE)
                        _mm512_store_ps(o + i * dim + d,
                                        _mm512_mul_ps(_mm512_load_ps(o + i * dim + d),
                                                      _mm512_set1_ps(shrink[i])));
            weigh(p, v, dim, o);
        }
    }
}

/* Puts together what the spans made of a row. */
static void join(const Work *w, long head, long row) {
    const long spans = (w->keys + SPAN - 1) / SPAN, step = w->kv_heads * w->padded;
    const long at = head * w->padded + row, dim = w->dim;
    float top = -1e20f;
    for (long n = 0; n < spans; n++)
        if (!(w->tops[at + n * step] <= top)) top = w->tops[at + n * step];
    __m512 o[MAX_DIM / TILE], sum = _mm512_setzero_ps();
    for (long d = 0; d < dim / TILE; d++) o[d] = _mm512_setzero_ps();
    for (long n = 0; n < spans; n++) {
        const __m512 share = exp2_ps(_mm512_set1_ps(w->tops[at + n * step] - top));
        sum = _mm512_fmadd_ps(_mm512_set1_ps(w->sums[at + n * step]), share, sum);
        for (long d = 0; d < dim / TILE; d++)
            o[d] = _mm512_fmadd_ps(_mm512_load_ps(w->parts + (at + n * step) * dim + d * TILE),
                                   share, o[d]);
    }
    const __m512 inverse = _mm512_div_ps(_mm512_set1_ps(1.0f), sum);
    uint16_t *to = w->out + (row / w->shared * w->heads + head * w->shared + row % w->shared) * dim;
    for (long d = 0; d < dim / TILE; d++)
        _mm256_storeu_si256((void *)(to + d * TILE),
                            (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(o[d], inverse)));
}

/* As `cb_attend`. scratch: 64-byte aligned, for p = tokens * heads / kv_heads rows, rounded up to
   TILE, and n = keys / SPAN spans, rounded up, kv_heads * p * (dim / 2 + n * (dim + 2)) floats. */
CB_API void cb_attend_few(const uint16_t *q, const uint16_t *k, const uint16_t *v, uint16_t *out,
                          const int64_t *positions, long tokens, long heads, long kv_heads,
                          long dim, long kv_stride, long window, float scale, float *scratch,
                          int threads) {
    const long shared = heads / kv_heads, rows = tokens * shared;
    Work w = {q, k, v, out, positions, heads, kv_heads, dim, kv_stride, window,
              positions[tokens - 1] + 1, shared, rows, (rows + TILE - 1) / TILE * TILE,
              scale * 1.44269504f};
    const long spans = (w.keys + SPAN - 1) / SPAN, all = kv_heads * w.padded;
    w.packed = (uint16_t *)scratch;
    w.tops = scratch + all * dim / 2;
    w.sums = w.tops + spans * all;
    w.parts = w.sums + spans * all;
    for (long head = 0; head < kv_heads; head++) {
        uint16_t *to = w.packed + head * w.padded * dim;
        for (long i = 0; i < tokens; i++, to += shared * dim)
            memcpy(to, q + (i * heads + head * shared) * dim, shared * dim * 2);
        memset(to, 0, (w.padded - rows) * dim * 2);
    }
#pragma omp parallel num_threads(threads)
    {
        configure_tiles();
#pragma omp for schedule(dynamic, 1)
        for (long i = 0; i < spans * kv_heads; i++) attend_span(&w, i / spans, i % spans);
#pragma omp for schedule(static)
        for (long i = 0; i < kv_heads * rows; i++) join(&w, i / rows, i % rows);
        release_tiles();
    }
}

TILES_END

#else

CB_API void cb_attend_few(void) {}

#endif
