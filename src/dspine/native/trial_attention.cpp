// Times an attention of a family without plugging it in.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "api.h"
#include "families.h"
#include "trial.h"

namespace dspine {

namespace {

size_t row_bytes(int type, int64_t width) {
    return type == Q8_0 ? size_t(width / 32 * 34) : size_t(width) * (type == F32 ? 4 : 2);
}

// Arbitrary numbers of about 1 in size.
void fill(int type, uint8_t * to, size_t bytes, uint32_t & state) {
    if (type == Q8_0) {
        for (size_t i = 0; i < bytes; i++) {
            to[i] = i % 34 == 0 ? 0 : i % 34 == 1 ? 0x20 : uint8_t(next(state));
        }
    } else if (type == F32) {
        for (size_t i = 0; i < bytes / sizeof(float); i++) {
            reinterpret_cast<float *>(to)[i] = float(next(state) % 4001) / 1000.0f - 2.0f;
        }
    } else {
        const unsigned least = type == F16 ? 0x3000 : 0x3E00, range = type == F16 ? 0x1000 : 0x200;
        for (size_t i = 0; i < bytes / 2; i++) {
            reinterpret_cast<uint16_t *>(to)[i] = uint16_t((least + next(state) % range) | (next(state) & 1) << 15);
        }
    }
}

Tensor tensor(int type, void * data, int64_t width, int64_t second, int64_t third) {
    Tensor t{};
    t.type  = type;
    t.data  = data;
    t.ne[0] = width, t.ne[1] = second, t.ne[2] = third, t.ne[3] = 1;
    t.nb[0] = type == Q8_0 ? 34 : type == F32 ? 4 : 2;
    t.nb[1] = row_bytes(type, width);
    t.nb[2] = t.nb[1] * size_t(second);
    t.nb[3] = t.nb[2] * size_t(third);
    return t;
}

struct Operand {
    std::vector<uint8_t> bytes;
    Tensor               tensor;

    Operand(int type, int64_t width, int64_t second, int64_t third, uint32_t & state) {
        const size_t size = row_bytes(type, width) * size_t(second * third);
        uint8_t *    data = aligned(bytes, size);
        fill(type, data, size, state);
        tensor = dspine::tensor(type, data, width, second, third);
    }
};

}  // namespace

}  // namespace dspine

// Seconds of one thread that an attention takes, the best of `repeats`, and its result (rows x heads x width).
// Each row sees one key more than the one before, and some not the first keys. Below 0: this machine or the
// family cannot compute it.
extern "C" DSPINE_API double dspine_kernels_trial_attention(const char * family, int cache, int64_t heads,
                                                                                        int64_t shared, int64_t rows, int64_t keys,
                                                                                        int64_t width, int repeats, float * result) {
    using namespace dspine;
    const Family * found = family_called(family);
    if (found == nullptr || shared < 1 || heads % shared != 0 || keys < rows) {
        return -1.0;
    }
    uint32_t state = 1;
    Operand  q(F32, width, rows, heads, state), k(cache, width, keys, heads / shared, state), v(cache, width, keys, heads / shared, state);
    std::vector<uint16_t> hidden(size_t(rows * keys), 0xFC00);
    for (int64_t row = 0; row < rows; row++) {
        std::fill(hidden.begin() + row * keys + std::min<int64_t>(row % 3, keys - rows), hidden.begin() + row * keys + keys - rows + row + 1,
                  uint16_t(0));
    }
    Tensor      mask  = tensor(F16, hidden.data(), keys, rows, 1);
    Tensor      op    = tensor(F32, result, width, heads, rows);
    const float scale = 1.0f / std::sqrt(float(width));
    std::memcpy(op.op_params, &scale, sizeof scale);
    op.src[0] = &q.tensor, op.src[1] = &k.tensor, op.src[2] = &v.tensor, op.src[3] = &mask;
    if (!found->attention->takes(&op)) {
        return -1.0;
    }
    std::vector<uint8_t> memory;
    uint8_t *            work = aligned(memory, found->attention->work_bytes(&op));
    const Params         params{0, 1, 0, nullptr, nullptr, false};
    double               best = HUGE_VAL;
    for (int repeat = 0; repeat < repeats; repeat++) {
        const double began = seconds_now();
        found->attention->compute(&params, &op, work);
        best = std::min(best, seconds_now() - began);
    }
    return best;
}
