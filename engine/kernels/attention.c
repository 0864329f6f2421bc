/* Exact causal attention of any increasing set of query positions, in bfloat16 on AMX tiles.

   Online softmax over key blocks (FlashAttention, arXiv 2205.14135) on transposed scores: a tile of
   S^T = K Q^T has keys as rows and queries as columns, so that running maximum, sum and rescaling
   work lane by lane, K is read from the cache as it lies there, and S^T needs only its rows
   interleaved to become the right operand of O^T = V^T P^T. The query heads of a KV head are
   columns side by side, so K and V are read once for all of them. Scores, maxima, sums and the
   output are float32; probabilities are rounded to bfloat16 for the second product. */

#include "native.h"

#ifdef CB_TILES

#include "tiles.h"

#include <sys/syscall.h>
#include <unistd.h>

TILES_BEGIN

enum {
    COLUMNS = 32,     /* queries a task works on: two tiles side by side */
    GROUP = 32,       /* keys that share a step of the second product */
    KEYS = 4 * GROUP, /* keys between two rescalings; their scores stay in the first cache */
    MAX_DIM = 256,
};

typedef struct {
    const uint16_t *q, *k, *v;
    uint16_t *out;
    const int64_t *positions;
    long tokens, heads, kv_heads, dim, kv_stride, window;
    float scale; /* of scores, in powers of two */
    uint16_t *values, *tail;
    long keys, groups; /* how many, and in groups of GROUP */
} Work;

/* V of GROUP keys, [keys, dim], as [dim, keys]; keys that are not there become 0. */
static void turn_values(const Work *w, long head, long group) {
    const uint16_t *v = w->v + head * w->kv_stride + group * GROUP * w->dim;
    uint16_t *out = w->values + (head * w->groups + group) * GROUP * w->dim;
    const long there = w->keys - group * GROUP;
    const __m512i pairs = _mm512_set_epi16(
        31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
        23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    for (long d = 0; d < w->dim; d += TILE) {
        __m512i rows[TILE]; /* a row holds two keys' values, dimension by dimension */
        for (int i = 0; i < TILE; i++) {
            const __m256i none = _mm256_setzero_si256();
            const uint16_t *first = v + 2 * i * w->dim + d;
            const __m256i a = 2 * i < there ? _mm256_loadu_si256((const void *)first) : none;
            const __m256i b =
                2 * i + 1 < there ? _mm256_loadu_si256((const void *)(first + w->dim)) : none;
            const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1);
            rows[i] = _mm512_permutexvar_epi16(pairs, both);
        }
        transpose(rows);
        for (int i = 0; i < TILE; i++) _mm512_storeu_si512(out + (d + i) * GROUP, rows[i]);
    }
}

