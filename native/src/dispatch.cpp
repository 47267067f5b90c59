// Which instruction set runs: asked of the processor once, or named by the caller.
#if defined(__aarch64__)
#include <sys/auxv.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <cstring>

#include "program.h"

namespace headway {
namespace {

#if defined(__x86_64__)
// Tiles for int8 and bfloat16 (CPUID leaf 7, EDX), the operating system's support of their state (XCR0), and its
// permission for this process, which Linux gives on request. Then they must give the bits of the vectors.
bool find_amx() {
    unsigned a = 7, b = 0, c = 0, d = 0;
    asm volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    if (!(d >> 24 & 1) || !(d >> 25 & 1) || !(d >> 22 & 1)) return false;
    a = 1, c = 0;
    asm volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    if (!(c >> 27 & 1)) return false;  // no XGETBV for programs
    asm volatile("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
    if ((a >> 17 & 3) != 3) return false;
#if defined(__linux__)
    constexpr long REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM
    if (syscall(SYS_arch_prctl, REQUEST, TILE_DATA) != 0) return false;
#endif
    return agree(amx_kernels, avx512_kernels);
}
#endif

}  // namespace

std::vector<const char*> available_kernels() {
    std::vector<const char*> names;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni") && avx2)
    {
        static const bool amx = find_amx();
        if (amx) names.push_back("amx");
        names.push_back("avx512");
    }
    // GCC 12 cannot be asked for AVX-VNNI by name: leaf 7.1, EAX bit 4.
    unsigned a = 0, b = 0, c = 0, d = 0;
    asm volatile("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(7), "c"(0));
    if (a >= 1) {
        asm volatile("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(7), "c"(1));
        if (avx2 && (a >> 4 & 1)) names.push_back("avx2_vnni");
    }
    if (avx2) names.push_back("avx2");
#elif defined(__aarch64__)
    const bool dot_product = getauxval(AT_HWCAP) >> 20 & 1, matrix_product = getauxval(AT_HWCAP2) >> 13 & 1;
    if (dot_product && matrix_product) names.push_back("neon_i8mm");
    if (dot_product) names.push_back("neon");
#endif
    names.push_back("scalar");
    return names;
}

const Kernels* find_kernels(const char* name) {
    for (const char* known : available_kernels()) {
        if (*name && std::strcmp(name, known) != 0) continue;
#if defined(__x86_64__)
        if (std::strcmp(known, "amx") == 0) return &amx_kernels;
        if (std::strcmp(known, "avx512") == 0) return &avx512_kernels;
        if (std::strcmp(known, "avx2_vnni") == 0) return &avx2_vnni_kernels;
        if (std::strcmp(known, "avx2") == 0) return &avx2_kernels;
#elif defined(__aarch64__)
        if (std::strcmp(known, "neon_i8mm") == 0) return &neon_i8mm_kernels;
        if (std::strcmp(known, "neon") == 0) return &neon_kernels;
#endif
        return &scalar_kernels;
    }
    return nullptr;
}

}  // namespace headway
