#define HW_TABLE amx_kernels
#define HW_NAME amx
#define HW_AMX 1
#include "kernels.inc"
