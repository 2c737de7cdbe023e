// What is asked of a loss, as plain values. check.cc checks the caller's tensors and fills these; every backend, the
// selector and `explain` read them and nothing else.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "mlp/problem.h"

namespace tessera {

enum class LossOp : std::uint8_t { kGmmNll, kLinearCrossEntropy, kMlpGmmNll };
enum class Reduction : std::uint8_t { kNone, kMean, kSum };

constexpr const char* name_of(LossOp op) {
  return op == LossOp::kGmmNll      ? "loss_gmm_nll"
         : op == LossOp::kMlpGmmNll ? "loss_mlp_gmm_nll"
                                    : "loss_linear_cross_entropy";
}
constexpr const char* name_of(Reduction reduction) {
  return reduction == Reduction::kNone ? "none" : reduction == Reduction::kMean ? "mean" : "sum";
}

// tessera/loss.h says what each op computes.
struct LossProblem {
  LossOp op = LossOp::kGmmNll;
  DType dtype = DType::kFloat32;
  DType target_dtype = DType::kFloat32;  // dtype or fp32
  std::int64_t rows = 0;
  Reduction reduction = Reduction::kMean;

  // kGmmNll, kMlpGmmNll
  std::int64_t components = 0;  // K
  bool gradient = false;        // dparams is given

  MlpProblem mlp;  // kMlpGmmNll: whose results, [rows, 3 K], are the parameters

  // kLinearCrossEntropy
  std::int64_t width = 0;    // C
  std::int64_t classes = 0;  // V
  bool weighted = false;     // dout is given
  bool dhidden = false, dweight = false;
  // GPU: rows start at multiples of 16 bytes.
  bool hidden_aligned = true, weight_aligned = true, dhidden_aligned = true, dweight_aligned = true;
  bool tensor_maps = true;  // the strides of all matrices are positive and below 2^36 elements

  bool operator==(const LossProblem&) const = default;
};

// Strides count elements; the last dim is contiguous.
struct LossView {
  void* data = nullptr;
  std::int64_t row_stride = 0;
  std::int64_t component_stride = 0;
};

struct LossArgs {
  LossProblem problem;
  LossView params, target;  // read
  LossView out;             // written
  LossView dparams;         // written; null if not given
  MlpArgs mlp;              // x, up and down, read

  LossView hidden, weight;    // read
  LossView dout;              // read; null if not given
  LossView dhidden, dweight;  // written; null if not given
};

}  // namespace tessera
