// Checks the description of one tensor: rank, dims, type, strides, alignment. The family checks which dims must agree
// between tensors.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>

#include "base/dtype.h"
#include "base/status.h"
#include "tessera/tessera.h"

namespace tessera {

enum class Access : std::uint8_t { kRead, kWrite };
enum class Element : std::uint8_t {
  kFloating,        // fp16, bf16 or fp32
  kFloatingOrE4m3,  // or fp8, e4m3
  kFloat32,
  kInt32,
};

// A tensor that passed: byte_offset is applied to data, and every irrelevant stride (of a dim of size 1 or 0) is zero.
struct CheckedTensor {
  static constexpr int kMaxRank = 4;

  void* data = nullptr;
  tessera_dtype dtype{};
  int rank = 0;
  std::array<std::int64_t, kMaxRank> shape{};
  std::array<std::int64_t, kMaxRank> strides{};
};

// More elements, counted by shape, than any memory holds. A tensor with strides of 0 could have more, and the size of a
// workspace that is proportional to it could then overflow.
constexpr std::int64_t kMostElements = std::int64_t{1} << 47;

struct TensorRule {
  const char* name;
  Element element;
  Access access;
  int min_rank;
  int max_rank;
};

std::string describe(tessera_dtype dtype);                 // "bf16", "int8", "float64x2"
std::string describe(tessera_device device);               // "cpu", "cuda:1"
std::string describe(std::span<const std::int64_t> dims);  // "[2, 128, 8, 64]"

Status invalid(std::string message);

// Of a tensor that passed as kFloating.
DType dtype_of(tessera_dtype dtype);
bool is_e4m3(tessera_dtype dtype);

// The device of the first tensor: one that there can be. Then the others': the same one.
Status check_device(const char* name, tessera_device device);
Status check_same_device(const char* name, tessera_device device, const char* first_name, tessera_device first);

// look_at_data: check the pointer too (null, alignment). out: a new object, which is filled; valid if the status is OK.
Status check_tensor(const tessera_tensor& tensor, const TensorRule& rule, bool look_at_data, CheckedTensor& out);

}  // namespace tessera
