// Inputs of a product as the kernels take them.
#pragma once

#include <cstdint>

namespace dspine {

// 32 inputs of one row as 8-bit integers of at most 127 in size. With e = 0 for the inputs whose
// index modulo 4 is 0 or 1 and e = 1 for the others, input = row * factor[e] * q: so each 16 inputs
// have a scale of their own, which the instruction that adds up neighbours multiplies in at no cost.
struct Inputs8 {
    float   row;        // scale of the whole row
    int16_t factor[2];  // 1 to kMostFactor
    float   sum;        // of factor * q, all 32
    float   half[2];    // of the first and the last 16
    int8_t  q[32];
};

// The same in the order in which lanes hold inputs of one factor (`Lanes::by_factor`), each factor in the
// lower half of 32 bits.
struct Inputs8ByFactor {
    float   row;
    float   sum;
    float   half[2];
    int32_t factor[2];
    int8_t  q[32];
};

// The largest that keeps the sums of 16 products with 6-bit weights within 32 bits
// (63 * 127 * 16 * 16384 < 2^31), and of 32 with 5-bit ones.
constexpr float kMostFactor = 16383.0f;

// 32 inputs of one row as 16-bit integers.
struct Inputs16 {
    float   scale;
    int16_t q[32];
};

void prepare8(const float * input, int64_t inputs, uint8_t * prepared);
void prepare8_by_factor(const float * input, int64_t inputs, uint8_t * prepared);
void prepare16(const float * input, int64_t inputs, uint8_t * prepared);

}  // namespace dspine
