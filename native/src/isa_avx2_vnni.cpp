#define HW_TABLE avx2_vnni_kernels
#define HW_NAME avx2_vnni
#include "kernels.inc"
