// Q4_0, Q4_1, Q5_0 and Q8_0 with AVX-VNNI.
#include "avxvnni.h"
#include "avxvnni_tables.h"
#include "vnni_small.h"

namespace dspine {

const Kernel kAvxVnniQ4_0 = vnni_small_kernel<VectorsAvxVnni, Small::q4_0>(Q4_0);
const Kernel kAvxVnniQ4_1 = vnni_small_kernel<VectorsAvxVnni, Small::q4_1>(Q4_1);
const Kernel kAvxVnniQ5_0 = vnni_small_kernel<VectorsAvxVnni, Small::q5_0>(Q5_0);
const Kernel kAvxVnniQ8_0 = vnni_eight_kernel<VectorsAvxVnni>();

}  // namespace dspine
