#include "attention/check_options.h"

#include <cmath>

#include "base/arguments.h"
#include "base/format.h"

namespace tessera::attention {
namespace {

constexpr std::uint32_t kKnownFlags =
    TESSERA_CAUSAL | TESSERA_DETERMINISTIC | TESSERA_ROTARY_INTERLEAVED | TESSERA_BATCH_INVARIANT | TESSERA_FP8 |
    TESSERA_FP8_ROTATE | TESSERA_FP8_RESIDUAL | TESSERA_FP8_FAST | TESSERA_SCALE_PER_PAGE | TESSERA_SCALE_PER_TOKEN;

Status check_cache_scales(const tessera_attention& in, AttentionProblem& p) {
  const bool per_page = (in.flags & TESSERA_SCALE_PER_PAGE) != 0, per_token = (in.flags & TESSERA_SCALE_PER_TOKEN) != 0;
  if (!per_page && !per_token) return {};
  const char* const name = per_page ? "TESSERA_SCALE_PER_PAGE" : "TESSERA_SCALE_PER_TOKEN";
  if (per_page && per_token) {
    return invalid("flags has TESSERA_SCALE_PER_PAGE and TESSERA_SCALE_PER_TOKEN; one of them is accepted");
  }
  if (p.op != AttentionOp::kDecode) {
    return invalid(format("flags has {}, which is for decode; {} does not take it", name, name_of(p.op)));
  }
  if (!p.fp8_cache) return invalid(format("flags has {}, but k is not e4m3", name));
  if (per_page && !p.paged) return invalid("flags has TESSERA_SCALE_PER_PAGE, but page_table is null");
  p.cache_scales = per_page ? CacheScales::kPerPage : CacheScales::kPerToken;
  return {};
}

Status check_flags(const tessera_attention& in, AttentionProblem& p) {
  if ((in.flags & ~kKnownFlags) != 0) {
    return invalid(
        format("flags has unknown bits {:#x}; TESSERA_CAUSAL, TESSERA_DETERMINISTIC, TESSERA_ROTARY_INTERLEAVED, "
               "TESSERA_BATCH_INVARIANT, TESSERA_FP8, TESSERA_FP8_ROTATE, TESSERA_FP8_RESIDUAL, TESSERA_FP8_FAST, "
               "TESSERA_SCALE_PER_PAGE and TESSERA_SCALE_PER_TOKEN are known",
               in.flags & ~kKnownFlags));
  }
  p.causal = (in.flags & TESSERA_CAUSAL) != 0;
  p.deterministic = (in.flags & TESSERA_DETERMINISTIC) != 0;
  p.rotary_interleaved = (in.flags & TESSERA_ROTARY_INTERLEAVED) != 0;
  p.batch_invariant = (in.flags & TESSERA_BATCH_INVARIANT) != 0;
  p.rounds_to_fp8 = (in.flags & TESSERA_FP8) != 0;
  p.rotates = (in.flags & TESSERA_FP8_ROTATE) != 0;
  if (p.rounds_to_fp8 && p.op != AttentionOp::kForward) {
    return invalid(format("flags has TESSERA_FP8, which attention_forward takes; {} does not", name_of(p.op)));
  }
  if (p.rounds_to_fp8 && p.fp8) return invalid("flags has TESSERA_FP8, but q is e4m3 already");
  p.residuals = (in.flags & TESSERA_FP8_RESIDUAL) != 0;
  p.fp8_fast = (in.flags & TESSERA_FP8_FAST) != 0;
  if (p.fp8_fast && !p.rounds_to_fp8 && !p.fp8) {
    return invalid("flags has TESSERA_FP8_FAST, but q is not e4m3, and not rounded to it by TESSERA_FP8");
  }
  if (p.rotates && !p.rounds_to_fp8) return invalid("flags has TESSERA_FP8_ROTATE, but not TESSERA_FP8");
  if (p.residuals && !p.rounds_to_fp8) return invalid("flags has TESSERA_FP8_RESIDUAL, but not TESSERA_FP8");
  if (p.rotates && p.residuals) {
    return invalid("flags has TESSERA_FP8_ROTATE and TESSERA_FP8_RESIDUAL; one of them is accepted");
  }
  constexpr std::int64_t kChannels = 8;
  if (p.residuals && p.dim_qk < kChannels) {
    return invalid(format("q has head dim {}; TESSERA_FP8_RESIDUAL needs at least {}", p.dim_qk, kChannels));
  }
  TESSERA_CHECK(check_cache_scales(in, p));
  if (p.rotary_interleaved && p.rotary_dim == 0) {
    return invalid("flags has TESSERA_ROTARY_INTERLEAVED, but rotary_cos is null");
  }
  if (p.batch_invariant && p.op != AttentionOp::kDecode) {
    return invalid(format("flags has TESSERA_BATCH_INVARIANT, which is for decode, not for {}", name_of(p.op)));
  }
  return {};
}

}  // namespace

Status check_options(const tessera_attention& in, AttentionProblem& p) {
  if (!std::isfinite(in.scale)) {
    return invalid(format("scale is {}; a finite number is accepted, 0 for 1 / sqrt(head dim)", in.scale));
  }
  p.scale = in.scale != 0 ? in.scale : 1.0f / std::sqrt(static_cast<float>(p.dim_qk));
  if (!std::isfinite(in.softcap) || in.softcap < 0) {
    return invalid(format("softcap is {}; a finite number above 0 is accepted, 0 for none", in.softcap));
  }
  p.softcap = in.softcap;
  TESSERA_CHECK(check_flags(in, p));
  if (in.window_left < -1) {
    return invalid(format("window_left is {}; 0 and above are accepted, -1 for no bound", in.window_left));
  }
  if (in.window_right < -1) {
    return invalid(format("window_right is {}; 0 and above are accepted, -1 for no bound", in.window_right));
  }
  p.window_left = in.window_left;
  p.window_right = in.window_right;
  if (in.attention_chunk < 0) {
    return invalid(format("attention_chunk is {}; 1 and above are accepted, 0 for no chunks", in.attention_chunk));
  }
  if (in.attention_chunk > 0 && p.op == AttentionOp::kBackward) {
    return invalid(format("attention_chunk is {}, which attention_backward does not take", in.attention_chunk));
  }
  if (in.attention_chunk > 0 && in.leftpad_k != nullptr) {
    return invalid("attention_chunk and leftpad_k are both given; one of them is accepted");
  }
  p.chunk = in.attention_chunk;
  return {};
}

}  // namespace tessera::attention
