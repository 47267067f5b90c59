#define HW_TABLE scalar_kernels
#define HW_NAME scalar
#include "kernels.inc"
