#include "attention/gpu.h"

#include <algorithm>
#include <climits>
#include <cmath>

#include "attention/params.h"
#include "attention/quantize_fp8_config.h"
#include "base/format.h"
#include "tile/mask.h"

namespace tessera::attention {

std::optional<std::string> gpu_refuses(const AttentionProblem& p, const Device& device) {
  constexpr std::int64_t kLargestDim = 256;
  if (device.is_cpu()) return "runs on GPUs; the tensors are on the CPU";
  if (p.fp8) return "takes fp16 and bf16, not e4m3";
  if (p.rounds_to_fp8) return "does not round to e4m3";
  if (p.dtype == DType::kFloat32) return "takes fp16 and bf16, not fp32";
  if (p.dtype == DType::kBFloat16 && device.compute < 80) return "bf16 needs sm_80 or newer";
  for (const std::int64_t dim : {p.dim_qk, p.dim_v}) {
    if (dim % 8 != 0 || dim > kLargestDim) return format("head dims are multiples of 8 up to 256, not {}", dim);
  }
  if (p.seq_q >= kUnbounded || p.seq_k >= kUnbounded) return "sequences are shorter than 2^30";
  return std::nullopt;
}

std::optional<std::string> fp8_refuses(const AttentionProblem& p, const Device& device) {
  constexpr std::int64_t kLargestDim = 256;
  if (device.is_cpu()) return "runs on GPUs; the tensors are on the CPU";
  if (!p.fp8 && !p.rounds_to_fp8) return "takes e4m3, or rounds to it if asked to";
  if (p.residuals && p.dim_qk + kResidualColumns > kLargestDim) {
    return format("residual columns are for head dims up to {}, not {}", kLargestDim - kResidualColumns, p.dim_qk);
  }
  if (p.dtype == DType::kFloat32) return "writes fp16 and bf16, not fp32";
  for (const std::int64_t dim : {p.dim_qk, p.dim_v}) {
    if (dim % 16 != 0 || dim > kLargestDim) return format("head dims are multiples of 16 up to 256, not {}", dim);
  }
  if (p.seq_q >= kUnbounded || p.seq_k >= kUnbounded) return "sequences are shorter than 2^30";
  return std::nullopt;
}

std::optional<std::string> hopper_refuses(const AttentionProblem& p, const Device& device) {
  if (device.compute != 90 || !device.specific) return "needs TMA and wgmma (sm_90a)";
  if (!p.vectors || !p.tensor_maps) return "needs rows at multiples of 16 bytes, and positive strides below 2^40 bytes";
  return std::nullopt;
}

std::optional<std::string> fp8_hopper_refuses(const AttentionProblem& p, const Device& device) {
  constexpr std::int64_t kLargestDimOfBlocks = 128;  // above, LSE exceeded what a plain computation's error allows
  if (auto reason = fp8_refuses(p, device)) return reason;
  if (auto reason = hopper_refuses(p, device)) return reason;
  if (p.seq_k == 0 || (p.varlen && p.total_k == 0)) return "there are no keys to load";
  if ((p.k_scale_block > 0 || p.v_scale_block > 0) && std::max(p.dim_qk, p.dim_v) > kLargestDimOfBlocks) {
    return "scales of blocks of keys are for head dims up to 128";
  }
  // Promoted sums are of fp16. In units of a smaller scale of V, those of keys with larger ones may exceed its range.
  if (p.v_scale_block > 0 && needs_fp32_sums(p)) {
    return format("scales of blocks of v are for sums of at most {} keys; TESSERA_FP8_FAST allows more",
                  kTruncatedKeys);
  }
  return std::nullopt;
}

std::int64_t most_keys_seen(const AttentionProblem& p) {
  if (p.chunk > 0 && p.chunk < p.seq_k) return p.chunk;
  const bool bounded = p.window_left >= 0 && (p.causal || p.window_right >= 0);
  if (!bounded || p.window_left > p.seq_k || p.window_right > p.seq_k) return p.seq_k;
  return std::min(p.seq_k, p.window_left + (p.causal ? 0 : p.window_right) + 1);
}

bool needs_fp32_sums(const AttentionProblem& p) { return most_keys_seen(p) > kTruncatedKeys && !p.fp8_fast; }

std::optional<std::string> cache_refuses(const AttentionProblem& p) {
  constexpr std::int64_t kFewQueries = 16;
  if (p.op != AttentionOp::kDecode) return std::nullopt;
  if (p.fp8_cache) return "reads caches of fp16 and bf16, not e4m3";
  if (!p.varlen && p.seq_q <= kFewQueries) return format("takes more than {} queries of a cache", kFewQueries);
  if (p.batch_invariant) return "its tiles, and so its rounding, depend on the batch";
  if (p.batch > INT_MAX / 1024 || p.page_size > INT_MAX || p.seq_new > INT_MAX)
    return "more rows than one grid can cover";
  return std::nullopt;
}

ComputedScores computed_scores(const AttentionProblem& p, int block_q, int block_k) {
  constexpr std::int64_t kSamples = 64;  // query tiles that are counted, evenly spaced: enough, since a mask is a band
  const Mask mask{p.causal, p.alignment == Alignment::kBottomRight, p.window_left, p.window_right, p.chunk};
  const std::int64_t q_tiles = ceil_div(p.seq_q, block_q);
  const std::int64_t samples = std::min(q_tiles, kSamples);
  ComputedScores computed;
  for (std::int64_t sample = 0; sample < samples; ++sample) {
    const std::int64_t first = (2 * sample + 1) * q_tiles / (2 * samples) * block_q;
    const std::int64_t last = std::min(first + block_q, p.seq_q) - 1;
    const Range seen{visible_keys(mask, first, p.seq_q, p.seq_k).begin,
                     std::min<std::int64_t>(visible_keys(mask, last, p.seq_q, p.seq_k).end, p.seq_k)};
    if (seen.empty()) continue;
    const std::int64_t tiles = ceil_div(seen.end, block_k) - seen.begin / block_k;
    const double scores = static_cast<double>(tiles) * block_k * block_q;
    computed.all += scores * static_cast<double>(q_tiles) / static_cast<double>(samples);
    computed.of_longest = std::max(computed.of_longest, scores);
  }
  return computed;
}

std::string fp8_remark(const AttentionProblem& p, double scores) {
  return format(
      "computes {:.3g} scores per head; rounding {} to e4m3 gives a relative error of about {} on normal inputs",
      scores, p.rounds_to_fp8 ? "q, k, v and P" : "P", p.rounds_to_fp8 ? "0.05" : "0.025");
}

double portable_rate(const Device& device) {
  // Measured on an H200 (132 SMs); tensor cores of older architectures do less per clock.
  const double of_hopper = device.compute >= 90 ? 1.0 : device.compute >= 80 ? 0.6 : 0.25;
  return 1.0e6 * of_hopper * device.multiprocessors / 132.0;
}

AttentionProblem representative(const Device& device, AttentionOp op, int dim_qk, int dim_v) {
  AttentionProblem p;
  p.op = op;
  p.dtype = device.compute < 80 ? DType::kFloat16 : DType::kBFloat16;
  p.batch = 1;
  p.seq_q = p.seq_k = 4096;
  p.heads_q = p.heads_kv = 16;
  p.dim_qk = dim_qk;
  p.dim_v = dim_v;
  p.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(dim_qk)));
  return p;
}

AttentionProblem with_variant(AttentionProblem problem, const Variant& variant) {
  problem.causal = variant.masked;
  problem.softcap = variant.score_mod ? 30.0f : 0.0f;
  return problem;
}

}  // namespace tessera::attention
