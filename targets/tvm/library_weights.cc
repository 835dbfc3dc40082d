// A function of a model's library that gives the model's weights, by number: they lie in the library's own pages, which
// are mapped as they are read, and never copied. weights.h holds `struct weight weights[]` and where `bytes` are.
#include <dlpack/dlpack.h>
#include <tvm/ffi/c_api.h>

#include <cstdint>
#include <cstdlib>

struct weight {
  uint64_t offset;
  int32_t axes;
  DLDataType type;
  int64_t shape[8];
};
extern "C" __attribute__((visibility("hidden"))) const char attnrewrite_bytes[];
#include "weights.h"

static const int32_t ALIGNMENT = 64;

static void forget(DLManagedTensor* tensor) { free(tensor); }

extern "C" __attribute__((visibility("default"))) int __tvm_ffi_attnrewrite_weight(  // as TVM's runtime looks it up
    void*, const TVMFFIAny* arguments, int32_t, TVMFFIAny* result) {
  const weight& found = weights[arguments[0].v_int64];
  auto* tensor = static_cast<DLManagedTensor*>(calloc(1, sizeof(DLManagedTensor)));
  if (tensor == nullptr) return -1;
  tensor->dl_tensor.data = const_cast<char*>(attnrewrite_bytes + found.offset);
  tensor->dl_tensor.device = {kDLCPU, 0};
  tensor->dl_tensor.ndim = found.axes;
  tensor->dl_tensor.dtype = found.type;
  tensor->dl_tensor.shape = const_cast<int64_t*>(found.shape);
  tensor->deleter = forget;
  result->type_index = kTVMFFITensor;
  result->zero_padding = 0;
  return TVMFFITensorFromDLPack(tensor, ALIGNMENT, 1, reinterpret_cast<TVMFFIObjectHandle*>(&result->v_obj));
}
