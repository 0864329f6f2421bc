/* Work on rows of bfloat16, each read and written once; the arithmetic between is float32.

   Plain loops the compiler vectorises, cloned for several instruction sets. */

#include "native.h"

#include "clones.h"

#include <math.h>

CB_API int cb_interface(void) { return CB_INTERFACE; }

/* e^x, to 2e-7 relative, for any x; 0 and very large numbers at the ends of the range. */
static inline float exponential(float x) {
    float t = x * 1.44269504f;
    t = t > -126.0f ? t : -126.0f;
    t = t < 126.0f ? t : 126.0f;
    const float whole = (t + 12582912.0f) - 12582912.0f; /* 1.5 * 2^23: to the nearest integer */
    const float f = t - whole;
    float p = 1.33335581e-3f;
    p = p * f + 9.61812910e-3f;
    p = p * f + 5.55041087e-2f;
    p = p * f + 2.40226507e-1f;
    p = p * f + 6.93147181e-1f;
    p = p * f + 1.0f;
    const uint32_t bits = (uint32_t)((int32_t)whole + 127) << 23;
    float power;
    memcpy(&power, &bits, 4);
    return p * power;
}

CB_CLONES static void norm_row(uint16_t *x, const uint16_t *add, const uint16_t *weight,
                               uint16_t *out, long size, float eps) {
    if (add)
#pragma GCC ivdep
        for (long i = 0; i < size; i++) x[i] = narrow(wide(x[i]) + wide(add[i]));
    float sums[64] = {0}; /* apart from each other, so that they can be added side by side */
    long i = 0;
    for (; i + 64 <= size; i += 64)
        for (int j = 0; j < 64; j++) sums[j] += wide(x[i + j]) * wide(x[i + j]);
    for (; i < size; i++) sums[0] += wide(x[i]) * wide(x[i]);
    float sum = 0;
    for (int j = 0; j < 64; j++) sum += sums[j];
    const float scale = 1.0f / sqrtf(sum / (float)size + eps);
    if (out)
#pragma GCC ivdep /* out is x or has nothing in common with it */
        for (i = 0; i < size; i++) out[i] = narrow(wide(x[i]) * scale * wide(weight[i]));
}

/* x += add (unless null), then out = RMSNorm(x) * weight; all [rows, size], contiguous. out may be
   x itself, or null. */
CB_API void cb_norm(uint16_t *x, const uint16_t *add, const uint16_t *weight, uint16_t *out,
                    long rows, long size, float eps, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long r = 0; r < rows; r++)
        norm_row(x + r * size, add ? add + r * size : 0, weight, out ? out + r * size : 0, size,
                 eps);
}

CB_CLONES static void silu_row(uint16_t *restrict gate, const uint16_t *restrict up, long size) {
    for (long i = 0; i < size; i++) {
        const float x = wide(gate[i]);
        gate[i] = narrow(x / (1.0f + exponential(-x)) * wide(up[i]));
    }
}

CB_CLONES static void gelu_row(uint16_t *restrict gate, const uint16_t *restrict up, long size) {
    for (long i = 0; i < size; i++) {
        const float x = wide(gate[i]);
        const float t = 1.5957691216f * (x + 0.044715f * x * x * x); /* twice tanh's argument */
        gate[i] = narrow(x / (1.0f + exponential(-t)) * wide(up[i]));
    }
}

/* gate = silu(gate) * up, or gelu's tanh form of it; `size` elements each. */
CB_API void cb_gate(uint16_t *gate, const uint16_t *up, long size, int gelu, int threads) {
    enum { PART = 4096 };
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long i = 0; i < size; i += PART) {
        const long part = size - i < PART ? size - i : PART;
        (gelu ? gelu_row : silu_row)(gate + i, up + i, part);
    }
}

CB_CLONES static void turn_row(const uint16_t *x, const float *restrict cosine,
                               const float *restrict sine, uint16_t *out, long dim) {
    const long half = dim / 2;
#pragma GCC ivdep /* x and out are the same row or have nothing in common */
    for (long i = 0; i < half; i++) {
        const float a = wide(x[i]), b = wide(x[half + i]);
        out[i] = narrow(a * cosine[i] + b * sine[i]);
        out[half + i] = narrow(b * cosine[half + i] + a * sine[half + i]);
    }
}

/* Puts row i of x [tokens, heads, dim] at out + place * token_stride + head * head_stride, its first
   `turned` dimensions rotated by row i of cos and sin [tokens, turned]. place: places[i], or i where
   that is null. x's heads are contiguous, its tokens x_stride apart; out may be x itself. Returns
   0, and has done nothing, where a place is not below `room`. */
