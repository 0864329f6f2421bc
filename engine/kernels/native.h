/* What the sources of the native kernels share. They are called through ctypes; every pointer is
   checked on the Python side. OpenMP symbols come from the runtime that torch has loaded, so that
   one pool of threads serves both. */

#include <stdint.h>

#define CB_API __attribute__((visibility("default")))

#if defined(__x86_64__) && defined(__linux__)
#define CB_X86
#endif
