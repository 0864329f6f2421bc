/* Stored KV put where it is used: read once, rotated in float32, written once. What counts is that
   reading and writing are under way early, so both are asked for ahead. */

#include "native.h"

#ifdef CB_TILES

#include "tiles.h"

TILES_BEGIN

enum {
    AHEAD = 1024, /* elements of what is read, and */
    ROWS = 8,     /* rows of what is written, asked for ahead */
};

static inline __m512 wide(const uint16_t *x) {
    const __m256i half = _mm256_loadu_si256((const void *)x);
    return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
}

/* A row's two halves, rotated; both are multiples of 16. */
static inline void turn(const uint16_t *x, const float *cosine, const float *sine, uint16_t *out,
                        long half) {
    for (long i = 0; i < half; i += 16) {
        const __m512 a = wide(x + i), b = wide(x + half + i);
        const __m512 first = _mm512_fmadd_ps(b, _mm512_loadu_ps(sine + i),
                                             _mm512_mul_ps(a, _mm512_loadu_ps(cosine + i)));
        const __m512 second =
            _mm512_fmadd_ps(a, _mm512_loadu_ps(sine + half + i),
                            _mm512_mul_ps(b, _mm512_loadu_ps(cosine + half + i)));
        _mm256_storeu_si256((void *)(out + i), (__m256i)_mm512_cvtneps_pbh(first));
        _mm256_storeu_si256((void *)(out + half + i), (__m256i)_mm512_cvtneps_pbh(second));
    }
}

static inline void copy(const uint16_t *x, uint16_t *out, long from, long to) {
    for (long i = from; i < to; i += 32) _mm512_storeu_si512(out + i, _mm512_loadu_si512(x + i));
}

static inline void ask(const uint16_t *from, const uint16_t *to, long dim) {
    for (long i = 0; i < dim; i += 32) {
        _mm_prefetch(from + AHEAD + i, _MM_HINT_T0);
        __builtin_prefetch(to + ROWS * dim + i, 1);
    }
}

/* As `cb_place_runs` describes it, for tokens [first, last) of one run that begins at `start`. dim
   and turned are multiples of 32. */
void cb_place_fast(const uint16_t *k, const uint16_t *v, long start, long first, long last,
                   const float *cosine, const float *sine, uint16_t *k_out, uint16_t *v_out,
                   long heads, long dim, long turned, long head_stride) {
    for (long i = first; i < last; i++) {
        const long position = start + i;
        for (long head = 0; head < heads; head++) {
            const long from = (i * heads + head) * dim, to = head * head_stride + position * dim;
            ask(k + from, k_out + to, dim);
            ask(v + from, v_out + to, dim);
            if (turned)
                turn(k + from, cosine + position * turned, sine + position * turned, k_out + to,
                     turned / 2);
            copy(k + from, k_out + to, turned, dim);
            copy(v + from, v_out + to, 0, dim);
        }
    }
}

/* x + shift, rounded. */
static inline void add(uint16_t *x, __m512 shift) {
    _mm256_storeu_si256((void *)x, (__m256i)_mm512_cvtneps_pbh(_mm512_add_ps(wide(x), shift)));
}

/* Adds a shift to rows [first, last) of x [positions, dim], its first `turned` dimensions rotated by
   the position's rows of cos and sin [positions, turned]. dim and turned are multiples of 32. */
void cb_shift_fast(uint16_t *x, const float *shift, long first, long last, const float *cosine,
                   const float *sine, long dim, long turned) {
    const long half = turned / 2;
    for (long p = first; p < last; p++) {
        uint16_t *row = x + p * dim;
        const float *c = cosine + p * turned, *s = sine + p * turned;
        for (long i = 0; i < half; i += 16) {
            const __m512 a = _mm512_loadu_ps(shift + i), b = _mm512_loadu_ps(shift + half + i);
            add(row + i, _mm512_fmadd_ps(b, _mm512_loadu_ps(s + i),
                                         _mm512_mul_ps(a, _mm512_loadu_ps(c + i))));
            add(row + half + i, _mm512_fmadd_ps(a, _mm512_loadu_ps(s + half + i),
                                                _mm512_mul_ps(b, _mm512_loadu_ps(c + half + i))));
        }
        for (long i = turned; i < dim; i += 16) add(row + i, _mm512_loadu_ps(shift + i));
    }
}

TILES_END

#endif