/* Scores of GROUP keys for all columns: s[key][column]. */
static inline void scores(const uint16_t *k, const uint16_t *q, long dim, float *s) {
    settle();
    clear();
    for (long d = 0; d < dim; d += 32, q += 2 * TILE * 32) {
        _tile_loadd(4, k + d, dim * 2);
        _tile_loadd(5, k + TILE * dim + d, dim * 2);
        _tile_loadd(6, q, 64);
        _tile_loadd(7, q + TILE * 32, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, s, COLUMNS * 4);
    _tile_stored(1, s + TILE, COLUMNS * 4);
    _tile_stored(2, s + TILE * COLUMNS, COLUMNS * 4);
    _tile_stored(3, s + TILE * COLUMNS + TILE, COLUMNS * 4);
}

/* Adds the values of `groups` groups of keys, weighted by p, to o[dimension][column]. */
static inline void weigh(const uint16_t *values, const uint16_t *p, long groups, long dim, float *o,
                         int first) {
    settle();
    for (long d = 0; d < dim; d += 2 * TILE, o += 2 * TILE * COLUMNS) {
        if (first) {
            clear();
        } else {
            _tile_loadd(0, o, COLUMNS * 4);
            _tile_loadd(1, o + TILE, COLUMNS * 4);
            _tile_loadd(2, o + TILE * COLUMNS, COLUMNS * 4);
            _tile_loadd(3, o + TILE * COLUMNS + TILE, COLUMNS * 4);
        }
        for (long g = 0; g < groups; g++) {
            const uint16_t *v = values + (g * dim + d) * GROUP;
            _tile_loadd(4, v, 64);
            _tile_loadd(5, v + TILE * GROUP, 64);
            _tile_loadd(6, p + g * GROUP * COLUMNS, COLUMNS * 4);
            _tile_loadd(7, p + g * GROUP * COLUMNS + 2 * TILE, COLUMNS * 4);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, o, COLUMNS * 4);
        _tile_stored(1, o + TILE, COLUMNS * 4);
        _tile_stored(2, o + TILE * COLUMNS, COLUMNS * 4);
        _tile_stored(3, o + TILE * COLUMNS + TILE, COLUMNS * 4);
    }
}

/* Hides from every column the keys behind its position and out of its window. */
static void hide(float *s, long keys, long first, const int32_t *positions, long window) {
    const __m512 never = _mm512_set1_ps(-1e30f);
    for (int half = 0; half < 2; half++) {
        const __m512i last = _mm512_loadu_si512(positions + half * TILE);
        const __m512i reach = _mm512_sub_epi32(last, _mm512_set1_epi32((int)window));
        for (long j = 0; j < keys; j++) {
            const __m512i key = _mm512_set1_epi32((int)(first + j));
            __mmask16 seen = _mm512_cmple_epi32_mask(key, last);
            if (window) seen &= _mm512_cmpgt_epi32_mask(key, reach);
            float *row = s + j * COLUMNS + half * TILE;
            _mm512_store_ps(row, _mm512_mask_blend_ps(seen, never, _mm512_load_ps(row)));
        }
    }
}

/* Brings the running maximum up to date with the scores of some keys. Returns whether it rose; by
   *shrink earlier sums and outputs are then multiplied. */
static inline int lift(const float *s, long keys, __m512 scale, __m512 *top, __m512 *sum,
                       __m512 *shrink) {
    __m512 a = _mm512_set1_ps(-1e30f), b = a;
    for (long j = 0; j < keys; j += 2) {
        a = _mm512_max_ps(a, _mm512_load_ps(s + j * COLUMNS));
        b = _mm512_max_ps(b, _mm512_load_ps(s + (j + 1) * COLUMNS));
    }
    const __m512 highest = _mm512_max_ps(*top, _mm512_mul_ps(_mm512_max_ps(a, b), scale));
    const int rose = _mm512_cmp_ps_mask(highest, *top, _CMP_GT_OQ) != 0;
    *shrink = exp2_ps(_mm512_sub_ps(*top, highest));
    *sum = _mm512_mul_ps(*sum, *shrink);
    *top = highest;
    return rose;
}

/* Turns the scores of GROUP keys into unnormalised probabilities p, rows of two keys interleaved,
   and adds them to the sum. */
static inline void soften(const float *s, uint16_t *p, __m512 scale, __m512 top, __m512 *sum) {
    const __m512i interleave = _mm512_set_epi16(
        31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
        23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    __m512 total = *sum, total2 = _mm512_setzero_ps();
    for (long j = 0; j < GROUP; j += 2) {
        const __m512 x = exp2_short(_mm512_fmsub_ps(_mm512_load_ps(s + j * COLUMNS), scale, top));
        const __m512 y =
            exp2_short(_mm512_fmsub_ps(_mm512_load_ps(s + (j + 1) * COLUMNS), scale, top));
        total = _mm512_add_ps(total, x);
        total2 = _mm512_add_ps(total2, y);
        const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(y, x);
        _mm512_store_si512(p + j * COLUMNS, _mm512_permutexvar_epi16(interleave, both));
    }
    *sum = _mm512_add_ps(total, total2);
}

static inline long groups_of(long end, long first) {
    const long left = (end - first + GROUP - 1) / GROUP;
    return left < KEYS / GROUP ? left : KEYS / GROUP;
}

/* COLUMNS queries of one KV head, from column `start` on; past the last one it is repeated. */
static void attend_columns(const Work *w, long head, long start) {
    uint16_t q[MAX_DIM * COLUMNS] __attribute__((aligned(64)));
    float o[MAX_DIM * COLUMNS] __attribute__((aligned(64)));
    float both[2][KEYS * COLUMNS] __attribute__((aligned(64)));
    uint16_t p[KEYS * COLUMNS] __attribute__((aligned(64)));
    int32_t positions[COLUMNS];
    const long dim = w->dim, shared = w->heads / w->kv_heads, columns = w->tokens * shared;
    long rows[COLUMNS];
    for (int c = 0; c < COLUMNS; c++) {
        const long column = start + c < columns ? start + c : columns - 1;
        rows[c] = column / shared * w->heads + head * shared + column % shared;
        positions[c] = (int32_t)w->positions[column / shared];
    }
    for (long d = 0; d < dim; d += 32) {
        for (int half = 0; half < 2; half++) {
            __m512i tile[TILE];
            for (int c = 0; c < TILE; c++)
                tile[c] = _mm512_loadu_si512(w->q + rows[half * TILE + c] * dim + d);
            transpose(tile);
            uint16_t *to = q + d * COLUMNS + half * TILE * 32;
            for (int c = 0; c < TILE; c++) _mm512_store_si512(to + c * 32, tile[c]);
        }
    }
    const __m512 scale = _mm512_set1_ps(w->scale);
    __m512 top[2], sum[2], shrink[2];
    top[0] = top[1] = _mm512_set1_ps(-1e20f); /* far above hidden scores: all hidden weigh 0 */
    sum[0] = sum[1] = _mm512_setzero_ps();
    const long end = positions[COLUMNS - 1] + 1;
    long from = w->window && positions[0] - w->window + 1 > 0 ? positions[0] - w->window + 1 : 0;
    from = from / GROUP * GROUP;
    /* Scores of the next keys are made between the steps of softening these: tiles multiply while
       the other units work. */
    const long steps = (end - from + KEYS - 1) / KEYS;
    for (long step = -1; step < steps; step++) {
        const long first = from + step * KEYS;
        const long groups = step < 0 ? 0 : groups_of(end, first);
        const long coming = step + 1 < steps ? groups_of(end, first + KEYS) : 0;
        float *s = both[step & 1], *next = both[(step + 1) & 1];
        int rose = 0;
        if (groups) {
            const long keys = groups * GROUP;
            if (first + keys > positions[0] + 1 ||
                (w->window && first <= positions[COLUMNS - 1] - w->window))
                hide(s, keys, first, positions, w->window);
            for (int half = 0; half < 2; half++)
                rose |= lift(s + half * TILE, keys, scale, top + half, sum + half, shrink + half);
        }
        for (long g = 0; g < groups || g < coming; g++) {
            if (g < coming) {
                const long key = first + KEYS + g * GROUP;
                const uint16_t *k = key + GROUP <= w->keys ? w->k + head * w->kv_stride + key * dim
                                                           : w->tail + head * GROUP * dim;
                scores(k, q, dim, next + g * GROUP * COLUMNS);
            }
            if (g < groups) {
                for (int half = 0; half < 2; half++)
                    soften(s + g * GROUP * COLUMNS + half * TILE,
                           p + g * GROUP * COLUMNS + half * 2 * TILE, scale, top[half], sum + half);
            }
        }
        if (!groups) continue;
        if (rose && step) {
            for (long d = 0; d < dim; d++) {
                float *row = o + d * COLUMNS;
                _mm512_store_ps(row, _mm512_mul_ps(_mm512_load_ps(row), shrink[0]));
                _mm512_store_ps(row + TILE, _mm512_mul_ps(_mm512_load_ps(row + TILE), shrink[1]));
            }
        }
        weigh(w->values + (head * w->groups + first / GROUP) * GROUP * dim, p, groups, dim, o,
              step == 0);
    }
    for (int half = 0; half < 2; half++) {
        const __m512 inverse = _mm512_div_ps(_mm512_set1_ps(1.0f), sum[half]);
        const long there = columns - start - half * TILE;
        for (long d = 0; d < dim; d += TILE) {
            __m512i tile[TILE];
            for (int i = 0; i < TILE; i++) {
                const float *row = o + (d + i) * COLUMNS + half * TILE;
                tile[i] = (__m512i)_mm512_mul_ps(_mm512_load_ps(row), inverse);
            }
            transpose(tile);
            for (int c = 0; c < TILE && c < there; c++) {
                const __m256i rounded = (__m256i)_mm512_cvtneps_pbh((__m512)tile[c]);
                uint16_t *to = w->out + rows[half * TILE + c] * dim + d;
                _mm256_storeu_si256((void *)to, rounded);
            }
        }
    }
}

CB_API void cb_attend(const uint16_t *q, const uint16_t *k, const uint16_t *v, uint16_t *out,
                      const int64_t *positions, long tokens, long heads, long kv_heads, long dim,
                      long kv_stride, long window, float scale, uint16_t *scratch, int threads) {
    const long keys = positions[tokens - 1] + 1, groups = (keys + GROUP - 1) / GROUP;
    Work w = {q, k, v, out, positions, tokens, heads, kv_heads, dim, kv_stride, window,
              scale * 1.44269504f, scratch, scratch + kv_heads * groups * GROUP * dim, keys, groups};
    const long whole = keys / GROUP * GROUP, rest = (keys - whole) * dim;
    for (long head = 0; head < kv_heads && rest; head++) {
        uint16_t *tail = w.tail + head * GROUP * dim;
        memcpy(tail, k + head * kv_stride + whole * dim, rest * 2);
        memset(tail + rest, 0, (GROUP * dim - rest) * 2);
    }
    long seen = window && positions[0] - window + 1 > 0 ? positions[0] - window + 1 : 0;
    seen /= GROUP;
    const long columns = tokens * (heads / kv_heads), tasks = (columns + COLUMNS - 1) / COLUMNS;
#pragma omp parallel num_threads(threads)
    {
        configure_tiles();
#pragma omp for schedule(static)
        for (long i = 0; i < kv_heads * (groups - seen); i++)
            turn_values(&w, i / (groups - seen), seen + i % (groups - seen));
#pragma omp for schedule(dynamic, 1)
        for (long i = 0; i < tasks * kv_heads; i++) /* those that see most come first */
            attend_columns(&w, i / tasks, (tasks - 1 - i % tasks) * COLUMNS);
        release_tiles();
    }
}

TILES_END

CB_API int cb_can_attend(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq") ||
        !__builtin_cpu_supports("avx512bf16"))
        return 0;
    uint32_t a = 7, b, c = 0, d;
    __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    const uint32_t amx_bf16 = 1u << 22, amx_tile = 1u << 24;
    if ((d & amx_bf16) == 0 || (d & amx_tile) == 0) return 0;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

#else

CB_API int cb_can_attend(void) { return 0; }
CB_API void cb_attend(void) {}

#endif
