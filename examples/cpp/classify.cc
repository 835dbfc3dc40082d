// Classifies a picture with a folder that `attnrewrite lower` wrote: classify FOLDER PICTURE.ppm
//
// The picture is a binary PPM (or PGM) of the model's size; artifact.json says what that is, and how pixels become inputs.
// Prints the best five classes, each with its logit. README.md says how it is built: it needs the headers of tvm_ffi, and
// libtvm_runtime and libtvm_ffi for the processor that it runs on, which the wheels of apache-tvm and -ffi hold.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/json.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/function.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <limits>
#include <numeric>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace ffi = tvm::ffi;
namespace json = tvm::ffi::json;

struct HeapAllocator {
  void AllocData(DLTensor* tensor) {
    tensor->data = std::aligned_alloc(64, (ffi::GetDataSize(*tensor) + 63) / 64 * 64);
  }
  void FreeData(DLTensor* tensor) { std::free(tensor->data); }
};

struct Picture {
  int64_t channels, height, width;
  std::vector<unsigned char> pixels;  // row by row, the channels of a pixel side by side
};

Picture ReadPicture(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string kind;
  int64_t sizes[3];  // width, height, the largest value
  file >> kind;
  for (int64_t& size : sizes) {
    while (file >> std::ws && file.peek() == '#') file.ignore(1 << 20, '\n');
    file >> size;
  }
  file.ignore(1);
  if (!file || (kind != "P5" && kind != "P6") || sizes[2] != 255) {
    throw std::runtime_error(path + " is no binary PPM or PGM of bytes: convert it (magick picture.jpg picture.ppm)");
  }
  Picture picture{kind == "P6" ? 3 : 1, sizes[1], sizes[0], {}};
  picture.pixels.resize(picture.channels * picture.height * picture.width);
  if (!file.read(reinterpret_cast<char*>(picture.pixels.data()), picture.pixels.size())) {
    throw std::runtime_error(path + " is cut short");
  }
  return picture;
}

template <typename Number>
std::vector<Number> Numbers(const json::Value& values) {
  std::vector<Number> numbers;
  for (const json::Value& value : values.cast<json::Array>()) numbers.push_back(value.cast<Number>());
  return numbers;
}

// (x / 255 - mean) / std by channel, as [1, channels, height, width] or, for some models, [1, height, width, channels].
ffi::Tensor AsInput(const Picture& picture, const json::Object& record) {
  if (record["preprocessing"] == nullptr) {
    throw std::runtime_error("artifact.json does not say how pictures are prepared: lower with --mean and --std");
  }
  json::Object how = record["preprocessing"].cast<json::Object>();
  json::Object input = record["inputs"].cast<json::Array>()[0].cast<json::Object>();
  std::vector<int64_t> shape = Numbers<int64_t>(input["shape"]);
  if (shape.size() != 4 || shape[0] != 1 || input["dtype"].cast<ffi::String>() != "float32") {
    throw std::runtime_error("the model does not take one picture in float32");
  }
  const bool last = how["channels_last"].cast<bool>();
  const int64_t channels = shape[last ? 3 : 1], height = shape[last ? 1 : 2], width = shape[last ? 2 : 3];
  if (picture.channels != channels || picture.height != height || picture.width != width) {
    std::ostringstream way;
    const double crop = how["crop"].cast<double>();
    way << "the model takes " << channels << " channels of " << width << "x" << height << ", and the picture has "
        << picture.channels << " of " << picture.width << "x" << picture.height << ": magick picture.jpg -resize "
        << std::lround(width / crop) << "x" << std::lround(height / crop) << "^ -gravity center -extent " << width
        << "x" << height << (channels == 3 ? " picture.ppm" : " -colorspace gray picture.pgm");
    throw std::runtime_error(way.str());
  }
  std::vector<double> mean = Numbers<double>(how["mean"]), std = Numbers<double>(how["std"]);
  ffi::Tensor tensor =
      ffi::Tensor::FromNDAlloc(HeapAllocator(), ffi::Shape(shape), DLDataType{kDLFloat, 32, 1}, DLDevice{kDLCPU, 0});
  float* values = static_cast<float*>(tensor.data_ptr());
  for (int64_t pixel = 0; pixel < height * width; ++pixel) {
    for (int64_t channel = 0; channel < channels; ++channel) {
      const float x = picture.pixels[pixel * channels + channel] / 255.0f;
      const int64_t place = last ? pixel * channels + channel : channel * height * width + pixel;
      // One number serves every channel.
      values[place] = (x - float(mean[channel % mean.size()])) / float(std[channel % std.size()]);
    }
  }
  return tensor;
}

std::vector<float> Logits(const std::string& library, const ffi::Tensor& input) {
  ffi::Module machine =
      ffi::Module::LoadFromFile(library)->GetFunction("vm_load_executable").value()().cast<ffi::Module>();
  constexpr int kPooledAllocator = 2;
  machine->GetFunction("vm_initialization").value()(static_cast<int>(kDLCPU), 0, kPooledAllocator);
  ffi::Any result = machine->GetFunction("main").value()(input);
  while (auto several = result.as<ffi::Array<ffi::Any>>()) result = (*several)[0];  // the logits come first
  ffi::Tensor logits = result.cast<ffi::Tensor>();
  const float* values = static_cast<const float*>(logits.data_ptr());
  return {values, values + logits.numel()};
}

int main(int argc, char** argv) {
  if (argc != 3) {
    std::cerr << "usage: classify FOLDER PICTURE.ppm" << std::endl;
    return 2;
  }
  try {
    const std::string folder = argv[1];
    std::ifstream file(folder + "/artifact.json");
    if (!file) throw std::runtime_error(folder + " holds no artifact.json: is it what attnrewrite lower wrote?");
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    json::Object record = json::Parse(text).cast<json::Object>();
    std::vector<float> logits = Logits(folder + "/model.so", AsInput(ReadPicture(argv[2]), record));
    std::vector<size_t> order(logits.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return logits[a] > logits[b]; });
    std::cout.precision(std::numeric_limits<float>::max_digits10);
    for (size_t rank = 0; rank < std::min<size_t>(5, order.size()); ++rank) {
      std::cout << order[rank] << " " << logits[order[rank]] << std::endl;
    }
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
  return 0;
}
