// FLASH_ATTN_EXT with AVX2.
#include "attention.h"
#include "avx2_tables.h"

namespace dspine {

const Attention kAvx2Attention = {takes, work_bytes, compute<Eight>};

}  // namespace dspine
