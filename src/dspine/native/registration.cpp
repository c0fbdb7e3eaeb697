// The buffer type that llama.cpp finds first among the CPU's extra ones, and the operations it takes.
#include <cstring>
#include <map>
#include <memory>
#include <vector>

#include "api.h"
#include "families.h"
#include "lookup.h"
#include "memory.h"
#include "packing.h"
#include "product.h"
#include "top_k.h"

namespace dspine {

namespace {

constexpr size_t kAlignment = 64;

// Addresses in the stock library, and numbers that differ between its versions.
struct Host {
    std::vector<BufferType *> * extra_types;
    Buffer * (*buffer_init)(BufferType *, BufferCalls, void *, size_t);
    Barrier barrier;
    void *  cpu_device;
    const FileType * (*type_of)(int);
    int     op_mul_mat;
    int     op_attention;
    int     op_get_rows;
    int     op_top_k;  // negative where the library has no such operation
};

struct State {
    Host                                    host;
    const Family *                          family;
    std::map<int, std::unique_ptr<Product>> products;  // by weight type
    std::map<int, std::unique_ptr<Lookup>>  lookups;
    BufferType                              type;
    bool                                    products_on, attention_on, top_k_on;
};

State * g_state = nullptr;  // made once, never freed: the library keeps pointers into it

bool is_ours(const Tensor * t) { return t != nullptr && t->buffer != nullptr && t->buffer->type == &g_state->type; }

// The packed matrix behind `t`, which may be a view of some of its rows.
const Tensor * owner_of(const Tensor * t) { return t->view_src == nullptr ? t : t->view_src; }

Product * product_of(const Tensor * weight) {
    return static_cast<Product *>(static_cast<Operation *>(owner_of(weight)->extra));
}

// What packs and multiplies a weight of this type and shape, or null: then it lies as in the file.
Product * product_for(const Tensor * weight) {
    const auto found = g_state->products.find(weight->type);
    if (found == g_state->products.end() || weight->ne[0] % found->second->kernel().unit_inputs != 0 ||
        weight->ne[2] != 1 || weight->ne[3] != 1) {
        return nullptr;
    }
    return found->second.get();
}

// What looks rows up in a packed matrix, or null.
Lookup * lookup_in(const Tensor * table) {
    const auto found = g_state->lookups.find(owner_of(table)->type);
    return found == g_state->lookups.end() ? nullptr : found->second.get();
}

// Views must be whole rows, in order.
bool is_row_range(const Tensor * view) {
    const Tensor * owner = owner_of(view);
    return view->ne[0] == owner->ne[0] && view->nb[1] == owner->nb[1] && view->view_offs % owner->nb[1] == 0;
}

// Buffers.

void free_buffer(Buffer * buffer) { give_back(buffer->context, buffer->size); }

void * get_base(Buffer * buffer) { return buffer->context; }

int init_tensor(Buffer *, Tensor * tensor) {
    if (tensor->view_src == nullptr) {
        Operation * product = product_for(tensor);
        tensor->extra       = product;
    }
    return 0;
}

void memset_tensor(Buffer *, Tensor * tensor, uint8_t value, size_t offset, size_t size) {
    const std::vector<uint8_t> bytes(size, value);
    if (const Product * product = product_of(tensor)) {
        pack_bytes(product->kernel(), tensor->ne[0], bytes.data(), offset, size, static_cast<uint8_t *>(tensor->data));
    } else {
        std::memset(static_cast<char *>(tensor->data) + offset, value, size);
    }
}

void set_tensor(Buffer *, Tensor * tensor, const void * data, size_t offset, size_t size) {
    if (const Product * product = product_of(tensor)) {
        pack_bytes(product->kernel(), tensor->ne[0], static_cast<const uint8_t *>(data), offset, size,
                   static_cast<uint8_t *>(tensor->data));
    } else {
        std::memcpy(static_cast<char *>(tensor->data) + offset, data, size);
    }
}

void get_tensor(Buffer *, const Tensor * tensor, void * data, size_t offset, size_t size) {
    if (const Product * product = product_of(tensor)) {
        unpack_bytes(product->kernel(), tensor->ne[0], static_cast<const uint8_t *>(tensor->data), offset, size,
                     static_cast<uint8_t *>(data));
    } else {
        std::memcpy(data, static_cast<const char *>(tensor->data) + offset, size);
    }
}

bool cpy_tensor(Buffer *, const Tensor *, Tensor *) { return false; }

void clear(Buffer * buffer, uint8_t value) { std::memset(buffer->context, value, buffer->size); }

const char * get_name(BufferType *) { return "DSPINE"; }

Buffer * alloc_buffer(BufferType * type, size_t size) {
    void * memory = take_memory(size);
    if (memory == nullptr) {
        return nullptr;
    }
    static const BufferCalls calls = {free_buffer, get_base, init_tensor, memset_tensor, set_tensor, get_tensor,
                                      nullptr,     nullptr,  cpy_tensor,  clear,         nullptr};
    Buffer * buffer = g_state->host.buffer_init(type, calls, memory, size);
    if (buffer == nullptr) {
        give_back(memory, size);
    }
    return buffer;
}

size_t get_alignment(BufferType *) { return kAlignment; }

size_t plain_bytes(const Tensor * t) {
    size_t bytes = t->nb[1] * size_t(t->ne[1]);
    for (int i = 2; i < kDims; i++) {
        bytes += size_t(t->ne[i] - 1) * t->nb[i];
    }
    return bytes;
}

size_t get_alloc_size(BufferType *, const Tensor * tensor) {
    const Product * product = product_for(tensor);
    if (product == nullptr) {
        return plain_bytes(tensor);
    }
    return packed_bytes(product->kernel(), tensor->ne[0], tensor->ne[1]);
}

// Operations.

bool is_host_memory(const Tensor * t) {
    if (t->buffer == nullptr) {
        return true;
    }
    BufferType * type = t->buffer->type;
    return type->calls.is_host != nullptr && type->calls.is_host(type);
}

bool takes_product(const Tensor * op) {
    const Tensor * weight = op->src[0], * x = op->src[1];
    const bool     packed = product_for(weight) != nullptr && product_for(owner_of(weight)) != nullptr;
    return packed && is_row_range(weight) && x->type == F32 && x->nb[0] == sizeof(float) && op->type == F32 &&
           is_host_memory(x);
}

// Tokens are looked up in the one, rows of candidates by drafters in both. Other tables are used in other ways as well.
bool is_looked_up(const Tensor * table) {
    return std::strcmp(table->name, "token_embd.weight") == 0 || std::strcmp(table->name, "output.weight") == 0;
}

bool takes_lookup(const Tensor * op) {
    const Tensor * table = op->src[0], * index = op->src[1];
    return product_for(owner_of(table)) != nullptr && is_row_range(table) && lookup_in(table) != nullptr &&
           is_looked_up(owner_of(table)) && op->type == F32 && op->nb[0] == sizeof(float) &&
           index->ne[1] == 1 && index->ne[2] == 1 && is_host_memory(index);
}

bool takes_top_k(const Tensor * op) { return TopK::takes(op) && is_host_memory(op->src[0]) && is_host_memory(op); }

class AttentionOperation : public Operation {
  public:
    bool work_size(int threads, const Tensor * op, size_t & size) override {
        size = size_t(threads) * bytes(op) + kAlignment;
        return true;
    }

