// The accuracy rule: the error of a result against the oracle, relative to that of the plain same-precision computation.
#pragma once

#include <cstdint>
#include <string>

#include "verify/host_tensor.h"

namespace tessera::verify {

struct Verdict {
  bool pass = false;
  double max_abs_err = 0;   // of the result against the oracle
  double baseline_err = 0;  // of the plain computation against the oracle
  double allowed = 0;       // 2 * baseline_err + floor
  double rel_fro = 0;       // Frobenius norm of the error over that of the oracle
  std::int64_t first_bad_index = -1;
  std::string message;  // empty if it passes

  // Error divided by what is allowed, by the strictest of the rules: at most 1 if it passes.
  double ratio = 0;
};

// Passes if, both in the largest element and in the Frobenius norm,
//   error <= 2 * baseline error
//            + floor * (epsilon_of(dtype) * size of the oracle's values + fp32 epsilon * terms + row_noise)
// each row along the last dim is within a wider bound of its own (judge.cc: judge_rows), no element is NaN, and
// infinities are exactly where the oracle has them. dtype is that of the tensor judged: the input type for o and
// gradients, fp32 for lse.
Verdict judge(const HostTensor& result, const HostTensor& oracle, const HostTensor& baseline, DType dtype,
              double floor);

}  // namespace tessera::verify
