// What kernels of the likelihood of Gaussian mixtures share.
#pragma once

#include "cuda/kernel.h"
#include "loss/gmm_nll_config.h"
#include "loss/problem.h"

namespace tessera::loss {

// All but params. sums: where the CTAs' sums go if losses are reduced.
LossGmmNllParams gmm_nll_params(const LossArgs& args, void* sums);

// The sum over CTAs (kernels/loss/sum_partials.cuh).
jit::KernelInstance sum_partials_instance();
cuda::Work<LossSumPartialsParams> sum_partials_work(const LossArgs& args, const void* sums, std::int64_t count);

}  // namespace tessera::loss
