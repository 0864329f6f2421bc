/* Matrix products with a weight, x @ weight.T in bfloat16 on AMX tiles, accumulated in float32.

   For the sizes of a small model and up to some hundreds of rows, where a general library spends
   much of its time on arranging the weight. A task takes a few panels of output columns: their part
   of the weight is arranged once and stays in the second cache, and every block of rows, in the
   first cache, meets all of them. The order in which a result is summed up depends on nothing but
   the weight's size, so a token's result is the same to the bit whichever others come with it.

   Few rows are another matter: reading the weight is most of the work. There the weight is the left
   operand, as it lies in memory, and the rows are arranged, once for all of it. */

#include "native.h"

#ifdef CB_TILES

#include "tiles.h"

#include <stdlib.h>

TILES_BEGIN

enum {
    SIDE = 2 * TILE, /* rows and columns of the block of results in hand */
    DEPTH = 640,     /* most of the inner dimension taken at a time */
    PANELS = 8,      /* most of a task, each SIDE columns wide */
    NEAR = 128,      /* elements of a row of weight that are brought to the first cache ahead */
};

/* TILE rows of the weight from column `from` on, as right operands: [depth / 32][16][32]. */
static void arrange(const uint16_t *w, long inner, long depth, uint16_t *out) {
    for (long d = 0; d < depth; d += 32, out += 2 * TILE * 32) {
        __m512i tile[TILE];
        for (int i = 0; i < TILE; i++) {
            _mm_prefetch(w + i * inner + d + 16 * inner, _MM_HINT_T1);
            tile[i] = _mm512_loadu_si512(w + i * inner + d);
        }
        transpose(tile);
        for (int i = 0; i < TILE; i++) _mm512_store_si512(out + i * 32, tile[i]);
    }
}

/* block [SIDE][SIDE] (+)= SIDE rows of x times the arranged panel. */
static inline void multiply(const uint16_t *x, long inner, const uint16_t *panel, long depth,
                            float *block, int fresh) {
    settle();
    if (fresh) {
        clear();
    } else {
        _tile_loadd(0, block, SIDE * 4);
        _tile_loadd(1, block + TILE, SIDE * 4);
        _tile_loadd(2, block + TILE * SIDE, SIDE * 4);
        _tile_loadd(3, block + TILE * SIDE + TILE, SIDE * 4);
    }
    for (long d = 0; d < depth; d += 32, panel += 2 * TILE * 32) {
        _tile_loadd(6, panel, 64);
        _tile_loadd(4, x + d, inner * 2);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, panel + TILE * 32, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, x + TILE * inner + d, inner * 2);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, block, SIDE * 4);
    _tile_stored(1, block + TILE, SIDE * 4);
    _tile_stored(2, block + TILE * SIDE, SIDE * 4);
    _tile_stored(3, block + TILE * SIDE + TILE, SIDE * 4);
}

/* x / (1 + 2^t), which is silu for t = -x log2(e), and gelu's tanh form for its own t. */
static inline __m512 activate(__m512 x, int gelu) {
    __m512 t = x;
    if (gelu) { /* 2 sqrt(2 / pi) (x + 0.044715 x^3) */
        const __m512 cubic = _mm512_fmadd_ps(_mm512_mul_ps(x, x), _mm512_set1_ps(0.044715f),
                                             _mm512_set1_ps(1.0f));
        t = _mm512_mul_ps(_mm512_mul_ps(x, cubic), _mm512_set1_ps(1.5957691216f));
    }
    t = _mm512_mul_ps(t, _mm512_set1_ps(-1.44269504f));
    t = _mm512_min_ps(t, _mm512_set1_ps(126.0f));
    return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), exp2_ps(t)));
}

typedef struct {
    const uint16_t *x, *w, *bias, *up, *up_bias;
    uint16_t *out;
    long rows, inner, width;
    int gelu;
} Product;

static inline __m512 bias_of(const uint16_t *bias, long column) {
    if (!bias) return _mm512_setzero_ps();
    const __m256i half = _mm256_loadu_si256((const void *)(bias + column));
    return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
}

/* Rounds the rows of a finished block of results, gated where there is an `up`, into out. */
static void put(const Product *p, const float *block, long row, long panel, long rows) {
    const long column = panel * (p->up ? TILE : SIDE);
    const __m512 first = bias_of(p->bias, column);
    const __m512 second = p->up ? bias_of(p->up_bias, column) : bias_of(p->bias, column + TILE);
    for (long i = 0; i < rows; i++, block += SIDE) {
        uint16_t *to = p->out + (row + i) * p->width + column;
        const __m512 a = _mm512_add_ps(_mm512_load_ps(block), first);
        const __m512 b = _mm512_add_ps(_mm512_load_ps(block + TILE), second);
        if (p->up) {
            const __m512 gated = _mm512_mul_ps(activate(a, p->gelu), b);
            _mm256_storeu_si256((void *)to, (__m256i)_mm512_cvtneps_pbh(gated));
        } else {
            _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(b, a));
        }
    }
}

