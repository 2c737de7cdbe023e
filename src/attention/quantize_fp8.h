// Activations to e4m3 with scales, as the fp8 forward takes them (kernels/attention/quantize_fp8_sm90.cuh).
#pragma once

#include "attention/problem.h"
#include "attention/quantize_fp8_config.h"
#include "base/status.h"
#include "jit/jit.h"
#include "tessera/attention.h"

namespace tessera::attention {

// Checks the arguments, then runs on their device.
Status quantize_fp8(const tessera_quantize_fp8* args, void* stream);

// What the compile gate compiles.
jit::KernelInstance instance_of(const QuantizeFp8Config& config);
QuantizeFp8Config quantize_config(DType dtype, int dim, int rows, bool finds_amax, bool of_whole);

}  // namespace tessera::attention
