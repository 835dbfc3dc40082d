// A second device for torch, on the processor's own memory: what computes there must not meet what lies on the
// processor, as on a GPU. Each operation runs on the processor, after its operands were seen to be of one device; the
// few below are those that torch asks every backend for (pytorch.org, "Facilitating New Backend Integration by
// PrivateUse1").

#include <cstdlib>
#include <cstring>
#include <set>
#include <string>

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

namespace {

using at::Tensor;
using c10::IntArrayRef;
using c10::SymIntArrayRef;
using std::optional;

const c10::Device HERE(c10::DeviceType::PrivateUse1, 0);
const c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

struct Memory final : c10::Allocator {
    c10::DataPtr allocate(size_t bytes) override {
        void* data = bytes ? std::malloc(bytes) : nullptr;
        return {data, data, &std::free, HERE};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
    void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};
Memory memory;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &memory);

struct OneDevice final : c10::impl::DeviceGuardImplInterface {
    c10::Stream stream() const { return c10::Stream(c10::Stream::DEFAULT, HERE); }
    c10::DeviceType type() const override { return HERE.type(); }
    c10::Device exchangeDevice(c10::Device) const override { return HERE; }
    c10::Device getDevice() const override { return HERE; }
    void setDevice(c10::Device) const override {}
    void uncheckedSetDevice(c10::Device) const noexcept override {}
    c10::Stream getStream(c10::Device) const override { return stream(); }
    c10::Stream exchangeStream(c10::Stream) const override { return stream(); }
    c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, OneDevice);

struct Hooks final : at::PrivateUse1HooksInterface {
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    bool isAvailable() const override { return true; }
};
Hooks hooks;
const bool hooked = (at::RegisterPrivateUse1HooksInterface(&hooks), true);

// The same numbers in the same memory, as the processor's.
Tensor as_host(const Tensor& tensor) {
    if (tensor.is_cpu()) return tensor;
    return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), at::dtype(tensor.dtype()));
}

Tensor empty(IntArrayRef size, optional<at::ScalarType> dtype, optional<at::Layout>, optional<at::Device>,
             optional<bool>, optional<at::MemoryFormat> format) {
    return at::detail::empty_generic(size, &memory, KEYS, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, optional<at::ScalarType> dtype, optional<at::Layout>,
                     optional<at::Device>, optional<bool>) {
    return at::detail::empty_strided_generic(size, stride, &memory, KEYS, c10::dtype_or_default(dtype));
}

const Tensor& resize_own(const Tensor& self, IntArrayRef size, optional<at::MemoryFormat>) {
    at::native::resize_impl_cpu_(self.unsafeGetTensorImpl(), size, std::nullopt);
    return self;
}

Tensor copy_from(const Tensor& self, const Tensor& to, bool) {
    at::NoGradGuard no_gradients;
    as_host(to).copy_(as_host(self));
    return to;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
    if (self.sizes() != to.sizes()) resize_own(to, self.sizes(), std::nullopt);
    return copy_from(self, to, false);
}

at::Scalar number_of(const Tensor& self) { return as_host(self).item(); }

Tensor& set_whole_storage(Tensor& result, at::Storage storage) { return at::cpu::set_(result, storage); }

Tensor& set_storage(Tensor& result, at::Storage storage, int64_t offset, IntArrayRef size, IntArrayRef stride) {
    return at::cpu::set_(result, storage, offset, size, stride);
}

void require_one_device(const std::string& operation, bool here, bool elsewhere) {
    TORCH_CHECK(!(here && elsewhere), operation, " has operands on the processor and on the second device");
}

Tensor convolution(const Tensor& input, const Tensor& weight, const optional<Tensor>& bias, SymIntArrayRef stride,
                   SymIntArrayRef padding, SymIntArrayRef dilation, bool transposed, SymIntArrayRef output_padding,
                   c10::SymInt groups) {
    const bool biased = bias && bias->defined();
    require_one_device("convolution", input.is_cpu() || weight.is_cpu() || (biased && bias->is_cpu()), true);
    optional<Tensor> own = biased ? optional<Tensor>(bias->cpu()) : std::nullopt;
    return at::convolution_symint(input.cpu(), weight.cpu(), own, stride, padding, dilation, transposed,
                                  output_padding, groups).to(HERE);
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& gradient, const Tensor& input, const Tensor& weight, SymIntArrayRef stride, SymIntArrayRef padding,
    SymIntArrayRef dilation, bool transposed, SymIntArrayRef output_padding, c10::SymInt groups,
    std::array<bool, 3> wanted) {
    const c10::SymInt outputs = weight.sym_size(transposed ? 1 : 0);
    auto [of_input, of_weight, of_bias] = at::convolution_backward_symint(
        gradient.cpu(), input.cpu(), weight.cpu(), SymIntArrayRef(&outputs, 1), stride, padding, dilation, transposed,
        output_padding, groups, wanted);
    auto back = [](const Tensor& each) { return each.defined() ? each.to(HERE) : each; };
    return {back(of_input), back(of_weight), back(of_bias)};
}

// Indices may be the processor's, and numbers alone, as on a GPU.
void on_the_processor(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
    static const std::set<std::string> INDEXING = {
        "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"};
    const std::string& name = operation.schema().name();
    bool here = false, elsewhere = false;
    auto look = [&](const Tensor& tensor) {
        if (!tensor.defined()) return;
        here |= tensor.is_cpu() && tensor.dim() > 0;
        elsewhere |= !tensor.is_cpu();
    };
    bool first = true;
    for (const c10::IValue& given : torch::jit::last(stack, operation.schema().arguments().size())) {
        if (given.isTensor() && (first || !INDEXING.count(name))) look(given.toTensor());
        if (given.isTensorList())
            for (const Tensor& each : given.toTensorVector()) look(each);
        first = false;
    }
    require_one_device(name, here, elsewhere);
    at::native::cpu_fallback(operation, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
    library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_processor>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
    library.impl("empty.memory_format", &empty);
    library.impl("empty_strided", &empty_strided);
    library.impl("resize_", &resize_own);
    library.impl("_copy_from", &copy_from);
    library.impl("_copy_from_and_resize", &copy_from_and_resize);
    library.impl("_local_scalar_dense", &number_of);
    library.impl("set_.source_Storage", &set_whole_storage);
    library.impl("set_.source_Storage_storage_offset", &set_storage);
    library.impl("as_strided", &at::native::as_strided_tensorimpl);
    library.impl("view", &at::native::view);
    library.impl("_reshape_alias", &at::native::_reshape_alias);
    library.impl("unfold", &at::native::unfold);
    library.impl("alias", &at::native::alias);
    library.impl("convolution_overrideable", &convolution);
    library.impl("convolution_backward_overrideable", &convolution_backward);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

// As on a GPU: products in half precision, what is steep in single.
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
    KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
    KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
    KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
    KERNEL_PRIVATEUSEONE(conv2d, lower_precision_fp)
    KERNEL_PRIVATEUSEONE(scaled_dot_product_attention, lower_precision_fp)
    KERNEL_PRIVATEUSEONE(softmax, int, fp32)
    KERNEL_PRIVATEUSEONE(layer_norm, fp32)
    KERNEL_PRIVATEUSEONE(exp, fp32)
}

}  // namespace