typedef struct {
    long first, count; /* panels */
    long from, to;     /* rows, at least SIDE of them */
} Task;

/* The last block of rows is moved up to end with the last row; what it has in common with the one
   before comes out the same. arranged: [PANELS][SIDE * DEPTH]; sums: [blocks][SIDE * SIDE], for
   what is not finished yet. */
static void perform(const Product *p, Task task, uint16_t *arranged, float *sums) {
    const long inner = p->inner, parts = (inner + DEPTH - 1) / DEPTH;
    const long step = (inner / 32 + parts - 1) / parts * 32;
    for (long d = 0; d < inner; d += step) {
        const long depth = inner - d < step ? inner - d : step;
        for (long n = 0; n < task.count; n++) {
            const long panel = task.first + n;
            const uint16_t *w = p->w + panel * (p->up ? TILE : SIDE) * inner + d;
            uint16_t *to = arranged + n * SIDE * DEPTH;
            arrange(w, inner, depth, to);
            arrange(p->up ? p->up + panel * TILE * inner + d : w + TILE * inner, inner, depth,
                    to + TILE * 32);
        }
        float *block = sums;
        for (long row = task.from; row < task.to; row += SIDE) {
            const long at = row + SIDE <= task.to ? row : task.to - SIDE;
            for (long n = 0; n < task.count; n++, block += parts > 1 ? SIDE * SIDE : 0) {
                multiply(p->x + at * inner + d, inner, arranged + n * SIDE * DEPTH, depth, block,
                         d == 0);
                if (d + depth == inner) put(p, block, at, task.first + n, SIDE);
            }
        }
    }
}

/* block[row][column] of SIDE columns and `tiles` tiles of rows, for all of the inner dimension. a and
   b: TILE rows of weight each; x: arranged, [inner / 32][2][16][32]. ahead: what is read next, a line
   of memory at a time, or null. */
