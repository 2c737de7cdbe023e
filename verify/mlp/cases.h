// Cases of the MLP family, their inputs, and the oracle: an MLP and its gradients in scalar fp64, written to be read.
//
// A kernel passes if its errors against the oracle are at most twice those of the plain computation in the same precision
// (fp32 sums, every tensor rounded to its type), plus a floor. Nothing here shares code with the kernels.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "mlp/problem.h"
#include "verify/case.h"
#include "verify/host_tensor.h"

namespace tessera::verify::mlp {

enum class Layout : std::uint8_t {
  kCompact,
  kPaddedHidden,  // rows between the layers start at multiples of 16 bytes
  kFreeHidden,    // of 128 bytes (fp32: 256), and what is behind them may be overwritten
  kUnaligned,     // 3 elements after every row
};

struct Case {
  std::string name;  // says everything that sets the case apart; unique in a suite
  MlpProblem problem;
  Layout layout = Layout::kCompact;
  double scale = 1;  // of x: 100 for activations at both ends of their range
  std::uint64_t seed = 1;
  std::vector<std::string> tags;

  double flops() const;
  double bytes() const;
  double unfused_bytes() const;
};

const char* name_of(MlpTensor tensor);
bool is_vector(MlpTensor tensor);
bool is_written(const MlpProblem& problem, MlpTensor tensor);
bool is_between_layers(MlpTensor tensor);
struct Dims {
  std::int64_t rows, columns;
};
Dims dims_of(const MlpProblem& problem, MlpTensor tensor);
std::int64_t row_stride(const Case& c, MlpTensor tensor);
// Sets the problem's alignment to what its tensors will have.
void set_alignment(Case& c);
std::string describe(const Case& c);

std::vector<Case> suite(std::string_view name);
const std::vector<std::string>& suite_names();

// By MlpTensor; empty if not given. Matrices are [1, 1, rows, columns], vectors [1, 1, 1, columns].
using Tensors = std::array<HostTensor, kMlpTensors>;

// Values from the case's seed, rounded to their type; what a backward is given of the forward is made by the oracle.
Tensors make_inputs(const Case& c);
Tensors make_shapes(const Case& c);  // without values

// What the op writes, in fp64, and the plain same-precision computation of it.
Tensors exact(const MlpProblem& problem, const Tensors& inputs, int threads);
Tensors plain(const MlpProblem& problem, const Tensors& inputs, int threads);

std::unique_ptr<verify::Case> mlp_case(const Case& c);

}  // namespace tessera::verify::mlp
