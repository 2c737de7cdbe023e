// What is asked of an MLP, as plain values. check.cc checks the caller's tensors and fills these.
#pragma once

#include <array>
#include <cstdint>

#include "base/dtype.h"
#include "gemm/problem.h"

namespace tessera {

enum class MlpOp : std::uint8_t { kForward, kBackward };

constexpr const char* name_of(MlpOp op) { return op == MlpOp::kForward ? "mlp_forward" : "mlp_backward"; }

// The tensors of tessera_mlp, by name. dhidden is in the workspace, as are those between the layers that are not given.
enum class MlpTensor : std::uint8_t {
  kX,
  kUp,
  kDown,
  kOut,
  kDout,
  kGate,
  kUpBias,
  kGateBias,
  kDownBias,
  kResidual,
  kBefore,
  kBeforeGate,
  kHidden,
  kDx,
  kDup,
  kDdown,
  kDgate,
  kDbefore,
  kDbeforeGate,
  kDhidden,
  kNone,
};
constexpr int kMlpTensors = static_cast<int>(MlpTensor::kNone);
constexpr std::uint32_t bit_of(MlpTensor t) { return t == MlpTensor::kNone ? 0u : 1u << static_cast<unsigned>(t); }

struct MlpProblem {
  MlpOp op = MlpOp::kForward;
  DType dtype = DType::kFloat32;
  std::int64_t m = 0;       // rows
  std::int64_t k = 0;       // columns of x
  std::int64_t hidden = 0;  // columns between the layers
  std::int64_t n = 0;       // columns of the result
  int activation = kSilu;
  std::uint32_t given = 0;  // bits of the caller's tensors
  // GPU: bits of those whose rows start at multiples of 16 bytes.
  std::uint32_t aligned = ~0u;
  bool hidden_padded = false;  // behind rows between the layers, up to a multiple of 16 bytes, may be overwritten
  bool tensor_maps = true;     // the strides of all matrices are positive and below 2^36 elements

  bool has(MlpTensor t) const { return (given & bit_of(t)) != 0; }
  bool operator==(const MlpProblem&) const = default;
};

struct MlpArgs {
  MlpProblem problem;
  std::array<GemmView, kMlpTensors> tensors{};

  GemmView& operator[](MlpTensor t) { return tensors[static_cast<std::size_t>(t)]; }
  const GemmView& operator[](MlpTensor t) const { return tensors[static_cast<std::size_t>(t)]; }
};

}  // namespace tessera
