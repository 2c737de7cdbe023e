#include "base/tensor.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/format.h"

namespace tessera {
namespace {

bool is(tessera_dtype dtype, std::uint8_t code, std::uint8_t bits) {
  return dtype.code == code && dtype.bits == bits && dtype.lanes == 1;
}

const char* accepted(Element element) {
  switch (element) {
    case Element::kFloating:
      return "fp16, bf16 or fp32";
    case Element::kFloatingOrE4m3:
      return "fp16, bf16, fp32 or e4m3";
    case Element::kFloat32:
      return "fp32";
    case Element::kInt32:
      return "int32";
  }
  return "";
}

bool accepts(Element element, tessera_dtype dtype) {
  const bool fp32 = is(dtype, TESSERA_FLOAT, 32);
  switch (element) {
    case Element::kFloating:
      return fp32 || is(dtype, TESSERA_FLOAT, 16) || is(dtype, TESSERA_BFLOAT, 16);
    case Element::kFloatingOrE4m3:
      return accepts(Element::kFloating, dtype) || is_e4m3(dtype);
    case Element::kFloat32:
      return fp32;
    case Element::kInt32:
      return is(dtype, TESSERA_INT, 32);
  }
  return false;
}

// True if every index has its own address: with the dims ordered by stride, each steps over all that is inside it.
bool has_distinct_addresses(const CheckedTensor& tensor) {
  std::array<std::pair<std::int64_t, std::int64_t>, CheckedTensor::kMaxRank> dims{};  // stride, size
  for (int d = 0; d < tensor.rank; ++d) dims[d] = {tensor.strides[d], tensor.shape[d]};
  const auto step_over = [&](auto first, auto last) {
    std::int64_t reach = 0;  // the largest offset within the inner dims
    for (; first != last; ++first) {
      const auto [stride, size] = *first;
      if (size <= 1) continue;
      if (stride <= reach) return false;
      reach += stride * (size - 1);
    }
    return true;
  };
  if (step_over(dims.rbegin(), dims.rend())) return true;  // most tensors are in order
  std::sort(dims.begin(), dims.end());
  return step_over(dims.begin(), dims.end());
}

}  // namespace

std::string describe(tessera_dtype dtype) {
  if (is(dtype, TESSERA_FLOAT, 32)) return "fp32";
  if (is(dtype, TESSERA_FLOAT, 16)) return "fp16";
  if (is(dtype, TESSERA_BFLOAT, 16)) return "bf16";
  if (is_e4m3(dtype)) return "e4m3";
  constexpr int kComplex = 5, kBool = 6;  // of DLPack, whose other types are fp8 and narrower
  if (dtype.code == kBool) return "bool";
  const char* kind = dtype.code == TESSERA_INT      ? "int"
                     : dtype.code == TESSERA_UINT   ? "uint"
                     : dtype.code == TESSERA_FLOAT  ? "float"
                     : dtype.code == TESSERA_BFLOAT ? "bfloat"
                     : dtype.code == kComplex       ? "complex"
                                                    : "type code ";
  std::string text =
      format("{}{}", kind, kind[0] == 't' ? format("{} of {} bits", dtype.code, dtype.bits) : format("{}", dtype.bits));
  if (dtype.lanes != 1) text += format("x{}", dtype.lanes);
  return text;
}

std::string describe(tessera_device device) {
  if (device.type == TESSERA_CPU) return "cpu";
  if (device.type == TESSERA_CUDA) return format("cuda:{}", device.index);
  return format("device type {}", device.type);
}

std::string describe(std::span<const std::int64_t> dims) { return format("[{}]", join(dims, ", ")); }

Status invalid(std::string message) { return {TESSERA_INVALID_ARGUMENT, std::move(message)}; }

DType dtype_of(tessera_dtype dtype) {
  if (dtype.code == TESSERA_BFLOAT) return DType::kBFloat16;
  return dtype.bits == 16 ? DType::kFloat16 : DType::kFloat32;
}

bool is_e4m3(tessera_dtype dtype) { return is(dtype, TESSERA_FLOAT8_E4M3FN, 8); }

Status check_device(const char* name, tessera_device device) {
  if (device.type != TESSERA_CPU && device.type != TESSERA_CUDA) {
    return invalid(format("{} is on {}; cpu ({}) and cuda ({}) are accepted", name, describe(device), +TESSERA_CPU,
                          +TESSERA_CUDA));
  }
  if (device.index < 0) return invalid(format("{} is on device index {}; it must not be negative", name, device.index));
  return {};
}

Status check_same_device(const char* name, tessera_device device, const char* first_name, tessera_device first) {
  if (device.type == first.type && (first.type != TESSERA_CUDA || device.index == first.index)) return {};
  return invalid(format("{} is on {}, but {} is on {}", name, describe(device), first_name, describe(first)));
}

Status check_tensor(const tessera_tensor& tensor, const TensorRule& rule, bool look_at_data, CheckedTensor& out) {
  if (tensor.ndim < rule.min_rank || tensor.ndim > rule.max_rank) {
    return invalid(format("{} has {} dims; {}{} accepted", rule.name, tensor.ndim, rule.min_rank,
                          rule.min_rank == rule.max_rank ? " is" : format(" to {} are", rule.max_rank)));
  }
  if (tensor.shape == nullptr) return invalid(format("{}.shape is null", rule.name));
  if (!accepts(rule.element, tensor.dtype)) {
    return invalid(format("{} is {}; {} is accepted", rule.name, describe(tensor.dtype), accepted(rule.element)));
  }

  out.rank = tensor.ndim;
  out.dtype = tensor.dtype;
  const std::span<const std::int64_t> shape(tensor.shape, static_cast<std::size_t>(tensor.ndim));
  bool empty = false;
  for (int d = 0; d < out.rank; ++d) {
    if (shape[d] < 0) return invalid(format("{} has a negative dim in {}", rule.name, describe(shape)));
    out.shape[d] = shape[d];
    empty |= shape[d] == 0;
  }

  // The farthest byte must be within reach of a 64-bit offset; compact strides are computed under the same guard.
  const std::int64_t element_bytes = tensor.dtype.bits / 8;
  std::int64_t compact = 1;
  std::int64_t farthest = 0;
  for (int d = out.rank - 1; d >= 0; --d) {
    std::int64_t stride = tensor.strides != nullptr ? tensor.strides[d] : compact;
    if (stride < 0) {
      return invalid(format("{} has stride {} in dim {}; strides must not be negative", rule.name, stride, d));
    }
    if (shape[d] <= 1 || empty) stride = 0;
    if (d == out.rank - 1 && stride != 1 && shape[d] > 1 && !empty) {
      return invalid(format("{} has stride {} in its last dim; it must be contiguous (1)", rule.name, stride));
    }
    out.strides[d] = stride;
    std::int64_t reach = 0;
    if (__builtin_mul_overflow(stride, std::max<std::int64_t>(shape[d] - 1, 0), &reach) ||
        __builtin_add_overflow(farthest, reach, &farthest) ||
        __builtin_mul_overflow(compact, std::max<std::int64_t>(shape[d], 1), &compact)) {
      return invalid(format("{} of shape {} reaches beyond 64-bit offsets", rule.name, describe(shape)));
    }
  }
  if (compact > kMostElements) {
    return invalid(
        format("{} of shape {} has more than 2^47 elements, which no memory holds", rule.name, describe(shape)));
  }
  std::int64_t bytes = 0;
  if (__builtin_mul_overflow(farthest, element_bytes, &bytes) || __builtin_add_overflow(bytes, element_bytes, &bytes) ||
      tensor.byte_offset > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max() - bytes)) {
    return invalid(format("{} of shape {} reaches beyond 64-bit offsets", rule.name, describe(shape)));
  }
  if (rule.access == Access::kWrite && !empty && !has_distinct_addresses(out)) {
    return invalid(format("{} is written, but its strides {} give several elements of {} one address", rule.name,
                          describe({out.strides.data(), static_cast<std::size_t>(out.rank)}), describe(shape)));
  }

  if (look_at_data && !empty) {
    if (tensor.data == nullptr) return invalid(format("{}.data is null", rule.name));
    const auto address = reinterpret_cast<std::uintptr_t>(tensor.data) + tensor.byte_offset;
    if ((address & static_cast<std::uintptr_t>(element_bytes - 1)) != 0) {  // 1, 2 or 4 bytes
      return invalid(format("{} starts at address {:#x}, which is not a multiple of its element's {} bytes", rule.name,
                            address, element_bytes));
    }
    out.data = reinterpret_cast<void*>(address);
  }
  return {};
}

}  // namespace tessera
