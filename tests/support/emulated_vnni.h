// What the instructions of the AVX512-VNNI and AVX-VNNI kernels do, lane by lane in plain C++, from Intel's
// Software Developer's Manual, volume 2. Included before a kernel file (-include) that is compiled for AVX2
// only, so that a processor without these instructions runs the kernels. One that is missing here does not
// compile: its own function needs the processor's flag.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

// A call each: inlined, the kernels' unrolled loops would take an hour to compile.
#define DSPINE_EMULATED_CALL [[gnu::noinline, maybe_unused]] static

namespace emulated {

template <class T>
struct Lanes {
    T at[64 / sizeof(T)];
};

template <class T, class From>
static inline Lanes<T> lanes(const From & x) {
    static_assert(sizeof(From) <= 64);
    Lanes<T> out{};
    std::memcpy(out.at, &x, sizeof x);
    return out;
}

template <class To, class T>
static inline To whole(const Lanes<T> & x) {
    To out;
    std::memcpy(&out, x.at, sizeof out);
    return out;
}

// each(i) for every lane of T in a result of type To.
template <class To, class T, class Each>
static inline To make(Each each) {
    Lanes<T> out{};
    for (unsigned i = 0; i < sizeof(To) / sizeof(T); i++) {
        out.at[i] = T(each(i));
    }
    return whole<To>(out);
}

// VPDPBUSD: four products of unsigned bytes of a and signed ones of b, added to the lane without saturation.
template <class V>
DSPINE_EMULATED_CALL V dpbusd(V sum, V a, V b) {
    const auto s = lanes<int32_t>(sum);
    const auto u = lanes<uint8_t>(a);
    const auto v = lanes<int8_t>(b);
    return make<V, int32_t>([&](unsigned i) {
        uint32_t total = uint32_t(s.at[i]);
        for (unsigned j = 4 * i; j < 4 * i + 4; j++) {
            total += uint32_t(int32_t(u.at[j]) * int32_t(v.at[j]));
        }
        return total;
    });
}

// VPDPWSSD: two products of signed 16-bit integers, added to the lane without saturation.
template <class V>
DSPINE_EMULATED_CALL V dpwssd(V sum, V a, V b) {
    const auto s = lanes<int32_t>(sum);
    const auto u = lanes<int16_t>(a), v = lanes<int16_t>(b);
    return make<V, int32_t>([&](unsigned i) {
        uint32_t total = uint32_t(s.at[i]);
        for (unsigned j = 2 * i; j < 2 * i + 2; j++) {
            total += uint32_t(int32_t(u.at[j]) * int32_t(v.at[j]));
        }
        return total;
    });
}

DSPINE_EMULATED_CALL __m512i zero() { return make<__m512i, int32_t>([](unsigned) { return 0; }); }

DSPINE_EMULATED_CALL __m512i madd(__m512i a, __m512i b) { return dpwssd(zero(), a, b); }

DSPINE_EMULATED_CALL __m512i load(const void * from) {
    __m512i out;
    std::memcpy(&out, from, sizeof out);
    return out;
}

template <class T>
DSPINE_EMULATED_CALL __m512i repeat(T x) {
    return make<__m512i, T>([&](unsigned) { return x; });
}

DSPINE_EMULATED_CALL __m512 repeat_float(float x) {
    return make<__m512, float>([&](unsigned) { return x; });
}

template <class Each>
DSPINE_EMULATED_CALL __m512i bits(__m512i a, __m512i b, Each each) {
    const auto x = lanes<uint64_t>(a), y = lanes<uint64_t>(b);
    return make<__m512i, uint64_t>([&](unsigned i) { return each(x.at[i], y.at[i]); });
}

DSPINE_EMULATED_CALL __m512i both(__m512i a, __m512i b) {
    return bits(a, b, [](uint64_t x, uint64_t y) { return x & y; });
}

// VPTERNLOGD: bit 4 x + 2 y + z of the table for bits x, y and z of a, b and c.
DSPINE_EMULATED_CALL __m512i three(__m512i a, __m512i b, __m512i c, unsigned table) {
    const auto x = lanes<uint32_t>(a), y = lanes<uint32_t>(b), z = lanes<uint32_t>(c);
    return make<__m512i, uint32_t>([&](unsigned i) {
        uint32_t out = 0;
        for (unsigned bit = 0; bit < 32; bit++) {
            const unsigned place = (x.at[i] >> bit & 1) << 2 | (y.at[i] >> bit & 1) << 1 | (z.at[i] >> bit & 1);
            out |= uint32_t(table >> place & 1) << bit;
        }
        return out;
    });
}

DSPINE_EMULATED_CALL __m512i differ(__m512i a, __m512i b) {
    return bits(a, b, [](uint64_t x, uint64_t y) { return x ^ y; });
}

DSPINE_EMULATED_CALL __m512i add32(__m512i a, __m512i b) {
    const auto x = lanes<uint32_t>(a), y = lanes<uint32_t>(b);
    return make<__m512i, uint32_t>([&](unsigned i) { return x.at[i] + y.at[i]; });
}

DSPINE_EMULATED_CALL __m512i mullo(__m512i a, __m512i b) {
    const auto x = lanes<uint32_t>(a), y = lanes<uint32_t>(b);
    return make<__m512i, uint32_t>([&](unsigned i) { return x.at[i] * y.at[i]; });
}

template <class T>
DSPINE_EMULATED_CALL __m512i left(__m512i a, unsigned by) {
    const auto x = lanes<T>(a);
    return make<__m512i, T>([&](unsigned i) { return by < 8 * sizeof(T) ? uint32_t(x.at[i]) << by : 0u; });
}

template <class T>
DSPINE_EMULATED_CALL __m512i right(__m512i a, unsigned by) {
    const auto x = lanes<T>(a);
    return make<__m512i, T>([&](unsigned i) { return by < 8 * sizeof(T) ? uint32_t(x.at[i]) >> by : 0u; });
}

// Wider integers of the first ones of a shorter vector.
template <class To, class From, class Short>
DSPINE_EMULATED_CALL __m512i widen(Short from) {
    const auto x = lanes<From>(from);
    return make<__m512i, To>([&](unsigned i) { return x.at[i]; });
}

DSPINE_EMULATED_CALL __m512 halves(__m256i from) {
    const auto x = lanes<uint16_t>(from);
    return make<__m512, float>([&](unsigned i) { return _cvtsh_ss(x.at[i]); });
}

DSPINE_EMULATED_CALL __m512 to_float(__m512i from) {
    const auto x = lanes<int32_t>(from);
    return make<__m512, float>([&](unsigned i) { return float(x.at[i]); });
}

template <class Each>
DSPINE_EMULATED_CALL __m512 floats(__m512 a, __m512 b, __m512 c, Each each) {
    const auto x = lanes<float>(a), y = lanes<float>(b), z = lanes<float>(c);
    return make<__m512, float>([&](unsigned i) { return each(x.at[i], y.at[i], z.at[i]); });
}

DSPINE_EMULATED_CALL __m512 multiply(__m512 a, __m512 b) {
    return floats(a, b, b, [](float x, float y, float) { return x * y; });
}

DSPINE_EMULATED_CALL __m512 multiply_add(__m512 a, __m512 b, __m512 c) {
    return floats(a, b, c, [](float x, float y, float z) { return std::fma(x, y, z); });
}

template <class To, class From>
DSPINE_EMULATED_CALL To same_bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To out;
    std::memcpy(&out, &from, sizeof out);
    return out;
}

