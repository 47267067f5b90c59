#define HW_TABLE neon_i8mm_kernels
#define HW_NAME neon_i8mm
#include "kernels.inc"
