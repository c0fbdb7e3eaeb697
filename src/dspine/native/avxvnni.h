// The vectors of the AVX-VNNI family: AVX2 and the VNNI instructions on 256 bits. The two that AVX2 lacks
// stand here.
#pragma once

#include "avx2.h"

namespace dspine {

namespace {

struct VectorsAvxVnni : Vectors256 {
    using Int = __m256i;
    // A part of a panel at a time: two sums of each of six rows leave four registers. Types of
    // five bits take more of them to decode.
    static constexpr int kMostRows = 6, kFewerRows = 4;

    static Int load(const void * from) { return dspine::load(from); }
    static Int nothing() { return _mm256_setzero_si256(); }
    static Int bytes(int x) { return _mm256_set1_epi8(char(x)); }
    static Int both(Int a, Int b) { return _mm256_and_si256(a, b); }
    static Int either_part(Int a, Int b, Int mask) { return _mm256_or_si256(a, both(b, mask)); }
    static Int plus(Int a, Int b) { return _mm256_add_epi32(a, b); }
    static Int repeat32(const void * from) { return dspine::repeat32(from); }

    // Shifts of 16-bit parts.
    template <int bits>
    static Int left(Int x) {
        return _mm256_slli_epi16(x, bits);
    }
    template <int bits>
    static Int right(Int x) {
        return _mm256_srli_epi16(x, bits);
    }

    // sum + four products of unsigned and signed bytes; sum + two products of 16-bit integers.
    static Int dot8(Int sum, Int a, Int b) { return _mm256_dpbusd_avx_epi32(sum, a, b); }
    static Int dot16(Int sum, Int a, Int b) { return _mm256_dpwssd_avx_epi32(sum, a, b); }

    // The same, with the four bytes or two 16-bit integers at `b` repeated to all lanes.
    static Int dot8(Int sum, Int a, const void * b) { return dot8(sum, a, repeat32(b)); }
    static Int dot16(Int sum, Int a, const void * b) { return dot16(sum, a, repeat32(b)); }

    // 8 bytes as 32-bit, 16 bytes as 16-bit integers.
    static Int signed_bytes(const uint8_t * from) { return _mm256_cvtepi8_epi32(eights(from)); }
    static Int unsigned_bytes(const uint8_t * from) { return _mm256_cvtepu8_epi32(eights(from)); }
    static Int widen_bytes(const uint8_t * from) {
        return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
    }

    static Float add_product(Float a, Float b, Float sum) { return _mm256_fmadd_ps(a, b, sum); }
    static Float to_float(Int x) { return _mm256_cvtepi32_ps(x); }
    static Float negative(Float x) { return _mm256_xor_ps(x, _mm256_set1_ps(-0.0f)); }
    static Float half_floats(const void * from) { return load_half(from); }

  private:
    static __m128i eights(const uint8_t * from) { return _mm_loadl_epi64(reinterpret_cast<const __m128i *>(from)); }
};

}  // namespace

}  // namespace dspine
