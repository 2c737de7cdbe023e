// What is asked of a mixture of experts, as plain values. check.cc checks the caller's tensors and fills these.
#pragma once

#include <array>
#include <cstdint>

#include "base/dtype.h"
#include "gemm/problem.h"
#include "moe/route_config.h"

namespace tessera {

enum class MoeOp : std::uint8_t { kForward, kBackward };

constexpr const char* name_of(MoeOp op) { return op == MoeOp::kForward ? "moe_forward" : "moe_backward"; }

// The tensors of tessera_moe, in its order; then those that are in the workspace only. Rows are those of pairs, in the order of
// experts.
enum class MoeTensor : std::uint8_t {
  kX,
  kLogits,
  kUp,
  kDown,
  kGate,
  kOut,
  kDout,
  kExperts,
  kWeights,
  kPositions,
  kOffsets,
  kBalanceLoss,
  kDbalanceLoss,
  kBefore,
  kBeforeGate,
  kXRows,
  kDx,
  kDlogits,
  kDweights,
  kDup,
  kDdown,
  kDgate,
  kDoutRows,
  kOutRows,
  kDxRows,
  kHidden,
  kDhidden,
  kDbefore,
  kDbeforeGate,
  kRowWeights,
  kRowDweights,
  kCounts,
  kShares,
  kNone,
};
constexpr int kMoeGivenTensors = static_cast<int>(MoeTensor::kDoutRows);
constexpr int kMoeTensors = static_cast<int>(MoeTensor::kNone);
constexpr std::uint64_t bit_of(MoeTensor t) {
  return t == MoeTensor::kNone ? 0u : std::uint64_t{1} << static_cast<unsigned>(t);
}

struct MoeProblem {
  MoeOp op = MoeOp::kForward;
  DType dtype = DType::kFloat32;
  DType logits_dtype = DType::kFloat32;
  std::int64_t m = 0;       // tokens
  std::int64_t k = 0;       // columns of x
  std::int64_t hidden = 0;  // columns between the layers
  std::int64_t experts = 0;
  std::int64_t top_k = 0;
  int activation = kSilu;
  int scoring = kMoeSoftmax;
  bool normalized = false;
  std::uint64_t given = 0;  // bits of the caller's tensors
  // GPU: bits of those whose rows start at multiples of 16 bytes.
  std::uint64_t aligned = ~std::uint64_t{0};
  bool tensor_maps = true;  // the strides of all matrices are positive and below 2^36 elements

  bool has(MoeTensor t) const { return (given & bit_of(t)) != 0; }
  std::int64_t pairs() const { return m * top_k; }
  bool operator==(const MoeProblem&) const = default;
};

// The shape of a tensor: [groups, rows, columns], or the last `rank` of them.
struct MoeShape {
  int rank;
  std::array<std::int64_t, 3> dims;
};
MoeShape shape_of(const MoeProblem& problem, MoeTensor tensor);
const char* name_of(MoeTensor tensor);

struct MoeArgs {
  MoeProblem problem;
  std::array<GemmView, kMoeTensors> tensors{};

  GemmView& operator[](MoeTensor t) { return tensors[static_cast<std::size_t>(t)]; }
  const GemmView& operator[](MoeTensor t) const { return tensors[static_cast<std::size_t>(t)]; }
  template <class Element>
  Element* data(MoeTensor t) const {
    return static_cast<Element*>((*this)[t].data);
  }
};

}  // namespace tessera
