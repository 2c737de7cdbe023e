#include "verify/gemm/buffers.h"

#include <algorithm>

namespace tessera::verify::gemm {

Buffers::Buffers(const Case& c, const Inputs& in) : problem_(c.problem) {
  const GemmProblem& p = problem_;
  const auto set = [&](Buffer& b, const HostTensor& values, DType dtype, int rank, bool written) {
    b.shape = values.shape;
    const std::int64_t row = rank == 1 ? b.shape[3] : row_stride(c, b.shape[3]);
    const std::int64_t all = b.shape[2] * row;
    b.strides = {all, all, row, 1};
    b.fill(dtype, rank, values, written);
  };
  HostTensor results;
  results.shape = {1, 1, p.m, p.n};
  set(a_, in.a, p.dtype, 2, false);
  set(b_, in.b, p.dtype, 2, false);
  set(out_, results, p.out_dtype, 2, true);
  if (p.gated) set(gate_, in.gate, p.dtype, 2, false);
  if (p.bias) set(bias_, in.bias, p.dtype, 1, false);
  if (p.bias && p.gated) set(gate_bias_, in.gate_bias, p.dtype, 1, false);
  if (p.gradient) set(saved_, in.saved, p.dtype, 2, false);
  if (p.preactivation) set(preactivation_, results, p.dtype, 2, true);
  if (p.residual) set(residual_, in.residual, p.out_dtype, 2, false);

  args_.a = a_.view();
  args_.b = b_.view();
  args_.out = out_.view();
  args_.bias = bias_.view();
  args_.gate = gate_.view();
  args_.gate_bias = gate_bias_.view();
  args_.saved = saved_.view();
  args_.preactivation = preactivation_.view();
  args_.residual = residual_.view();
  args_.activation = static_cast<tessera_activation>(p.activation);
  if (p.a_transposed) args_.flags |= TESSERA_GEMM_A_TRANSPOSED;
  if (p.b_transposed) args_.flags |= TESSERA_GEMM_B_TRANSPOSED;
}

std::vector<Buffer*> Buffers::buffers() {
  std::vector<Buffer*> used;
  for (Buffer* b : {&a_, &b_, &out_, &bias_, &gate_, &gate_bias_, &saved_, &preactivation_, &residual_}) {
    if (b->used()) used.push_back(b);
  }
  return used;
}

tessera_status Buffers::plan(tessera_plan** plan) { return tessera_gemm_plan_create(TESSERA_GEMM_DENSE, &args_, plan); }

tessera_status Buffers::run(const tessera_plan* plan, void* workspace, std::size_t bytes, void* stream) {
  return tessera_gemm_plan_run(plan, &args_, workspace, bytes, stream);
}

Outputs Buffers::results(const std::vector<std::int64_t>& rows) const {
  const auto read = [&](const Buffer& b) {
    HostTensor whole(1, 1, problem_.m, problem_.n);
    b.read(whole);
    HostTensor some(1, 1, static_cast<std::int64_t>(rows.size()), problem_.n);
    for (std::size_t i = 0; i < rows.size(); ++i) {
      std::copy_n(whole.data.begin() + whole.offset(0, 0, rows[i]), problem_.n,
                  some.data.begin() + some.offset(0, 0, static_cast<std::int64_t>(i)));
    }
    return some;
  };
  Outputs outputs;
  outputs.out = read(out_);
  if (problem_.preactivation) outputs.preactivation = read(preactivation_);
  return outputs;
}

}  // namespace tessera::verify::gemm
