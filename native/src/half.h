// Half precision, scalar.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace headway {

inline uint16_t to_half(float value) {  // to nearest, ties to even; the callers keep finite values inside the range
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    uint32_t sign = bits >> 16 & 0x8000;
    int32_t exponent = (int32_t)(bits >> 23 & 0xff) - 112;
    uint32_t mantissa = bits & 0x7fffff;
    if (std::isnan(value)) return 0x7e00;
    if (exponent >= 31) return (uint16_t)(sign | (std::isinf(value) ? 0x7c00 : 0x7bff));
    if (exponent <= 0) {
        if (exponent < -10) return (uint16_t)sign;
        mantissa |= 0x800000;
        int shift = 14 - exponent;
        uint32_t half = mantissa >> shift, rest = mantissa & ((1u << shift) - 1), middle = 1u << (shift - 1);
        half += rest > middle || (rest == middle && (half & 1));
        return (uint16_t)(sign | half);
    }
    uint32_t half = (uint32_t)exponent << 10 | mantissa >> 13, rest = mantissa & 0x1fff;
    half += rest > 0x1000 || (rest == 0x1000 && (half & 1));
    return (uint16_t)(sign | half);
}

inline float from_half(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff;
    float out;
    uint32_t bits;
    if (rest < 0x0400)  // zero and subnormals: rest x 2^-24, exact
        out = (float)rest * 0x1p-24f;
    else
        bits = rest >= 0x7c00 ? rest << 13 | 0x7f800000u : (rest << 13) + (112u << 23), std::memcpy(&out, &bits, 4);
    std::memcpy(&bits, &out, 4);
    bits |= sign;
    std::memcpy(&out, &bits, 4);
    return out;
}

}  // namespace headway
