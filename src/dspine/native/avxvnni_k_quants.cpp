// Q4_K, Q5_K and Q6_K with AVX-VNNI.
#include "avxvnni.h"
#include "avxvnni_tables.h"
#include "vnni_k_quants.h"

namespace dspine {

const Kernel kAvxVnniQ4_K = vnni_k_kernel<VectorsAvxVnni, KQuant::q4_k>(Q4_K);
const Kernel kAvxVnniQ5_K = vnni_k_kernel<VectorsAvxVnni, KQuant::q5_k>(Q5_K);
const Kernel kAvxVnniQ6_K = vnni_k_kernel<VectorsAvxVnni, KQuant::q6_k>(Q6_K);

}  // namespace dspine
