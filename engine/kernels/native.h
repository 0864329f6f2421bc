/* What the sources of the native kernels share. They are called through ctypes; what a pointer must
   lead to is checked on the Python side. OpenMP symbols come from the runtime that torch has loaded, so that
   one pool of threads serves both. */

#include <stdint.h>

/* built.py's INTERFACE: both are raised together when a function is added or its arguments change, so that
   a library built before is not called with the new ones. */
#define CB_INTERFACE 6

#define CB_API __attribute__((visibility("default")))

#if defined(__x86_64__) && defined(__linux__)
#define CB_X86
#if defined(__clang__) ? __clang_major__ >= 14 : __GNUC__ >= 11
#define CB_TILES /* the compiler knows AMX */
#endif
#endif

/* Whether this machine has what CB_TILES is compiled for. */
int cb_can_attend(void);

void cb_place_fast(const uint16_t *k, const uint16_t *v, long start, long first, long last,
                   const float *cosine, const float *sine, uint16_t *k_out, uint16_t *v_out,
                   long heads, long dim, long turned, long head_stride);
void cb_shift_fast(uint16_t *x, const float *shift, long first, long last, const float *cosine,
                   const float *sine, long dim, long turned);
