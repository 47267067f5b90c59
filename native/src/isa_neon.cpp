#define HW_TABLE neon_kernels
#define HW_NAME neon
#include "kernels.inc"
