// The kernel families of this build.
#pragma once

#include "kernel.h"

namespace dspine {

// The index-th family that this processor can run, the one for the newest processors first; null after the last.
const Family * family_here(int index);

// The family of this key if this processor can run it, else null.
const Family * family_called(const char * key);

}  // namespace dspine
