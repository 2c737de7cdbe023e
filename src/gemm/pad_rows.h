// A copy of an operand with rows at multiples of 16 bytes (kernels/gemm/pad_rows.cuh): the first step of recipes whose
// kernel needs them.
#pragma once

#include <span>

#include "cuda/kernel.h"
#include "gemm/pad_rows_config.h"
#include "gemm/problem.h"

namespace tessera::gemm {

GemmPadRowsConfig pad_config();
jit::KernelInstance instance_of(const GemmPadRowsConfig& config);

std::int64_t padded_stride(std::int64_t columns);
std::size_t padded_bytes(std::int64_t rows, std::int64_t columns);
// shifts: by how many columns each copy is shifted. Rows of a copy are row_stride apart, copies rows times that; all of it is
// written.
Result<cuda::Work<GemmPadRowsParams>> pad_work(const GemmView& from, void* to, std::int64_t row_stride,
                                               std::int64_t rows, std::int64_t columns, std::span<const int> shifts);
double pad_time(std::int64_t rows, std::int64_t columns, std::int64_t copies = 1);

}  // namespace tessera::gemm