// Lanes whose bit of the mask is 0 become 0.
template <class V>
DSPINE_EMULATED_CALL V masked(__mmask16 mask, V x) {
    const auto from = lanes<int32_t>(x);
    return make<V, int32_t>([&](unsigned i) { return (mask >> i & 1) != 0 ? from.at[i] : 0; });
}

DSPINE_EMULATED_CALL void store(void * to, __mmask16 mask, __m512 x) {
    const auto from = lanes<float>(x);
    for (unsigned i = 0; i < 16; i++) {
        if ((mask >> i & 1) != 0) {
            std::memcpy(static_cast<char *>(to) + 4 * i, &from.at[i], 4);
        }
    }
}

// Pairs of T from each 128 bits of a and b in turn: those at `first` and after it.
template <class V, class T>
DSPINE_EMULATED_CALL V unpack(V a, V b, bool high) {
    constexpr unsigned each = 16 / sizeof(T);
    const auto         x = lanes<T>(a), y = lanes<T>(b);
    return make<V, T>([&](unsigned i) {
        const unsigned from = i / each * each + i % each / 2 + (high ? each / 2 : 0);
        return i % 2 == 0 ? x.at[from] : y.at[from];
    });
}

// VPERMW: for each 16-bit part the one of x that its index names.
DSPINE_EMULATED_CALL __m512i permute16(__m512i index, __m512i x) {
    const auto from = lanes<uint16_t>(x), at = lanes<uint16_t>(index);
    return make<__m512i, uint16_t>([&](unsigned i) { return from.at[at.at[i] & 31]; });
}

