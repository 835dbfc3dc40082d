// Runs a library that TVM compiled, on float32 inputs: aarch64_runner MODEL.so OUT CALLS ROWSxCOLUMNS=INPUT.bin ...
// Before the first call and after each it marks the moment by a system call, for instruction_counter.c. Writes every
// output of the last call to OUT.<index> and its shape to standard output. Needs the headers and libraries of tvm_ffi, and
// libtvm_runtime.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/function.h>

#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

namespace ffi = tvm::ffi;

constexpr size_t kAlignment = 64;
constexpr int kPooledAllocator = 2;
constexpr long kMark = 0x61747472;

struct HeapAllocator {
  void AllocData(DLTensor* tensor) {
    size_t bytes = ffi::GetDataSize(*tensor);
    tensor->data = std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
  }
  void FreeData(DLTensor* tensor) { std::free(tensor->data); }
};

ffi::Tensor ReadInput(const std::string& argument) {
  size_t equals = argument.find('=');
  std::vector<int64_t> shape;
  std::stringstream sizes(argument.substr(0, equals));
  for (std::string size; std::getline(sizes, size, 'x');) shape.push_back(std::stoll(size));
  ffi::Tensor tensor = ffi::Tensor::FromNDAlloc(HeapAllocator(), ffi::Shape(shape), DLDataType{kDLFloat, 32, 1},
                                                DLDevice{kDLCPU, 0});
  std::ifstream file(argument.substr(equals + 1), std::ios::binary);
  file.read(static_cast<char*>(tensor.data_ptr()), ffi::GetDataSize(*tensor.GetDLTensorPtr()));
  if (!file) throw std::runtime_error("cannot read " + argument);
  return tensor;
}

void WriteOutputs(const ffi::Any& value, const std::string& prefix, int* count) {
  if (auto items = value.as<ffi::Array<ffi::Any>>()) {
    for (const ffi::Any& item : *items) WriteOutputs(item, prefix, count);
    return;
  }
  ffi::Tensor tensor = value.cast<ffi::Tensor>();
  std::ofstream file(prefix + "." + std::to_string((*count)++), std::ios::binary);
  file.write(static_cast<const char*>(tensor.data_ptr()), ffi::GetDataSize(*tensor.GetDLTensorPtr()));
  for (int64_t size : tensor.shape()) std::cout << size << ' ';
  std::cout << std::endl;
}

int main(int argc, char** argv) {
  if (argc < 4) {
    std::cout << "usage: aarch64_runner MODEL.so OUT CALLS ROWSxCOLUMNS=INPUT.bin ..." << std::endl;
    return 0;
  }
  try {
    ffi::Module library = ffi::Module::LoadFromFile(argv[1]);
    ffi::Module machine = library->GetFunction("vm_load_executable").value()().cast<ffi::Module>();
    machine->GetFunction("vm_initialization").value()(static_cast<int>(kDLCPU), 0, kPooledAllocator);
    std::vector<ffi::Tensor> inputs;
    for (int index = 4; index < argc; ++index) inputs.push_back(ReadInput(argv[index]));
    std::vector<ffi::AnyView> arguments(inputs.begin(), inputs.end());
    ffi::Function call = machine->GetFunction("main").value();
    ffi::Any result;
    syscall(SYS_getppid, kMark);
    for (int done = 0; done < std::stoi(argv[3]); ++done) {
      call.CallPacked(arguments.data(), arguments.size(), &result);
      syscall(SYS_getppid, kMark);
    }
    int count = 0;
    WriteOutputs(result, argv[2], &count);
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
  return 0;
}
