// The vectors of the AVX512-VNNI family: a panel of 16 outputs is one register. Every instruction that the
// family uses beyond AVX2 stands here, in avx512_float.cpp or in avx512_attention.cpp.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace dspine {

namespace {

struct Vectors512 {
    using Int   = __m512i;
    using Float = __m512;
    static constexpr int kLanes = 16, kParts = 1;
    // Rows that share one pass over a panel: two sums and a result of each of eight fill three quarters of the
    // registers, decoded weights need few.
    static constexpr int    kMostRows = 8, kFewerRows = 8;
    static constexpr size_t kFetchAhead = 2048, kFetchFar = 8192;

    // GCC 12 warns of values that its own header leaves open in the forms without a mask.
    static constexpr __mmask16 kAll = 0xFFFF;

    // 512-bit integers; those with a number of bits in the name act on parts of that size.
    static Int load(const void * from) { return _mm512_loadu_si512(from); }
    static Int nothing() { return _mm512_setzero_si512(); }
    static Int bytes(int x) { return _mm512_set1_epi8(char(x)); }
    static Int both(Int a, Int b) { return _mm512_and_si512(a, b); }
    // a | (b & mask)
    static Int either_part(Int a, Int b, Int mask) { return _mm512_ternarylogic_epi32(a, b, mask, 0xF8); }
    static Int plus(Int a, Int b) { return _mm512_add_epi32(a, b); }

    static Int repeat32(const void * from) {
        int32_t value;
        std::memcpy(&value, from, sizeof value);
        return _mm512_set1_epi32(value);
    }

    // Shifts of 16-bit parts.
    template <int bits>
    static Int left(Int x) {
        return _mm512_slli_epi16(x, bits);
    }
    template <int bits>
    static Int right(Int x) {
        return _mm512_srli_epi16(x, bits);
    }

    // sum + four products of unsigned and signed bytes; sum + two products of 16-bit integers; the two alone.
    static Int dot8(Int sum, Int a, Int b) { return _mm512_dpbusd_epi32(sum, a, b); }
    static Int dot16(Int sum, Int a, Int b) { return _mm512_dpwssd_epi32(sum, a, b); }
    static Int pairs(Int a, Int b) { return _mm512_madd_epi16(a, b); }

    // The same, with the four bytes or two 16-bit integers at `b` repeated to all lanes. The compiler would load
    // them into a register of their own each, and the processor runs out of those that wait.
    static Int dot8(Int sum, Int a, const void * b) {
#ifdef DSPINE_EMULATED
        return dot8(sum, a, repeat32(b));
#else
        asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(a), "m"(*static_cast<const Word *>(b)));
        return sum;
#endif
    }
    static Int dot16(Int sum, Int a, const void * b) {
#ifdef DSPINE_EMULATED
        return dot16(sum, a, repeat32(b));
#else
        asm("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(a), "m"(*static_cast<const Word *>(b)));
        return sum;
#endif
    }

    // 16 bytes as 32-bit, 32 bytes as 16-bit integers.
    static Int signed_bytes(const uint8_t * from) { return _mm512_maskz_cvtepi8_epi32(kAll, eights(from)); }
    static Int unsigned_bytes(const uint8_t * from) { return _mm512_maskz_cvtepu8_epi32(kAll, eights(from)); }
    // 32 16-bit parts: the first of either half, the second of either half and so on.
    static Int halves_in_turn(const uint8_t * from) {
        return _mm512_maskz_permutexvar_epi16(0xFFFFFFFF, load(kInTurn), load(from));
    }
    static Int times256(Int x) { return _mm512_maskz_slli_epi32(kAll, x, 8); }
    static Int widen_bytes(const uint8_t * from) { return _mm512_cvtepi8_epi16(halves(from)); }

    static Float zero() { return _mm512_setzero_ps(); }
    static Float repeat(float x) { return _mm512_set1_ps(x); }
    static Float times(Float a, Float b) { return _mm512_mul_ps(a, b); }
    static Float add_product(Float a, Float b, Float sum) { return _mm512_fmadd_ps(a, b, sum); }
    static Float to_float(Int x) { return _mm512_maskz_cvtepi32_ps(kAll, x); }
    static Float negative(Float x) {
        return _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(x), _mm512_set1_epi32(INT32_MIN)));
    }

    // 16 floats of 16 bits, of the usual form or the upper halves of fp32.
    static Float wide(__m256i from) { return _mm512_maskz_cvtph_ps(kAll, from); }
    static Float half_floats(const void * from) { return wide(halves(from)); }
    static Float brain_floats(const void * from) {
        return _mm512_castsi512_ps(_mm512_maskz_slli_epi32(kAll, _mm512_maskz_cvtepu16_epi32(kAll, halves(from)), 16));
    }

    static void store(float * to, const Float (&value)[kParts], int outputs) {
        _mm512_mask_storeu_ps(to, __mmask16((1u << outputs) - 1), value[0]);
    }

  private:
    typedef int32_t Word __attribute__((may_alias));

    static constexpr uint16_t kInTurn[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                             8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};

    static __m128i eights(const void * from) { return _mm_loadu_si128(static_cast<const __m128i *>(from)); }
    static __m256i halves(const void * from) { return _mm256_loadu_si256(static_cast<const __m256i *>(from)); }
};

}  // namespace

}  // namespace dspine