// VINSERTF64X4, VEXTRACTF64X4, VBROADCASTF64X4.
DSPINE_EMULATED_CALL __m512d insert(__m512d into, __m256d x, unsigned half) {
    std::memcpy(reinterpret_cast<char *>(&into) + 32 * half, &x, sizeof x);
    return into;
}

DSPINE_EMULATED_CALL __m256d extract(__m512d from, unsigned half) {
    __m256d x;
    std::memcpy(&x, reinterpret_cast<const char *>(&from) + 32 * half, sizeof x);
    return x;
}

DSPINE_EMULATED_CALL __m512d twice(__m256d x) { return insert(insert(__m512d{}, x, 0), x, 1); }

// VINSERTF32X4.
DSPINE_EMULATED_CALL __m512 insert_four(__m512 into, __m128 x, unsigned quarter) {
    std::memcpy(reinterpret_cast<char *>(&into) + 16 * quarter, &x, sizeof x);
    return into;
}

DSPINE_EMULATED_CALL __mmask16 greater(__m512 a, __m512 b, int how) {
    if (how != _CMP_GT_OQ) {
        std::abort();
    }
    const auto x = lanes<float>(a), y = lanes<float>(b);
    unsigned   mask = 0;
    for (unsigned i = 0; i < 16; i++) {
        mask |= unsigned(x.at[i] > y.at[i]) << i;
    }
    return __mmask16(mask);
}

// A mask of eight bits, for lanes of 64.
template <class V>
DSPINE_EMULATED_CALL V masked_doubles(__mmask8 mask, V x) {
    const auto from = lanes<int64_t>(x);
    return make<V, int64_t>([&](unsigned i) { return (mask >> i & 1) != 0 ? from.at[i] : 0; });
}

}  // namespace emulated

