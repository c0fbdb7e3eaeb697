// Q4_K, Q5_K and Q6_K with AVX512-VNNI.
#include "avx512.h"
#include "avx512_tables.h"
#include "vnni_k_quants.h"

namespace dspine {

const Kernel kAvx512Q4_K = vnni_k_kernel<Vectors512, KQuant::q4_k>(Q4_K);
const Kernel kAvx512Q5_K = vnni_k_kernel<Vectors512, KQuant::q5_k>(Q5_K);
const Kernel kAvx512Q6_K = vnni_k_kernel<Vectors512, KQuant::q6_k>(Q6_K);

}  // namespace dspine
