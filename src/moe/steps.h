// The steps of a mixture of experts around its products (kernels/moe/), and the same on the CPU.
#pragma once

#include "cuda/kernel.h"
#include "moe/problem.h"

namespace tessera::moe {

enum class Step : std::uint8_t {
  kRoute,          // logits -> experts, weights, counts
  kPermute,        // forward: positions, offsets, x in the order of experts; backward: x and dout in that order
  kCombine,        // rows in the order of experts -> out, or dx
  kElements,       // backward, between the layers
  kRouteBackward,  // -> dlogits, or dweights
};
const char* name_of(Step step);

// Tokens are divided into chunks, each of which is counted and sorted by one CTA: two for each multiprocessor of an H200.
constexpr std::int64_t kMostChunks = 264;

// Whether the step kPermute writes x_rows, if there is a place for them: in the backward, the caller may have kept them.
inline bool copies_x(const MoeProblem& p) { return p.op == MoeOp::kForward || !p.has(MoeTensor::kXRows); }

jit::KernelInstance instance_of(Step step, const MoeProblem& problem);

// args: with those tensors that are in the workspace.
Status enqueue(Step step, const MoeArgs& args, const cuda::Kernel& kernel, cuda::CUstream stream);
void run_on_cpu(Step step, const MoeArgs& args, int threads);

double bytes_of(Step step, const MoeProblem& problem);

}  // namespace tessera::moe
