// A case's tensors as the C ABI takes them.
#pragma once

#include <vector>

#include "tessera/gemm.h"
#include "verify/case.h"
#include "verify/gemm/cases.h"

namespace tessera::verify::gemm {

class Buffers final : public Call {
 public:
  // Inputs without values (make_shapes) are filled with repeating random ones.
  Buffers(const Case& c, const Inputs& inputs);

  std::vector<Buffer*> buffers() override;
  tessera_status plan(tessera_plan** plan) override;
  tessera_status run(const tessera_plan* plan, void* workspace, std::size_t bytes, void* stream) override;

  const tessera_gemm& args() const { return args_; }

  // What the op wrote, read from host memory: those rows (of all groups, if out has a matrix for each).
  Outputs results(const std::vector<std::int64_t>& rows) const;

 private:
  GemmProblem problem_;
  Buffer a_{"a"}, b_{"b"}, out_{"out"}, bias_{"bias"}, gate_{"gate"}, gate_bias_{"gate_bias"}, saved_{"saved"},
      preactivation_{"preactivation"}, residual_{"residual"}, offsets_{"offsets"};
  tessera_gemm args_ = TESSERA_GEMM_INIT;
};

}  // namespace tessera::verify::gemm
