/* What plain loops over rows share: clones for several instruction sets, and bfloat16. */

#include <stdint.h>
#include <string.h>

#if !defined(CB_X86) || !defined(__GLIBC__) /* which chooses among clones when it loads us */
#define CB_CLONES
#elif __GNUC__ >= 12
#define CB_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CB_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#endif

static inline float wide(uint16_t x) {
    const uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}

/* Rounded to nearest, ties to even; what is not a number stays that. */
static inline uint16_t narrow(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (uint16_t)(x == x ? rounded : 0x7fc0);
}
