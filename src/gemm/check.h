// Checks the contract, for every backend, before anything runs.
#pragma once

#include "base/arguments.h"
#include "base/status.h"
#include "gemm/problem.h"
#include "tessera/gemm.h"

namespace tessera::gemm {

struct CheckedGemm {
  GemmArgs args;
  tessera_device device{TESSERA_CPU, 0};
};

// The caller's tensors as a Problem and views, or a message that names the argument, its value and what is accepted.
Result<CheckedGemm> check(tessera_gemm_op op, const tessera_gemm* args, Look look);

}  // namespace tessera::gemm
