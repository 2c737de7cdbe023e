#include "verify/gemm/buffers.h"

#include <algorithm>

namespace tessera::verify::gemm {

Buffers::Buffers(const Case& c, const Inputs& in) : problem_(c.problem) {
  const GemmProblem& p = problem_;
  const auto set = [&](Buffer& b, const HostTensor& values, DType dtype, int rank, bool written) {
    b.shape = values.shape;
    const MatrixStrides strides = strides_of(c, b.shape[1], b.shape[2], b.shape[3]);
    const std::int64_t all = std::max(b.shape[1] * strides.layer, b.shape[2] * strides.row);
    b.strides = {all, strides.layer, rank == 1 ? b.shape[3] : strides.row, 1};
    b.fill(dtype, rank, values, written);
  };
  const bool grouped = p.op == GemmOp::kGrouped;
  const Layers layers = layers_of(p);
  HostTensor results;
  results.shape = {1, layers.out, p.m, p.n};
  const auto rank_of = [&](bool has_layers) { return has_layers ? 3 : 2; };
  const int b_rank = rank_of(grouped && p.grouping != kRaggedSums), out_rank = rank_of(out_has_layers(p.grouping));
  const int vector_rank = grouped ? 2 : 1;
  set(a_, in.a, p.dtype, rank_of(p.grouping == kBatched && !p.a_shared), false);
  set(b_, in.b, p.dtype, b_rank, false);
  set(out_, results, p.out_dtype, out_rank, true);
  if (p.gated) set(gate_, in.gate, p.dtype, b_rank, false);
  if (p.bias) set(bias_, in.bias, p.dtype, vector_rank, false);
  if (p.bias && p.gated) set(gate_bias_, in.gate_bias, p.dtype, vector_rank, false);
  if (p.gradient) set(saved_, in.saved, p.dtype, out_rank, false);
  if (p.preactivation) set(preactivation_, results, p.dtype, out_rank, true);
  if (p.residual) set(residual_, in.residual, p.out_dtype, out_rank, false);
  if (!in.offsets.empty()) offsets_.fill(in.offsets, 1, 1);
  out_.free_padding = preactivation_.free_padding = c.layout == Layout::kFreePadding;

  args_.a = a_.view();
  args_.b = b_.view();
  args_.out = out_.view();
  args_.bias = bias_.view();
  args_.gate = gate_.view();
  args_.gate_bias = gate_bias_.view();
  args_.saved = saved_.view();
  args_.preactivation = preactivation_.view();
  args_.residual = residual_.view();
  args_.offsets = offsets_.view();
  args_.activation = static_cast<tessera_activation>(p.activation);
  args_.flags = flags_of(c);
}

std::vector<Buffer*> Buffers::buffers() {
  return used_of({&a_, &b_, &out_, &bias_, &gate_, &gate_bias_, &saved_, &preactivation_, &residual_, &offsets_});
}

tessera_status Buffers::plan(tessera_plan** plan) {
  return tessera_gemm_plan_create(static_cast<tessera_gemm_op>(problem_.op), &args_, plan);
}

tessera_status Buffers::run(const tessera_plan* plan, void* workspace, std::size_t bytes, void* stream) {
  return tessera_gemm_plan_run(plan, &args_, workspace, bytes, stream);
}

Outputs Buffers::results(const std::vector<std::int64_t>& rows) const {
  const auto read = [&](const Buffer& b) {
    const std::int64_t layers = b.shape[1];
    HostTensor whole(1, layers, problem_.m, problem_.n);
    b.read(whole);
    whole.shape = {1, 1, layers * problem_.m, problem_.n};
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
