// The oracle: matrix products and their epilogues in scalar fp64, written to be read.
//
//   x = A B + bias;  y = f(x), x f'(saved) or x f(A G + gate_bias);  out = y + residual
//
// A kernel passes if its error against the oracle is at most twice that of the plain computation in the same precision
// (products of the inputs with fp32 sums, the epilogue in fp32), plus a floor. Nothing here shares code with the kernels.
#pragma once

#include <cstdint>
#include <vector>

#include "gemm/problem.h"
#include "verify/host_tensor.h"

namespace tessera::verify::gemm {

// Matrices are [1, 1 or groups, rows, columns] as they are stored, vectors [1, 1, 1 or groups, N]. Values are rounded to
// their types already.
struct Inputs {
  GemmProblem problem;
  HostTensor a, b, gate;
  HostTensor bias, gate_bias, saved, residual;  // empty if not given
  std::vector<std::int32_t> offsets;            // of ragged groups
};

struct Outputs {
  HostTensor out;            // [1, 1, M or the rows of a sample, N]
  HostTensor preactivation;  // likewise, if the problem has one
};

double activated(int activation, double x);
double derivative(int activation, double x);

// rows: those of out that are computed; if it has a matrix per group, row m of group g is g M + m. threads 0: as many as the machine has.
Outputs product(const Inputs& inputs, const std::vector<std::int64_t>& rows, int threads = 0);
// The plain same-precision computation that sets the scale of acceptable error, rounded to the results' types.
Outputs plain_product(const Inputs& inputs, const std::vector<std::int64_t>& rows, int threads = 0);

}  // namespace tessera::verify::gemm