CB_API int cb_place(const uint16_t *x, long x_stride, const float *cosine, const float *sine,
                    uint16_t *out, const int64_t *places, long room, long tokens, long heads,
                    long dim, long turned, long token_stride, long head_stride, int threads) {
    for (long i = 0; places && i < tokens; i++)
        if (places[i] < 0 || places[i] >= room) return 0;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long i = 0; i < tokens; i++) {
        const uint16_t *from = x + i * x_stride;
        uint16_t *to = out + (places ? places[i] : i) * token_stride;
        for (long head = 0; head < heads; head++, from += dim, to += head_stride) {
            if (turned) turn_row(from, cosine + i * turned, sine + i * turned, to, turned);
            if (to != from) memcpy(to + turned, from + turned, (dim - turned) * 2);
        }
    }
    return 1;
}

CB_CLONES static void place_run(const uint16_t *k, const uint16_t *v, long start, long first,
                                long last, const float *cosine, const float *sine, uint16_t *k_out,
                                uint16_t *v_out, long heads, long dim, long turned,
                                long head_stride) {
    for (long i = first; i < last; i++) {
        const long position = start + i;
        const uint16_t *from = k + i * heads * dim;
        uint16_t *to = k_out + position * dim;
        for (long head = 0; head < heads; head++, from += dim, to += head_stride) {
            if (turned)
                turn_row(from, cosine + position * turned, sine + position * turned, to, turned);
            memcpy(to + turned, from + turned, (dim - turned) * 2);
        }
    }
    for (long head = 0; head < heads; head++) {
        uint16_t *to = v_out + head * head_stride + (start + first) * dim;
        const uint16_t *from = v + (first * heads + head) * dim;
        for (long i = first; i < last; i++, to += dim, from += heads * dim)
            memcpy(to, from, dim * 2);
    }
}

/* Stored KV of several runs of tokens at once: run n has counts[n] tokens from position starts[n] on,
   k[n] and v[n] [tokens, heads, dim]. K goes to k_out, rotated by the rows of its positions in cos
   and sin [positions, turned], V to v_out, both [heads, positions, dim]. */
CB_API void cb_place_runs(const uint16_t *const *k, const uint16_t *const *v, const long *starts,
                          const long *counts, long runs, const float *cosine, const float *sine,
                          uint16_t *k_out, uint16_t *v_out, long heads, long dim, long turned,
                          long head_stride, int threads) {
    enum { PART = 64 };
    void (*place)(const uint16_t *, const uint16_t *, long, long, long, const float *,
                  const float *, uint16_t *, uint16_t *, long, long, long, long) = place_run;
#ifdef CB_TILES
    if (dim % 32 == 0 && turned % 32 == 0 && cb_can_attend()) place = cb_place_fast;
#endif
#pragma omp parallel num_threads(threads)
    for (long n = 0; n < runs; n++) {
#pragma omp for schedule(static) nowait
        for (long part = 0; part < (counts[n] + PART - 1) / PART; part++) {
            const long end = (part + 1) * PART < counts[n] ? (part + 1) * PART : counts[n];
            place(k[n], v[n], starts[n], part * PART, end, cosine, sine, k_out, v_out, heads, dim,
                  turned, head_stride);
        }
    }
}

CB_CLONES static void shift_turned(uint16_t *restrict row, const float *restrict shift,
                                   const float *restrict cosine, const float *restrict sine,
                                   long turned) {
    const long half = turned / 2;
    for (long i = 0; i < half; i++) {
        const float a = shift[i], b = shift[half + i];
        row[i] = narrow(wide(row[i]) + (a * cosine[i] + b * sine[i]));
        row[half + i] = narrow(wide(row[half + i]) + (b * cosine[half + i] + a * sine[half + i]));
    }
}

CB_CLONES static void shift_plain(uint16_t *restrict row, const float *restrict shift, long size) {
    for (long i = 0; i < size; i++) row[i] = narrow(wide(row[i]) + shift[i]);
}

/* Adds a shift to rows [first, last) of x [positions, dim], rotated as `cb_shift` says. */
static void shift_run(uint16_t *x, const float *shift, long first, long last, const float *cosine,
                      const float *sine, long dim, long turned) {
    for (long p = first; p < last; p++) {
        if (turned)
            shift_turned(x + p * dim, shift, cosine + p * turned, sine + p * turned, turned);
        shift_plain(x + p * dim + turned, shift + turned, dim - turned);
    }
}

