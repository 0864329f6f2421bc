/* How much attention each key gets from some queries, summed over them head by head, in bfloat16 on
   AMX tiles.

   Here a row of scores is a query and its columns are keys, so that both a query's sum and a key's
   add up lane by lane: K's parts are arranged as right operands, once for all queries of their KV
   head. Blocks of keys know nothing of each other: each keeps its weights relative to its own
   maximum, lane by lane; when all are there, factors make them probabilities. So nothing depends on
   how the blocks are shared out among threads. Weights and sums are float32. */

#include "native.h"

#ifdef CB_TILES

#include "scores.h"

TILES_BEGIN

typedef struct {
    const uint16_t *q, *k;
    float *out;
    const int64_t *positions;
    long queries, heads, kv_heads, dim, kv_stride, out_stride, window, keys;
    float scale; /* of scores, in powers of two */
} Work;

/* Queries [from, to) with all heads of a KV head are rows, head by head, up to `padded` of them; they
   see keys of `blocks` blocks from `first` on. */
typedef struct {
    long head, from, to, rows, padded, first, blocks;
    uint16_t *q;     /* [padded, dim] */
    float *weights;  /* [blocks, padded, KEYS] */
    float *tops;     /* [blocks, padded, TILE], later factors */
    float *sums;     /* the same */
    float *inverses; /* [padded] */
} Group;

static inline const uint16_t *query(const Work *w, const Group *g, long row) {
    const long count = g->to - g->from, shared = w->heads / w->kv_heads;
    const long head = g->head * shared + row / count;
    return w->q + ((g->from + row % count) * w->heads + head) * w->dim;
}

/* Turns a query's scores into weights relative to their maximum, *top, and adds them up. */
static inline void soften(float *s, __m512 scale, float *top, float *sum) {
    __m512 x[LANES];
    /* Scaled, and rounded, once: the highest is then its maximum to the bit, however large. */
    for (int t = 0; t < LANES; t++) x[t] = _mm512_mul_ps(_mm512_load_ps(s + t * TILE), scale);
    const __m512 a = _mm512_max_ps(_mm512_max_ps(x[0], x[1]), _mm512_max_ps(x[2], x[3]));
    const __m512 b = _mm512_max_ps(_mm512_max_ps(x[4], x[5]), _mm512_max_ps(x[6], x[7]));
    /* Far above hidden scores: what is hidden weighs 0. */
    const __m512 least = _mm512_set1_ps(-1e20f);
    const __m512 highest = _mm512_max_ps(least, _mm512_max_ps(a, b));
    for (int t = 0; t < LANES; t++) {
        x[t] = exp2_ps(_mm512_sub_ps(x[t], highest));
        _mm512_store_ps(s + t * TILE, x[t]);
    }
    const __m512 c = _mm512_add_ps(_mm512_add_ps(x[0], x[1]), _mm512_add_ps(x[2], x[3]));
    const __m512 d = _mm512_add_ps(_mm512_add_ps(x[4], x[5]), _mm512_add_ps(x[6], x[7]));
    _mm512_store_ps(top, highest);
    _mm512_store_ps(sum, _mm512_add_ps(c, d));
}

static void weigh_block(const Work *w, const Group *g, long block) {
    uint16_t k[MAX_DIM * KEYS] __attribute__((aligned(64)));
    const long first = (g->first + block) * KEYS, count = g->to - g->from;
    const __m512 scale = _mm512_set1_ps(w->scale);
    const int all_seen = first + KEYS <= w->positions[g->from] + 1 &&
                         !(w->window && first <= w->positions[g->to - 1] - w->window);
    arrange_keys(w->k + g->head * w->kv_stride, first, w->keys, w->dim, k);
    for (long row = 0; row < g->padded; row += TILE) {
        float *s = g->weights + (block * g->padded + row) * KEYS;
        for (long part = 0; part < KEYS; part += PART)
            scores(g->q + row * w->dim, k + part * w->dim, w->dim, s + part);
        for (long i = row; i < row + TILE && i < g->rows; i++, s += KEYS) {
            if (!all_seen) hide(s, first, (int32_t)w->positions[g->from + i % count], w->window);
            const long at = (block * g->padded + i) * TILE;
            soften(s, scale, g->tops + at, g->sums + at);
        }
    }
}

/* A row's maxima become the factors that make its weights probabilities, but for its inverse. */
static void settle_row(const Group *g, long row) {
    const long step = g->padded * TILE;
    float *tops = g->tops + row * TILE;
    const float *sums = g->sums + row * TILE;
    __m512 highest = _mm512_set1_ps(-1e20f), sum = _mm512_setzero_ps();
    for (long b = 0; b < g->blocks; b++)
        highest = _mm512_max_ps(highest, _mm512_load_ps(tops + b * step));
    highest = _mm512_set1_ps(_mm512_reduce_max_ps(highest));
    for (long b = 0; b < g->blocks; b++) {
        const __m512 factor = exp2_ps(_mm512_sub_ps(_mm512_load_ps(tops + b * step), highest));
        sum = _mm512_fmadd_ps(_mm512_load_ps(sums + b * step), factor, sum);
        _mm512_store_ps(tops + b * step, factor);
    }
    g->inverses[row] = 1.0f / _mm512_reduce_add_ps(sum);
}

