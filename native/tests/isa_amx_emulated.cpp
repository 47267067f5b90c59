// The AMX kernels on tiles in software: for machines that have none (scripts/cross).
#define HW_TABLE amx_emulated_kernels
#define HW_NAME amx_emulated
#define HW_AMX 1
#define HW_AMX_EMULATED 1
#include "../src/kernels.inc"