    bool compute(Params * params, Tensor * op) override {
        const uintptr_t start = (reinterpret_cast<uintptr_t>(params->wdata) + kAlignment - 1) / kAlignment * kAlignment;
        g_state->family->attention->compute(params, op, reinterpret_cast<uint8_t *>(start) + size_t(params->ith) * bytes(op));
        return true;
    }

  private:
    static size_t bytes(const Tensor * op) {
        return (g_state->family->attention->work_bytes(op) + kAlignment - 1) / kAlignment * kAlignment;
    }
};

class Kernels : public ExtraBufferType {
  public:
    // Called for operations with an operand in our buffers: nothing else can read them.
    bool supports(void *, const Tensor * op) override {
        if (!g_state->products_on || !is_ours(op->src[0])) {
            return false;
        }
        return op->op == g_state->host.op_mul_mat ? takes_product(op) : op->op == g_state->host.op_get_rows && takes_lookup(op);
    }

    // Called before every operation of the CPU.
    Operation * operation_for(const Tensor * op) override {
        if (op->op == g_state->host.op_mul_mat) {
            return is_ours(op->src[0]) ? product_of(op->src[0]) : nullptr;
        }
        if (op->op == g_state->host.op_get_rows) {
            return is_ours(op->src[0]) && product_of(op->src[0]) != nullptr ? lookup_in(op->src[0]) : nullptr;
        }
        if (op->op == g_state->host.op_attention && g_state->attention_on && g_state->family->attention->takes(op)) {
            static AttentionOperation attention;
            return &attention;
        }
        if (op->op == g_state->host.op_top_k && g_state->top_k_on && takes_top_k(op)) {
            static TopK top_k;
            return &top_k;
        }
        return nullptr;
    }
};

}  // namespace

}  // namespace dspine

