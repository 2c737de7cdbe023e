#include "gemm/pad_rows.h"

#include <algorithm>
#include <climits>

#include "base/format.h"
#include "gemm/gpu.h"
#include "jit/config_text.h"

namespace tessera::gemm {
namespace {

constexpr int kThreads = 256;
constexpr int kChunks = 2;           // per thread: more loads in flight
constexpr unsigned kCopyGroups = 2;  // in which a thread's copies are every second one

}  // namespace

GemmPadRowsConfig pad_config() { return {.chunks = kChunks}; }

jit::KernelInstance instance_of(const GemmPadRowsConfig& config) {
  return {.name = format("gemm_pad_rows_c{}", config.chunks),
          .header = "gemm/pad_rows.cuh",
          .entry = "gemm_pad_rows",
          .params = "GemmPadRowsParams",
          .config = jit::config_text("GemmPadRowsConfig", config),
          .threads = kThreads,
          .min_blocks = 4,
          .dynamic_smem_bytes = 0,
          .pdl = true};
}

std::int64_t padded_stride(std::int64_t columns) { return ceil_div(columns, 8) * 8; }

std::size_t padded_bytes(std::int64_t rows, std::int64_t columns) {
  return static_cast<std::size_t>(saturating_product(rows, padded_stride(columns), 2));
}

Result<cuda::Work<GemmPadRowsParams>> pad_work(const GemmView& from, void* to, std::int64_t row_stride,
                                               std::int64_t rows, std::int64_t columns, std::span<const int> shifts) {
  const std::int64_t chunks = row_stride / 8;
  const std::int64_t blocks = ceil_div(saturating_product(rows, chunks), std::int64_t{kThreads} * kChunks);
  if (blocks > INT_MAX) return Status(TESSERA_UNSUPPORTED, "gemm_pad_rows: more rows than one grid can cover");
  cuda::Work<GemmPadRowsParams> work = {};
  work.params.from = matrix_of(from);
  work.params.to = {to, row_stride, rows * row_stride};
  work.params.rows = rows;
  work.params.columns = static_cast<int>(columns);
  std::copy(shifts.begin(), shifts.end(), work.params.shift);
  work.params.copies = static_cast<int>(shifts.size());
  work.params.row_chunks = static_cast<unsigned>(chunks);
  work.grid = {static_cast<unsigned>(blocks), shifts.size() > 1 ? kCopyGroups : 1, 1};
  return work;
}

double pad_time(std::int64_t rows, std::int64_t columns, std::int64_t copies) {
  return step_time(static_cast<double>(1 + copies) * static_cast<double>(padded_bytes(rows, columns)));
}

}  // namespace tessera::gemm