/* Adds what a block's keys got to the result. */
static void gather_block(const Work *w, const Group *g, long block) {
    const long count = g->to - g->from, first = (g->first + block) * KEYS;
    const long left = w->keys - first, shared = w->heads / w->kv_heads;
    for (long j = 0; j < shared; j++) {
        float *out = w->out + (g->head * shared + j) * w->out_stride + first;
        __m512 sum[LANES];
        __mmask16 there[LANES];
        for (int t = 0; t < LANES; t++) {
            const long lanes = left - t * TILE;
            there[t] = lanes >= TILE ? 0xffff : lanes > 0 ? (__mmask16)((1u << lanes) - 1) : 0;
            sum[t] = _mm512_maskz_loadu_ps(there[t], out + t * TILE);
        }
        for (long row = block * g->padded + j * count, end = row + count; row < end; row++) {
            const float *s = g->weights + row * KEYS;
            const __m512 factor =
                _mm512_mul_ps(_mm512_load_ps(g->tops + row * TILE),
                              _mm512_set1_ps(g->inverses[row - block * g->padded]));
            for (int t = 0; t < LANES; t++)
                sum[t] = _mm512_fmadd_ps(_mm512_load_ps(s + t * TILE), factor, sum[t]);
        }
        for (int t = 0; t < LANES; t++) _mm512_mask_storeu_ps(out + t * TILE, there[t], sum[t]);
    }
}

static inline void pack(const Work *w, const Group *g) {
    for (long row = 0; row < g->padded; row++) {
        if (row < g->rows) memcpy(g->q + row * w->dim, query(w, g, row), w->dim * 2);
        else memset(g->q + row * w->dim, 0, w->dim * 2);
    }
}

/* The group of queries [from, to), laid out in scratch. */
static Group group_of(const Work *w, long head, long from, long to, float *scratch) {
    Group g = {.head = head, .from = from, .to = to};
    const int64_t reach = w->window ? w->positions[from] - w->window + 1 : 0;
    g.rows = (to - from) * (w->heads / w->kv_heads);
    g.padded = (g.rows + TILE - 1) / TILE * TILE;
    g.first = reach > 0 ? (long)reach / KEYS : 0;
    g.blocks = (long)w->positions[to - 1] / KEYS + 1 - g.first;
    g.q = (uint16_t *)scratch;
    g.inverses = scratch + g.padded * w->dim / 2;
    g.tops = g.inverses + g.padded;
    g.sums = g.tops + g.blocks * g.padded * TILE;
    g.weights = g.sums + g.blocks * g.padded * TILE;
    return g;
}

/* q: [queries, heads, dim] at `positions`; k: kv_heads of them kv_stride apart, [positions, dim]; out:
   heads of them out_stride apart, all 0. step: queries that are worked on at a time. scratch: 64-byte
   aligned, for p = step * heads / kv_heads rows, rounded up to TILE, and b = last position / KEYS + 1
   blocks, p * (dim / 2 + 1 + b * (KEYS + 2 * TILE)) floats. */
CB_API void cb_mass(const uint16_t *q, const uint16_t *k, float *out, const int64_t *positions,
                    long queries, long heads, long kv_heads, long dim, long kv_stride,
                    long out_stride, long window, float scale, long step, float *scratch,
                    int threads) {
    const Work w = {q, k, out, positions, queries, heads, kv_heads, dim, kv_stride, out_stride,
                    window, positions[queries - 1] + 1, scale * 1.44269504f};
#pragma omp parallel num_threads(threads)
    {
        configure_tiles();
        for (long i = 0; i < kv_heads * ((queries + step - 1) / step); i++) {
            const long from = i / kv_heads * step, to = from + step < queries ? from + step : queries;
            const Group g = group_of(&w, i % kv_heads, from, to, scratch);
#pragma omp single
            pack(&w, &g);
#pragma omp for schedule(static)
            for (long block = 0; block < g.blocks; block++) weigh_block(&w, &g, block);
#pragma omp for schedule(static)
            for (long row = 0; row < g.rows; row++) settle_row(&g, row);
#pragma omp for schedule(static)
            for (long block = 0; block < g.blocks; block++) gather_block(&w, &g, block);
        }
        release_tiles();
    }
}

TILES_END

#else

CB_API void cb_mass(void) {}

#endif