#define _mm256_dpbusd_avx_epi32(sum, a, b) emulated::dpbusd<__m256i>(sum, a, b)
#define _mm256_dpwssd_avx_epi32(sum, a, b) emulated::dpwssd<__m256i>(sum, a, b)
#define _mm512_dpbusd_epi32(sum, a, b) emulated::dpbusd<__m512i>(sum, a, b)
#define _mm512_dpwssd_epi32(sum, a, b) emulated::dpwssd<__m512i>(sum, a, b)
#define _mm512_madd_epi16(a, b) emulated::madd(a, b)
#define _mm512_loadu_si512(from) emulated::load(from)
#define _mm512_setzero_si512() emulated::zero()
#define _mm512_set1_epi8(x) emulated::repeat<int8_t>(x)
#define _mm512_set1_epi32(x) emulated::repeat<int32_t>(x)
#define _mm512_and_si512(a, b) emulated::both(a, b)
#define _mm512_ternarylogic_epi32(a, b, c, table) emulated::three(a, b, c, table)
#define _mm512_xor_si512(a, b) emulated::differ(a, b)
#define _mm512_add_epi32(a, b) emulated::add32(a, b)
#define _mm512_slli_epi16(x, by) emulated::left<uint16_t>(x, by)
#define _mm512_srli_epi16(x, by) emulated::right<uint16_t>(x, by)
#define _mm512_maskz_slli_epi32(mask, x, by) emulated::masked(mask, emulated::left<uint32_t>(x, by))
#define _mm512_maskz_cvtepi8_epi32(mask, x) emulated::masked(mask, emulated::widen<int32_t, int8_t>(x))
#define _mm512_maskz_cvtepu8_epi32(mask, x) emulated::masked(mask, emulated::widen<int32_t, uint8_t>(x))
#define _mm512_maskz_cvtepu16_epi32(mask, x) emulated::masked(mask, emulated::widen<int32_t, uint16_t>(x))
#define _mm512_cvtepi8_epi16(x) emulated::widen<int16_t, int8_t>(x)
#define _mm512_setzero_ps() emulated::repeat_float(0.0f)
#define _mm512_set1_ps(x) emulated::repeat_float(x)
#define _mm512_mul_ps(a, b) emulated::multiply(a, b)
#define _mm512_fmadd_ps(a, b, c) emulated::multiply_add(a, b, c)
#define _mm512_maskz_cvtepi32_ps(mask, x) emulated::masked(mask, emulated::to_float(x))
#define _mm512_maskz_cvtph_ps(mask, x) emulated::masked(mask, emulated::halves(x))
#define _mm512_castsi512_ps(x) emulated::same_bits<__m512>(x)
#define _mm512_castps_si512(x) emulated::same_bits<__m512i>(x)
#define _mm512_mask_storeu_ps(to, mask, x) emulated::store(to, mask, x)
#define _mm512_loadu_ps(from) emulated::same_bits<__m512>(emulated::load(from))
#define _mm512_storeu_ps(to, x) emulated::store(to, 0xFFFF, x)
#define _mm512_add_ps(a, b) emulated::floats(a, b, b, [](float x, float y, float) { return x + y; })
#define _mm512_sub_ps(a, b) emulated::floats(a, b, b, [](float x, float y, float) { return x - y; })
#define _mm512_maskz_mul_ps(mask, a, b) emulated::masked(mask, emulated::multiply(a, b))
#define _mm512_maskz_max_ps(mask, a, b) \
    emulated::masked(mask, emulated::floats(a, b, b, [](float x, float y, float) { return x > y ? x : y; }))
#define _mm512_maskz_add_epi32(mask, a, b) emulated::masked(mask, emulated::add32(a, b))
#define _mm512_cmp_ps_mask(a, b, how) emulated::greater(a, b, how)
#define _mm512_castps_pd(x) emulated::same_bits<__m512d>(x)
#define _mm512_castpd_ps(x) emulated::same_bits<__m512>(x)
#define _mm512_castps256_ps512(x) emulated::same_bits<__m512>(emulated::insert(__m512d{}, _mm256_castps_pd(x), 0))
#define _mm512_castps128_ps512(x) emulated::same_bits<__m512>(emulated::insert_four(__m512{}, x, 0))
#define _mm512_maskz_insertf32x4(mask, a, b, quarter) emulated::masked(mask, emulated::insert_four(a, b, quarter))
#define _mm512_maskz_unpacklo_ps(mask, a, b) emulated::masked(mask, emulated::unpack<__m512, float>(a, b, false))
#define _mm512_maskz_unpackhi_ps(mask, a, b) emulated::masked(mask, emulated::unpack<__m512, float>(a, b, true))
#define _mm512_maskz_unpacklo_pd(mask, a, b) emulated::masked_doubles(mask, emulated::unpack<__m512d, double>(a, b, false))
#define _mm512_maskz_unpackhi_pd(mask, a, b) emulated::masked_doubles(mask, emulated::unpack<__m512d, double>(a, b, true))
#define _mm512_maskz_insertf64x4(mask, a, b, half) emulated::masked_doubles(mask, emulated::insert(a, b, half))
#define _mm512_maskz_extractf64x4_pd(mask, x, half) emulated::masked_doubles(mask, emulated::extract(x, half))
#define _mm512_maskz_broadcast_f64x4(mask, x) emulated::masked_doubles(mask, emulated::twice(x))
#define _mm512_storeu_si512(to, x) emulated::store(to, 0xFFFF, emulated::same_bits<__m512>(x))
#define _mm512_maskz_permutexvar_epi16(mask, index, x) ((void)(mask), emulated::permute16(index, x))
#define _mm512_mullo_epi32(a, b) emulated::mullo(a, b)
