#include "families.h"

#include <cstring>

namespace dspine {

const Family * family_here(int index) {
    // A compiler that does not know the instructions of a family builds the others.
    static const Family * const families[] = {
#ifndef DSPINE_WITHOUT_AMX
        &amx_family(),
#endif
#ifndef DSPINE_WITHOUT_AVX512
        &avx512_family(),
#endif
#ifndef DSPINE_WITHOUT_AVXVNNI
        &avxvnni_family(),
#endif
        &avx2_family(),
    };
    for (const Family * family : families) {
        if (family->runs_here() && index-- == 0) {
            return family;
        }
    }
    return nullptr;
}

const Family * family_called(const char * key) {
    for (int i = 0;; i++) {
        const Family * family = family_here(i);
        if (family == nullptr || std::strcmp(family->key, key) == 0) {
            return family;
        }
    }
}

}  // namespace dspine