static void multiply_few(const uint16_t *a, const uint16_t *b, const uint16_t *ahead,
                         const uint16_t *ahead_b, const uint16_t *x, long inner, int tiles,
                         float *block) {
    float turned[4][TILE * TILE] __attribute__((aligned(64)));
    settle();
    clear();
    for (long d = 0; d < inner; d += 32, x += 2 * TILE * 32) {
        for (int i = 0; i < TILE; i++) {
            _mm_prefetch(a + i * inner + d + NEAR, _MM_HINT_T0);
            _mm_prefetch(b + i * inner + d + NEAR, _MM_HINT_T0);
            if (!ahead) continue;
            _mm_prefetch(ahead + d * TILE + i * 32, _MM_HINT_T1);
            _mm_prefetch(ahead_b + d * TILE + i * 32, _MM_HINT_T1);
        }
        _tile_loadd(4, a + d, inner * 2);
        _tile_loadd(5, b + d, inner * 2);
        _tile_loadd(6, x, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 5, 6);
        if (tiles > 1) {
            _tile_loadd(7, x + TILE * 32, 64);
            _tile_dpbf16ps(2, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, turned[0], 64);
    _tile_stored(1, turned[1], 64);
    _tile_stored(2, turned[2], 64);
    _tile_stored(3, turned[3], 64);
    settle();
    for (int t = 0; t < 2 * tiles; t++) {
        __m512i tile[TILE];
        for (int i = 0; i < TILE; i++) tile[i] = _mm512_load_si512(turned[t] + i * TILE);
        transpose(tile);
        float *to = block + t / 2 * TILE * SIDE + t % 2 * TILE;
        for (int i = 0; i < TILE; i++) _mm512_store_si512(to + i * SIDE, tile[i]);
    }
}

/* Up to SIDE rows. Whether there was memory for it. */
static int multiply_rows(const Product *p, int threads) {
    enum { CHUNK = 2 };
    const long inner = p->inner, width = p->up ? TILE : SIDE, panels = p->width / width;
    const int tiles = p->rows > TILE ? 2 : 1;
    uint16_t *x = aligned_alloc(64, (size_t)(SIDE * inner) * sizeof(uint16_t));
    if (!x) return 0;
    for (long d = 0; d < inner; d += 32) {
        for (int t = 0; t < tiles; t++) {
            __m512i tile[TILE];
            for (int i = 0; i < TILE; i++)
                tile[i] = t * TILE + i < p->rows
                              ? _mm512_loadu_si512(p->x + (t * TILE + i) * inner + d)
                              : _mm512_setzero_si512();
            transpose(tile);
            uint16_t *to = x + d * SIDE + t * TILE * 32;
            for (int i = 0; i < TILE; i++) _mm512_store_si512(to + i * 32, tile[i]);
        }
    }
#pragma omp parallel num_threads(threads)
    {
        configure_tiles();
#pragma omp for schedule(dynamic, CHUNK)
        for (long n = 0; n < panels; n++) {
            float block[SIDE * SIDE] __attribute__((aligned(64)));
            const uint16_t *a = p->w + n * width * inner;
            const uint16_t *b = p->up ? p->up + n * width * inner : a + TILE * inner;
            const long on = n + 1 < panels ? width * inner : 0;
            multiply_few(a, b, on ? a + on : 0, b + on, x, inner, tiles, block);
            put(p, block, 0, n, p->rows);
        }
        release_tiles();
    }
    free(x);
    return 1;
}

static long ceiling(long a, long b) { return (a + b - 1) / b; }

/* Whether there was memory for it. */
static int multiply_all(const Product *p, int threads) {
    const long panels = p->width / (p->up ? TILE : SIDE);
    const long rounds = ceiling(panels, (long)PANELS * threads);
    const long count = ceiling(panels, rounds * threads), groups = ceiling(panels, count);
    /* Rows are shared out, too, where there are more threads than columns for them. */
    const long wanted = ceiling(threads, groups), most = p->rows / (4 * SIDE);
    const long shares = wanted < most ? wanted : most > 1 ? most : 1;
    const long share = ceiling(ceiling(p->rows, shares), SIDE) * SIDE;
    const long blocks = p->inner > DEPTH ? count * (share / SIDE) : 1; /* not finished at once */
    int failed = 0;
#pragma omp parallel num_threads(threads) reduction(|| : failed)
    {
        configure_tiles();
        uint16_t *arranged = aligned_alloc(64, PANELS * SIDE * DEPTH * sizeof(uint16_t));
        float *sums = aligned_alloc(64, (size_t)blocks * SIDE * SIDE * sizeof(float));
        failed = !arranged || !sums;
#pragma omp for schedule(dynamic, 1)
        for (long i = 0; i < groups * shares; i++) {
            const long first = i / shares * count, from = i % shares * share;
            Task task = {first, panels - first < count ? panels - first : count, from, from + share};
            if (task.to > p->rows) task.to = p->rows;
            if (failed || task.from >= task.to) continue;
            if (task.to - task.from < SIDE) task.from = task.to - SIDE;
            perform(p, task, arranged, sums);
        }
        free(sums);
        free(arranged);
        release_tiles();
    }
    return !failed;
}

/* out [rows, width] = x [rows, inner] times w [width, inner], plus bias; with `up`, of w's shape,
   the activated product times the one with `up`. inner is a multiple of 32, width of SIDE, with
   `up` of TILE. Returns 0 where it was not done: nothing to do, or no memory for it. */
CB_API int cb_linear(const uint16_t *x, const uint16_t *w, const uint16_t *bias,
                     const uint16_t *up, const uint16_t *up_bias, uint16_t *out, long rows,
                     long inner, long width, int gelu, int threads) {
    if (!rows || !inner || !width) return 0;
    Product p = {x, w, bias, up, up_bias, out, rows, inner, width, gelu};
    return rows > SIDE ? multiply_all(&p, threads) : multiply_rows(&p, threads);
}

/* out [rows, width] = act(gate) * up, of x [rows, 2 * width] that holds both side by side. width is a
   multiple of TILE. Returns whether it was done. */
CB_API int cb_gate_pairs(const uint16_t *x, uint16_t *out, long rows, long width, int gelu,
                         int threads) {
    if (!cb_can_attend()) return 0;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long r = 0; r < rows; r++) {
        const uint16_t *gate = x + 2 * r * width, *up = gate + width;
        for (long i = 0; i < width; i += TILE) {
            const __m512 gated = _mm512_mul_ps(activate(bias_of(gate, i), gelu), bias_of(up, i));
            _mm256_storeu_si256((void *)(out + r * width + i),
                                (__m256i)_mm512_cvtneps_pbh(gated));
        }
    }
    return 1;
}

TILES_END

#else

CB_API int cb_linear(void) { return 0; }
CB_API int cb_gate_pairs(void) { return 0; }

#endif
