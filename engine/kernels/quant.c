/* Quantised K and V, as cache_store/entry.py lays them out, brought back: base + step * code.

   steps and bases are bfloat16 and a code has at most 8 bits, so the product is exact in float32 and
   the sum rounded once: the same bits with and without fused multiply-add. */

#include "native.h"

#include "clones.h"

/* Inlined, so that it is compiled for each clone's instructions. */
#define UNPACK static inline __attribute__((always_inline)) void

static inline float of_byte(uint8_t code) { return (float)code; }

/* e4m3, without what is not a number: a bias of 7, and subnormals with no exponent. */
static inline float of_e4m3(uint8_t code) {
    const uint32_t size = code & 0x7f, bits = (size << 20) + (120u << 23);
    float x;
    memcpy(&x, &bits, 4);
    const float small = (x - 0.0078125f) * 2.0f;
    x = size < 8 ? small : x;
    return code & 0x80 ? -x : x;
}

/* n numbers of a byte each, with a step and base each, or one for all. */
#define BYTES(name, type, value, put)                                                             \
    UNPACK name##_each(const uint8_t *codes, const uint16_t *step, const uint16_t *base,          \
                       type *restrict out, long n) {                                              \
        for (long i = 0; i < n; i++) out[i] = put(wide(base[i]) + wide(step[i]) * value(codes[i]));\
    }                                                                                             \
    UNPACK name##_one(const uint8_t *codes, const uint16_t *step, const uint16_t *base,           \
                      type *restrict out, long n) {                                               \
        const float s = wide(*step), b = wide(*base);                                             \
        for (long i = 0; i < n; i++) out[i] = put(b + s * value(codes[i]));                       \
    }

/* The same for two numbers in a byte, the first half's in the low bits. */
#define NIBBLES(name, type, put)                                                                  \
    UNPACK name##_each(const uint8_t *codes, const uint16_t *step, const uint16_t *base,          \
                       type *restrict out, long n) {                                              \
        const long half = (n + 1) / 2;                                                            \
        for (long i = 0; i < half; i++)                                                           \
            out[i] = put(wide(base[i]) + wide(step[i]) * (float)(codes[i] & 15));                 \
        step += half, base += half, out += half;                                                  \
        for (long i = 0; i < n - half; i++)                                                       \
            out[i] = put(wide(base[i]) + wide(step[i]) * (float)(codes[i] >> 4));                 \
    }                                                                                             \
    UNPACK name##_one(const uint8_t *codes, const uint16_t *step, const uint16_t *base,           \
                      type *restrict out, long n) {                                               \
        const long half = (n + 1) / 2;                                                            \
        const float s = wide(*step), b = wide(*base);                                             \
        float both[64] = {0}; /* one loop that rounds, and not two short ones, is vectorised */         \
        for (long i = 0; i < half; i++) both[i] = (float)(codes[i] & 15);                         \
        for (long i = 0; i < n / 2; i++) both[half + i] = (float)(codes[i] >> 4);              \
        for (long i = 0; i < n; i++) out[i] = put(b + s * both[i]);                               \
    }

static inline float same(float x) { return x; }

BYTES(int8_bf16, uint16_t, of_byte, narrow)
BYTES(int8_fp32, float, of_byte, same)
BYTES(fp8_bf16, uint16_t, of_e4m3, narrow)
BYTES(fp8_fp32, float, of_e4m3, same)
NIBBLES(int4_bf16, uint16_t, narrow)
NIBBLES(int4_fp32, float, same)

/* K: a group is `group` tokens, which share each channel's step. V: it is `group` channels of a head
   of one token. */
#define PARTS(name, type, bits, usual)                                                            \
    CB_CLONES static void name##_k(const uint8_t *part, type *out, long tokens, long heads,       \
                                   long dim, long group) {                                        \
        const long size = heads * dim, groups = (tokens + group - 1) / group;                     \
        const uint16_t *steps = (const uint16_t *)part, *bases = steps + groups * size;           \
        const uint8_t *codes = (const uint8_t *)(bases + groups * size);                          \
        for (long t = 0; t < tokens; t++, codes += (size * bits + 7) / 8, out += size)            \
            name##_each(codes, steps + t / group * size, bases + t / group * size, out, size);    \
    }                                                                                             \
    CB_CLONES static void name##_v(const uint8_t *part, type *out, long tokens, long heads,       \
                                   long dim, long group) {                                        \
        const long rows = tokens * heads, groups = (dim + group - 1) / group;                     \
        const uint16_t *step = (const uint16_t *)part, *base = step + rows * groups;              \
        const uint8_t *codes = (const uint8_t *)(base + rows * groups);                           \
        for (long r = 0; r < rows; r++)                                                           \
            for (long i = 0; i < dim; i += group, step++, base++) {                               \
                const long n = i + group < dim ? group : dim - i;                                 \
                if (n == usual) /* loops of a known length are unrolled */                        \
                    name##_one(codes, step, base, out, usual);                                    \
                else                                                                              \
                    name##_one(codes, step, base, out, n);                                        \
                codes += (n * bits + 7) / 8, out += n;                                            \
            }                                                                                     \
    }

PARTS(int8_bf16, uint16_t, 8, 64)
PARTS(int8_fp32, float, 8, 64)
PARTS(fp8_bf16, uint16_t, 8, 64)
PARTS(fp8_fp32, float, 8, 64)
PARTS(int4_bf16, uint16_t, 4, 32)
PARTS(int4_fp32, float, 4, 32)

/* One part of a layer, K or V, to out [tokens, heads, dim], bfloat16 or (wanted: 1) float32.
   group: at most 64. stored: 0 fp8, 1 int8, 2 int4. part is at an even address. In one thread: others compute. */
CB_API void cb_unpack(const uint8_t *part, void *out, long tokens, long heads, long dim,
                      long group, int stored, int is_v, int wanted) {
    switch (stored * 4 + wanted * 2 + is_v) {
#define WAY(number, name, type)                                                                   \
    case number: name##_k(part, (type *)out, tokens, heads, dim, group); return;                  \
    case number + 1: name##_v(part, (type *)out, tokens, heads, dim, group); return;
        WAY(0, fp8_bf16, uint16_t)
        WAY(2, fp8_fp32, float)
        WAY(4, int8_bf16, uint16_t)
        WAY(6, int8_fp32, float)
        WAY(8, int4_bf16, uint16_t)
        WAY(10, int4_fp32, float)
    }
#undef WAY
}