extern "C" {

// Key of the index-th family that this processor can run, the newest first; null after the last.
DSPINE_API const char * dspine_kernels_family(int index) {
    const dspine::Family * family = dspine::family_here(index);
    return family == nullptr ? nullptr : family->key;
}

// Registers the buffer type with the kernels of one family; must come before the first model is loaded. Returns
// the buffer type, or null when this processor cannot run the family. `extra_types` is the library's function of that
// name, `flags` 1 = products, 2 = attention.
DSPINE_API void * dspine_kernels_install(const char * key, void * extra_types, void * buffer_init, void * barrier,
                                         void * type_traits, void * cpu_device, int op_mul_mat, int op_attention,
                                         int op_get_rows, int op_top_k, int flags) {
    using namespace dspine;
    if (g_state != nullptr) {
        return &g_state->type;
    }
    const Family * family = family_called(key);
    if (family == nullptr) {
        return nullptr;
    }
    auto list = reinterpret_cast<std::vector<BufferType *> & (*)()>(extra_types);
    auto state = std::make_unique<State>();
    state->host = {&list(), reinterpret_cast<Buffer * (*)(BufferType *, BufferCalls, void *, size_t)>(buffer_init),
                   reinterpret_cast<Barrier>(barrier), cpu_device, reinterpret_cast<const FileType * (*)(int)>(type_traits),
                   op_mul_mat, op_attention, op_get_rows, op_top_k};
    state->family       = family;
    state->products_on  = (flags & 1) != 0;
    state->attention_on = (flags & 2) != 0 && family->attention != nullptr;
    state->top_k_on     = true;
    for (int i = 0; i < family->count; i++) {
        const Kernel & kernel = family->kernels[i];
        state->products.emplace(kernel.type, std::make_unique<Product>(kernel, state->host.barrier));
        const FileType * file = state->host.type_of(kernel.type);
        if (file->block == kernel.unit_inputs && file->block_bytes == kernel.source_bytes && file->to_floats != nullptr) {
            state->lookups.emplace(kernel.type, std::make_unique<Lookup>(kernel, file->to_floats));
        }
    }
    state->type = {{get_name, alloc_buffer, get_alignment, nullptr, get_alloc_size, nullptr}, cpu_device, new Kernels};
    g_state = state.release();
    g_state->host.extra_types->insert(g_state->host.extra_types->begin(), &g_state->type);
    return &g_state->type;
}

// Whether a matrix of this type with rows of `inputs` is packed for the kernels.
DSPINE_API int dspine_kernels_take_weight(int type, int64_t inputs) {
    if (dspine::g_state == nullptr) {
        return 0;
    }
    dspine::Tensor weight{};
    weight.type  = type;
    weight.ne[0] = inputs;
    weight.ne[1] = weight.ne[2] = weight.ne[3] = 1;
    return dspine::product_for(&weight) != nullptr;
}

// Bytes that matrices of this type take when they are packed, which take `bytes` in their file; 0 where they are
// not packed.
DSPINE_API size_t dspine_kernels_packed_bytes(int type, size_t bytes) {
    if (dspine::g_state == nullptr) {
        return 0;
    }
    const auto found = dspine::g_state->products.find(type);
    if (found == dspine::g_state->products.end()) {
        return 0;
    }
    const dspine::Kernel & kernel = found->second->kernel();
    return bytes / (kernel.source_bytes * dspine::kPanel) * kernel.unit_bytes;
}

// About so many bytes of packed weights are going to be loaded; 0 when they have been.
DSPINE_API void dspine_kernels_expect(size_t bytes) {
    if (bytes == 0) {
        dspine::expect_nothing();
    } else {
        dspine::expect_memory(bytes + bytes / 128);  // last panels are filled up
    }
}

// Takes over attention from the next graph on, or leaves it to ggml; for comparisons.
DSPINE_API void dspine_kernels_take_attention(int on) {
    if (dspine::g_state != nullptr) {
        dspine::g_state->attention_on = on != 0 && dspine::g_state->family->attention != nullptr;
    }
}

// Takes over the choice of the largest values from the next graph on, or leaves it to ggml; for comparisons.
DSPINE_API void dspine_kernels_take_top_k(int on) {
    if (dspine::g_state != nullptr) {
        dspine::g_state->top_k_on = on != 0;
    }
}

}  // extern "C"