/* Adds to runs of positions in k and v [heads, positions, dim] what each run's row of shifts
   [runs, 2, heads, dim] says: its first half to K, its first `turned` dimensions rotated by the
   position's rows of cos and sin [positions, turned], its second half to V. */
CB_API void cb_shift(uint16_t *k, uint16_t *v, const int64_t *starts, const int64_t *ends,
                     const float *shifts, long runs, const float *cosine, const float *sine,
                     long heads, long dim, long turned, long head_stride, int threads) {
    void (*shift)(uint16_t *, const float *, long, long, const float *, const float *, long, long) =
        shift_run;
#ifdef CB_TILES
    if (dim % 32 == 0 && turned % 32 == 0 && cb_can_attend()) shift = cb_shift_fast;
#endif
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long n = 0; n < runs; n++) {
        for (long head = 0; head < heads; head++) {
            const float *to_k = shifts + (n * 2 * heads + head) * dim, *to_v = to_k + heads * dim;
            shift(k + head * head_stride, to_k, starts[n], ends[n], cosine, sine, dim, turned);
            shift(v + head * head_stride, to_v, starts[n], ends[n], cosine, sine, dim, 0);
        }
    }
}

CB_CLONES static void add_apart_turned(float *restrict sum, const uint16_t *fresh,
                                       const uint16_t *stored, const float *restrict cosine,
                                       const float *restrict sine, long turned) {
    const long half = turned / 2;
    for (long i = 0; i < half; i++) {
        const float a = wide(stored[i]), b = wide(stored[half + i]);
        sum[i] += wide(fresh[i]) - (a * cosine[i] + b * sine[i]);
        sum[half + i] += wide(fresh[half + i]) - (b * cosine[half + i] + a * sine[half + i]);
    }
}

CB_CLONES static void add_apart(float *restrict sum, const uint16_t *fresh, const uint16_t *stored,
                                long size) {
    for (long i = 0; i < size; i++) sum[i] += wide(fresh[i]) - wide(stored[i]);
}

/* Sums, by groups of tokens [bounds[n], bounds[n + 1]), of fresh K and V [tokens, heads, dim] less what
   k and v [heads, positions, dim] hold at the tokens' places: [groups, 2, heads, dim]. The first `turned`
   dimensions of K held are rotated by the tokens' rows of cos and sin [tokens, turned] before. */
CB_API void cb_deviations(const uint16_t *k, const uint16_t *v, const uint16_t *fresh_k,
                          const uint16_t *fresh_v, const int64_t *places, const int64_t *bounds,
                          float *sums, long groups, const float *cosine, const float *sine,
                          long heads, long dim, long turned, long head_stride, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long n = 0; n < groups; n++) {
        float *to_k = sums + n * 2 * heads * dim;
        memset(to_k, 0, 2 * heads * dim * sizeof(float));
        for (long i = bounds[n]; i < bounds[n + 1]; i++) {
            for (long head = 0; head < heads; head++) {
                const long at = head * head_stride + places[i] * dim, from = (i * heads + head) * dim;
                float *sum = to_k + head * dim;
                if (turned)
                    add_apart_turned(sum, fresh_k + from, k + at, cosine + i * turned,
                                     sine + i * turned, turned);
                add_apart(sum + turned, fresh_k + from + turned, k + at + turned, dim - turned);
                add_apart(sum + heads * dim, fresh_v + from, v + at, dim);
            }
        }
    }
}

CB_CLONES static void norm_rows(const uint16_t *x, float *out, long rows, long size) {
    for (long r = 0; r < rows; r++, x += size) {
        float sums[16] = {0};
        long i = 0;
        for (; i + 16 <= size; i += 16)
            for (int j = 0; j < 16; j++) sums[j] += wide(x[i + j]) * wide(x[i + j]);
        for (; i < size; i++) sums[0] += wide(x[i]) * wide(x[i]);
        for (int half = 8; half; half /= 2)
            for (int j = 0; j < half; j++) sums[j] += sums[j + half];
        out[r] = sqrtf(sums[0]);
    }
}

/* L2 norms of rows of x [heads, rows, size], its heads head_stride apart, to out [heads, rows]. */
CB_API void cb_norms(const uint16_t *x, float *out, long heads, long rows, long size,
                     long head_stride, int threads) {
    enum { PART = 256 };
    const long parts = (rows + PART - 1) / PART;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long i = 0; i < heads * parts; i++) {
        const long head = i / parts, first = i % parts * PART;
        norm_rows(x + head * head_stride + first * size, out + head * rows + first,
                  rows - first < PART ? rows - first : PART, size);
    }
}
