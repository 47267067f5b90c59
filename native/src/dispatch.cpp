// Which instruction set runs: asked of the processor once, or named by the caller.
#if defined(__aarch64__)
#include <sys/auxv.h>
#endif

#include <cstring>

#include "program.h"

namespace headway {

std::vector<const char*> available_kernels() {
    std::vector<const char*> names;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni") && avx2)
        names.push_back("avx512");
    // GCC 12 cannot be asked for AVX-VNNI by name: leaf 7.1, EAX bit 4.
    unsigned a = 0, b = 0, c = 0, d = 0;
    asm volatile("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(7), "c"(0));
    if (a >= 1) {
        asm volatile("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(7), "c"(1));
        if (avx2 && (a >> 4 & 1)) names.push_back("avx2_vnni");
    }
    if (avx2) names.push_back("avx2");
#elif defined(__aarch64__)
    if (getauxval(AT_HWCAP) >> 20 & 1) names.push_back("neon");  // HWCAP_ASIMDDP: the dot product
#endif
    names.push_back("scalar");
    return names;
}

const Kernels* find_kernels(const char* name) {
    for (const char* known : available_kernels()) {
        if (*name && std::strcmp(name, known) != 0) continue;
#if defined(__x86_64__)
        if (std::strcmp(known, "avx512") == 0) return &avx512_kernels;
        if (std::strcmp(known, "avx2_vnni") == 0) return &avx2_vnni_kernels;
        if (std::strcmp(known, "avx2") == 0) return &avx2_kernels;
#elif defined(__aarch64__)
        if (std::strcmp(known, "neon") == 0) return &neon_kernels;
#endif
        return &scalar_kernels;
    }
    return nullptr;
}

}  // namespace headway
