// What the GPU kernels' host files share: refusals, and how threads share a row.
#pragma once

#include <climits>
#include <optional>
#include <string>
#include <vector>

#include "base/arithmetic.h"
#include "base/format.h"
#include "engine/device.h"
#include "norm/problem.h"
#include "norm/row.h"

namespace tessera::norm {

using engine::Device;

inline std::optional<std::string> gpu_refuses(const NormProblem& p, const Device& device) {
  constexpr std::int64_t kMostColumns = 1 << 28;
  if (device.is_cpu()) return "runs on GPUs; the tensors are on the CPU";
  if (p.columns > kMostColumns) return format("rows have {} elements; up to 2^28 are accepted", p.columns);
  return std::nullopt;
}

inline NormMatrix matrix_of(const NormView& view) { return {view.data, view.row_stride}; }

// Microseconds to move bytes on an H200, beside a launch.
inline double copy_time(double bytes) {
  constexpr double kLaunch = 2.0, kBytesPerMicrosecond = 4e6;
  return kLaunch + bytes / kBytesPerMicrosecond;
}

// The part of a Config that says how threads share a row.
struct RowShare {
  int threads, row_threads, chunks;
  bool looped;
};

// CTAs of a persistent grid with `resident` at a time: as few as give none of them more rows than it must have, so that all
// end together.
inline std::int64_t balanced_ctas(std::int64_t row_groups, std::int64_t resident) {
  if (row_groups <= resident) return row_groups;
  return ceil_div(row_groups, ceil_div(row_groups, resident));
}

// About `wanted` chunks per thread, up to `most`, in CTAs of `threads` or, for long rows, up to 512 threads.
inline RowShare share_row(const NormProblem& p, int threads, int wanted, int most) {
  constexpr std::int64_t kLeastThreads = 8, kMostThreads = 512;
  const std::int64_t chunks = ceil_div(p.columns, norm_chunk_elements(p.dtype));
  std::int64_t row_threads = kLeastThreads;
  while (row_threads < kMostThreads && row_threads * wanted < chunks) row_threads *= 2;
  std::int64_t each = ceil_div(chunks, row_threads);
  if (each > most) each = std::min(wanted, 2);  // in a loop
  return {static_cast<int>(std::max<std::int64_t>(row_threads, threads)), static_cast<int>(row_threads),
          static_cast<int>(each), row_threads * each < chunks};
}

template <class Config>
void set_share(const RowShare& share, Config& config) {
  config.threads = share.threads;
  config.row_threads = share.row_threads;
  config.chunks = share.chunks;
  config.looped = share.looped;
}

// "bf16_r128x4", with what else the name says.
template <class Config>
std::string instance_name(const char* kernel, const Config& c) {
  return format("{}_{}_{}_r{}x{}{}{}{}", kernel, name_of(c.dtype), c.centered ? "layer" : "rms", c.row_threads,
                c.chunks, c.looped ? "_looped" : "", c.residual ? "_residual" : "", c.aligned ? "" : "_unaligned");
}

inline NormProblem representative(NormOp op, DType dtype, std::int64_t columns, bool centered, bool residual,
                                  bool aligned) {
  NormProblem p;
  p.op = op;
  p.dtype = dtype;
  p.rows = 16384;
  p.columns = columns;
  p.centered = centered;
  p.residual = residual;
  p.weight = p.parameters = true;
  p.aligned = aligned;
  return p;
}

}  // namespace tessera::norm
