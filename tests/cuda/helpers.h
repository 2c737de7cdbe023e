// Tensors on the device for tests: laid out as a case asks, everything outside the view and every output poisoned.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "attention/problem.h"
#include "cuda/memory.h"

// Leaves the test with a reason where no GPU is there.
#define REQUIRE_DEVICE() \
  if (const auto list = tessera::cuda::devices(); !list.ok()) GTEST_SKIP() << "no GPU: " << list.status().message()

#define ASSERT_OK(expression)                     \
  do {                                            \
    const tessera::Status status = (expression);  \
    ASSERT_TRUE(status.ok()) << status.message(); \
  } while (false)

namespace tessera::cuda {

constexpr int kDevice = 0;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Format {
  int mantissa_bits;
  int smallest_exponent;  // of a normal number
  int bias;
};

inline Format format_of(DType dtype) { return dtype == DType::kFloat16 ? Format{10, -14, 15} : Format{7, -126, 127}; }

// Nearest, ties to even. Too large for the format: inf.
inline std::uint16_t encode(DType dtype, double value) {
  const Format f = format_of(dtype);
  const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const std::uint16_t inf = static_cast<std::uint16_t>((2 * f.bias + 1) << f.mantissa_bits);
  if (std::isnan(value)) return static_cast<std::uint16_t>(sign | inf | 1 << (f.mantissa_bits - 1));
  if (std::isinf(value)) return sign | inf;
  if (value == 0) return sign;
  int exponent = std::max(std::ilogb(value), f.smallest_exponent);
  auto mantissa = static_cast<std::int64_t>(std::nearbyint(std::ldexp(std::fabs(value), f.mantissa_bits - exponent)));
  // The implicit bit adds one to the exponent's field by itself, and so does a carry out of rounding; a subnormal has
  // none.
  const std::int64_t bits = mantissa + (static_cast<std::int64_t>(exponent + f.bias - 1) << f.mantissa_bits);
  return static_cast<std::uint16_t>(sign | std::min<std::int64_t>(bits, inf));
}

inline double decode(DType dtype, std::uint16_t bits) {
  const Format f = format_of(dtype);
  const int field = (bits & 0x7fff) >> f.mantissa_bits;
  const int mantissa = bits & ((1 << f.mantissa_bits) - 1);
  const double sign = bits & 0x8000 ? -1 : 1;
  if (field == 2 * f.bias + 1) return mantissa != 0 ? std::nan("") : sign * HUGE_VAL;
  if (field == 0) return sign * std::ldexp(mantissa, f.smallest_exponent - f.mantissa_bits);
  return sign * std::ldexp(mantissa + (1 << f.mantissa_bits), field - f.bias - f.mantissa_bits);
}

// Half a unit in the last place, relative.
inline double rounding(DType dtype) { return std::ldexp(1.0, -format_of(dtype).mantissa_bits - 1); }

enum class Layout {
  kContiguous,  // [B, S, H, D]
  kHeadMajor,   // [B, H, S, D]
  kPadded,      // [B, S + 1, H, D + 8]: gaps after rows and sequences
  kOdd,         // [B, S, H, D + 1], starting one element in: no 16-byte load is possible
};
constexpr Layout kLayouts[] = {Layout::kContiguous, Layout::kHeadMajor, Layout::kPadded, Layout::kOdd};

constexpr std::uint16_t kPoison16 = 0xfff3;  // a NaN in fp16 and in bf16
constexpr std::uint32_t kPoison32 = 0xfffffff3u;

struct Shape {
  std::int64_t batch, seq, heads, dim;
  std::int64_t rows() const { return batch * seq * heads; }
};

// A 16-bit tensor: what the host holds of it, and its buffer.
class HostTensor {
 public:
  HostTensor(Shape shape, Layout layout) : shape_(shape) {
    const auto [b, s, h, d] = shape;
    switch (layout) {
      case Layout::kContiguous:
        strides_ = {s * h * d, h * d, d};
        break;
      case Layout::kHeadMajor:
        strides_ = {s * h * d, d, s * d};
        break;
      case Layout::kPadded:
        strides_ = {(s + 1) * h * (d + 8), h * (d + 8), d + 8};
        break;
      case Layout::kOdd:
        strides_ = {s * h * (d + 1), h * (d + 1), d + 1};
        break;
    }
    offset_ = layout == Layout::kOdd ? 1 : 0;
    bits.assign(static_cast<std::size_t>(offset_ + b * strides_.batch + 64), kPoison16);
  }
  std::uint16_t& at(std::int64_t b, std::int64_t s, std::int64_t h, std::int64_t d) {
    return bits[static_cast<std::size_t>(offset_ + b * strides_.batch + s * strides_.seq + h * strides_.head + d)];
  }
  Status to_device() {
    auto made = DeviceBuffer::make(kDevice, bits.size() * 2);
    if (!made.ok()) return made.status();
    buffer = std::move(*made);
    return buffer.upload(bits.data(), bits.size() * 2);
  }
  TensorView view() const {
    return {buffer.as<std::uint16_t>() + offset_, strides_.batch, strides_.seq, strides_.head};
  }
  Shape shape() const { return shape_; }

  std::vector<std::uint16_t> bits;
  DeviceBuffer buffer;

 private:
  Shape shape_;
  Strides strides_{};
  std::int64_t offset_ = 0;
};

// float [B, H, S], with `gap` poisoned floats behind each head's row.
class HostRows {
 public:
  HostRows(Shape shape, std::int64_t gap) : batch_(shape.heads * (shape.seq + gap)), head_(shape.seq + gap) {
    float poison;
    std::memcpy(&poison, &kPoison32, 4);
    values.assign(static_cast<std::size_t>(shape.batch * batch_), poison);
  }
  float& at(std::int64_t b, std::int64_t h, std::int64_t s) {
    return values[static_cast<std::size_t>(b * batch_ + h * head_ + s)];
  }
  Status to_device() {
    auto made = DeviceBuffer::make(kDevice, values.size() * 4);
    if (!made.ok()) return made.status();
    buffer = std::move(*made);
    return buffer.upload(values.data(), values.size() * 4);
  }
  RowView view() const { return {buffer.as<float>(), batch_, head_}; }

  std::vector<float> values;
  DeviceBuffer buffer;

 private:
  std::int64_t batch_, head_;
};

inline bool is_poison(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits == kPoison32;
}

// Code for older architectures runs on newer GPUs as PTX; the device's own comes as a cubin.
inline std::vector<jit::Target> targets_to_run() {
  std::vector<jit::Target> targets;
  const auto info = device(kDevice);
  if (!info.ok()) return targets;
  targets.push_back({arch_of(*info), false});
  for (const int arch : {75, 80}) {
    if (info->major * 10 + info->minor > arch) targets.push_back({"sm_" + std::to_string(arch), true});
  }
  return targets;
}

inline std::string name_of(const jit::Target& target) { return target.arch + (target.ptx ? " (PTX)" : ""); }

}  // namespace tessera::cuda
