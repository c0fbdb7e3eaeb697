// Q4_0, Q4_1, Q5_0 and Q8_0 with AVX512-VNNI.
#include "avx512.h"
#include "avx512_tables.h"
#include "vnni_small.h"

namespace dspine {

const Kernel kAvx512Q4_0 = vnni_small_kernel<Vectors512, Small::q4_0>(Q4_0);
const Kernel kAvx512Q4_1 = vnni_small_kernel<Vectors512, Small::q4_1>(Q4_1);
const Kernel kAvx512Q5_0 = vnni_small_kernel<Vectors512, Small::q5_0>(Q5_0);
const Kernel kAvx512Q8_0 = vnni_eight_kernel<Vectors512>();

}  // namespace dspine
