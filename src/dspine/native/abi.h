// What the plug-in needs of ggml 0.25's memory layout and of the interface of its extra buffer
// types. Declared here in full, so that the plug-in compiles without ggml's headers; the self-test
// notices a library that is laid out differently.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dspine {

constexpr int kDims = 4;

enum Type : int {
    F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14, I32 = 26, BF16 = 30,
};

struct Buffer;
struct BufferType;

struct Tensor {
    int      type;
    Buffer * buffer;
    int64_t  ne[kDims];  // elements, fastest dimension first
    size_t   nb[kDims];  // bytes from one element, row, matrix to the next
    int      op;
    int32_t  op_params[16];
    int32_t  flags;
    Tensor * src[10];
    Tensor * view_src;
    size_t   view_offs;
    void *   data;
    char     name[64];
    void *   extra;
    char     padding[8];
};
static_assert(sizeof(Tensor) == 336, "ggml 0.25 stores tensors in 336 bytes");

// Rows of all matrices of a tensor, and where one of them begins.
static inline int64_t row_count(const Tensor * t) { return t->ne[1] * t->ne[2] * t->ne[3]; }

static inline void * row_of(const Tensor * t, int64_t row) {
    const int64_t i1 = row % t->ne[1], i2 = row / t->ne[1] % t->ne[2], i3 = row / (t->ne[1] * t->ne[2]);
    return static_cast<char *>(t->data) + i1 * t->nb[1] + i2 * t->nb[2] + i3 * t->nb[3];
}

// Arguments of an operation: this thread's index, the number of threads, the work buffer they share.
struct Params {
    int    ith, nth;
    size_t wsize;
    void * wdata;
    void * pool;
    bool   use_ref;
};

struct BufferTypeCalls {
    const char * (*get_name)(BufferType *);
    Buffer *     (*alloc_buffer)(BufferType *, size_t);
    size_t       (*get_alignment)(BufferType *);
    size_t       (*get_max_size)(BufferType *);
    size_t       (*get_alloc_size)(BufferType *, const Tensor *);
    bool         (*is_host)(BufferType *);
};

struct BufferType {
    BufferTypeCalls calls;
    void *          device;
    void *          context;  // an ExtraBufferType
};

struct BufferCalls {
    void   (*free_buffer)(Buffer *);
    void * (*get_base)(Buffer *);
    int    (*init_tensor)(Buffer *, Tensor *);
    void   (*memset_tensor)(Buffer *, Tensor *, uint8_t, size_t, size_t);
    void   (*set_tensor)(Buffer *, Tensor *, const void *, size_t, size_t);
    void   (*get_tensor)(Buffer *, const Tensor *, void *, size_t, size_t);
    void   (*set_tensor_2d)(Buffer *, Tensor *, const void *, size_t, size_t, size_t, size_t, size_t);
    void   (*get_tensor_2d)(Buffer *, const Tensor *, void *, size_t, size_t, size_t, size_t, size_t);
    bool   (*cpy_tensor)(Buffer *, const Tensor *, Tensor *);
    void   (*clear)(Buffer *, uint8_t);
    void   (*reset)(Buffer *);
};

struct Buffer {
    BufferCalls  calls;
    BufferType * type;
    void *       context;
    size_t       size;
    int          usage;
};

// The head of ggml_type_traits.
struct FileType {
    const char * name;
    int64_t      block;
    int64_t      interleave;
    size_t       block_bytes;
    bool         quantised;
    void (*to_floats)(const void * from, float * to, int64_t count);
};

// The two interfaces that ggml's CPU backend asks. Only the order of the virtual functions matters:
// destructor first, then these.
class Operation {
  public:
    virtual ~Operation() = default;
    virtual bool work_size(int threads, const Tensor * op, size_t & size) = 0;
    virtual bool compute(Params * params, Tensor * op)                    = 0;
};

class ExtraBufferType {
  public:
    virtual ~ExtraBufferType() = default;
    virtual bool        supports(void * device, const Tensor * op) = 0;
    virtual Operation * operation_for(const Tensor * op)           = 0;
};

}  // namespace dspine
