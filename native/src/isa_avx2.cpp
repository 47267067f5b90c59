#define HW_TABLE avx2_kernels
#define HW_NAME avx2
#include "kernels.inc"
