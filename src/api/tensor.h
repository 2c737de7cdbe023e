// One tensor's description, checked: rank, dims, type, strides, alignment. What dims must agree between tensors is
// attention's business (check.cc).
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>

#include "ops/status.h"
#include "tessera/tessera.h"

namespace tessera::api {

enum class Access : std::uint8_t { kRead, kWrite };
enum class Element : std::uint8_t { kFloating, kFloat32, kInt32 };  // kFloating: fp16, bf16 or fp32

// A tensor that passed: data with byte_offset applied, and strides with every irrelevant one (of a dim of size 1 or 0)
// set to zero.
struct CheckedTensor {
  static constexpr int kMaxRank = 4;

  void* data = nullptr;
  tessera_dtype dtype{};
  int rank = 0;
  std::array<std::int64_t, kMaxRank> shape{};
  std::array<std::int64_t, kMaxRank> strides{};
};

// More elements than any memory has, counted by shape. Strides of 0 can claim more; what is cut out of the workspace
// for each element could then overflow.
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

// look_at_data: the pointer is checked too (null, alignment). out: a new one, filled; of use where the status is OK.
Status check_tensor(const tessera_tensor& tensor, const TensorRule& rule, bool look_at_data, CheckedTensor& out);

}  // namespace tessera::api
