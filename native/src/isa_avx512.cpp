#define HW_TABLE avx512_kernels
#define HW_NAME avx512
#include "kernels.inc"
