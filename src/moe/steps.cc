#include "moe/steps.h"

#include <algorithm>
#include <bit>
#include <climits>

#include "base/format.h"
#include "gemm/gpu.h"
#include "jit/config_text.h"
#include "moe/elements_config.h"
#include "moe/rows_config.h"

namespace tessera::moe {
namespace {

using T = MoeTensor;

bool is_backward(const MoeProblem& p) { return p.op == MoeOp::kBackward; }

// 16 bytes at a time, if rows consist of such chunks. Those in the workspace begin at multiples of 16 bytes.
int vector_of(const MoeProblem& p, std::int64_t columns, std::initializer_list<T> tensors) {
  bool aligned = columns % 8 == 0;
  for (const T t : tensors) aligned &= !p.has(t) || (p.aligned & bit_of(t)) != 0;
  return aligned ? 8 : 1;
}

MoeRouteConfig route_config(const MoeProblem& p) {
  if (p.scoring == kMoeGiven) return {DType::kFloat32, kMoeGiven, 1};
  const auto per_lane = std::bit_ceil(static_cast<std::uint64_t>(ceil_div(p.experts, 32)));
  return {p.logits_dtype, p.scoring, static_cast<int>(per_lane)};
}
MoePermuteConfig permute_config(const MoeProblem& p) {
  return {!is_backward(p), vector_of(p, p.k, {T::kX, T::kDout, T::kXRows})};
}
MoeCombineConfig combine_config(const MoeProblem& p) {
  return {p.dtype, vector_of(p, p.k, {is_backward(p) ? T::kDx : T::kOut}), !is_backward(p)};
}
MoeElementsConfig elements_config(const MoeProblem& p) {
  return {p.dtype, p.activation, p.has(T::kGate), vector_of(p, p.hidden, {T::kBefore, T::kBeforeGate})};
}

const char* scalar_suffix(int vector) { return vector == 1 ? "_v1" : ""; }

std::string suffix_of(Step step, const MoeProblem& p) {
  switch (step) {
    case Step::kRoute:
    case Step::kRouteBackward: {
      const MoeRouteConfig c = route_config(p);
      if (c.scoring == kMoeGiven) return "given";
      return format("{}_{}_{}", name_of(c.logits_dtype), c.scoring == kMoeSoftmax ? "softmax" : "sigmoid",
                    c.per_lane * 32);
    }
    case Step::kPermute: {
      const MoePermuteConfig c = permute_config(p);
      return format("{}{}", c.sorts ? "sort" : "copy", scalar_suffix(c.vector));
    }
    case Step::kCombine: {
      const MoeCombineConfig c = combine_config(p);
      return format("{}{}{}", name_of(c.dtype), c.weighted ? "_weighted" : "", scalar_suffix(c.vector));
    }
    default: {
      const MoeElementsConfig c = elements_config(p);
      return format("{}_{}{}{}", name_of(c.dtype), activation_name(c.activation), c.gated ? "_gated" : "",
                    scalar_suffix(c.vector));
    }
  }
}

// Chunks of tokens; one if there are none, because offsets are written even then.
struct Chunks {
  std::int64_t tokens, count;
};
Chunks chunks_of(const MoeProblem& p) {
  const std::int64_t tokens = std::max<std::int64_t>(ceil_div(p.m, kMostChunks), 1);
  return {tokens, std::max<std::int64_t>(ceil_div(p.m, tokens), 1)};
}

float balance_scale(const MoeProblem& p) {
  const auto tokens = static_cast<double>(p.m);
  return p.m == 0 ? 0.0f : static_cast<float>(static_cast<double>(p.experts) / (tokens * tokens));
}

template <class Params>
Status launched(const cuda::Kernel& kernel, const Params& params, std::int64_t ctas, cuda::CUstream stream) {
  if (ctas > INT_MAX) return {TESSERA_UNSUPPORTED, "moe: more rows than one grid can cover"};
  return cuda::launch(kernel, cuda::Work<Params>{params, {static_cast<unsigned>(ctas), 1, 1}}, stream);
}

}  // namespace

const char* name_of(Step step) {
  constexpr const char* kNames[] = {"route", "permute", "combine", "elements", "route_backward"};
  return kNames[static_cast<std::size_t>(step)];
}

jit::KernelInstance instance_of(Step step, const MoeProblem& p) {
  jit::KernelInstance k = {.name = format("moe_{}_{}", name_of(step), suffix_of(step, p)),
                           .header = "moe/route.cuh",
                           .entry = format("moe_{}", name_of(step)),
                           .params = "MoeRouteParams",
                           .config = {},
                           .threads = kMoeRouteThreads,
                           .min_blocks = 1,
                           .dynamic_smem_bytes = 0,
                           .pdl = true};
  switch (step) {
    case Step::kRouteBackward:
      k.params = "MoeRouteBackwardParams";
      [[fallthrough]];
    case Step::kRoute:
      k.config = jit::config_text("MoeRouteConfig", route_config(p));
      break;
    case Step::kPermute:
      k.header = "moe/rows.cuh";
      k.params = "MoePermuteParams";
      k.config = jit::config_text("MoePermuteConfig", permute_config(p));
      k.threads = kMoePermuteThreads;
      k.min_blocks = 2;
      break;
    case Step::kCombine:
      k.header = "moe/rows.cuh";
      k.params = "MoeCombineParams";
      k.config = jit::config_text("MoeCombineConfig", combine_config(p));
      k.threads = kMoeCombineThreads;
      k.min_blocks = 4;
      break;
    case Step::kElements:
      k.header = "moe/elements.cuh";
      k.params = "MoeElementsParams";
      k.config = jit::config_text("MoeElementsConfig", elements_config(p));
      k.threads = kMoeElementsThreads;
      k.min_blocks = 4;
      break;
  }
  return k;
}

Status enqueue(Step step, const MoeArgs& args, const cuda::Kernel& kernel, cuda::CUstream stream) {
  const MoeProblem& p = args.problem;
  const auto [chunk_tokens, chunks] = chunks_of(p);
  const int tokens = static_cast<int>(p.m), experts = static_cast<int>(p.experts), top_k = static_cast<int>(p.top_k);
  switch (step) {
    case Step::kRoute: {
      MoeRouteParams params = {};
      params.logits = args[T::kLogits].data;
      params.logits_stride = args[T::kLogits].row_stride;
      params.expert_of = args.data<int>(T::kExperts);
      params.weights = args.data<float>(T::kWeights);
      params.counts = args.data<int>(T::kCounts);
      params.shares = args.data<float>(T::kShares);
      params.tokens = tokens;
      params.experts = experts;
      params.top_k = top_k;
      params.chunk_tokens = static_cast<int>(chunk_tokens);
      params.normalized = p.normalized;
      return launched(kernel, params, chunks, stream);
    }
    case Step::kPermute: {
      MoePermuteParams params = {};
      const auto copy = [&](T from, T to) -> MoeCopy {
        if (args[to].data == nullptr) return {};
        return {args[from].data, args[from].row_stride, args[to].data, args[to].row_stride};
      };
      if (copies_x(p)) params.copy[0] = copy(T::kX, T::kXRows);
      params.positions = args.data<int>(T::kPositions);
      if (is_backward(p)) {
        params.copy[1] = copy(T::kDout, T::kDoutRows);
        params.weights = args.data<float>(T::kWeights);
        params.row_weights = args.data<float>(T::kRowWeights);
      } else {
        params.expert_of = args.data<int>(T::kExperts);
        params.counts = args.data<int>(T::kCounts);
        params.offsets = args.data<int>(T::kOffsets);
        params.shares = args.data<float>(T::kShares);
        params.balance_loss = args.data<float>(T::kBalanceLoss);
        params.balance_scale = balance_scale(p);
      }
      params.tokens = tokens;
      params.columns = static_cast<int>(p.k);
      params.top_k = top_k;
      params.experts = experts;
      params.padded_experts = static_cast<int>(std::bit_ceil(static_cast<unsigned>(experts)));
      params.chunks = static_cast<int>(chunks);
      params.chunk_tokens = static_cast<int>(chunk_tokens);
      return launched(kernel, params, chunks, stream);
    }
    case Step::kCombine: {
      const T from = is_backward(p) ? T::kDxRows : T::kOutRows, to = is_backward(p) ? T::kDx : T::kOut;
      MoeCombineParams params = {};
      params.from = args[from].data;
      params.from_stride = args[from].row_stride;
      params.rows = static_cast<int>(p.pairs());
      params.positions = args.data<int>(T::kPositions);
      params.weights = args.data<float>(T::kWeights);
      params.out = args[to].data;
      params.out_stride = args[to].row_stride;
      params.tokens = p.m;
      params.columns = static_cast<int>(p.k);
      params.top_k = top_k;
      const std::int64_t row_chunks = ceil_div(p.k, combine_config(p).vector);
      params.row_chunks = static_cast<unsigned>(row_chunks);
      return launched(kernel, params, ceil_div(saturating_product(p.m, row_chunks), kMoeCombineThreads), stream);
    }
    case Step::kElements: {
      const auto matrix = [&](T t) { return gemm::matrix_of(args[t]); };
      MoeElementsParams params = {};
      params.before = matrix(T::kBefore);
      params.before_gate = matrix(T::kBeforeGate);
      params.dhidden = matrix(T::kDhidden);
      params.hidden = matrix(T::kHidden);
      params.dbefore = matrix(T::kDbefore);
      params.dbefore_gate = matrix(T::kDbeforeGate);
      params.row_weights = args.data<float>(T::kRowWeights);
      params.row_dweights = args.data<float>(T::kRowDweights);
      params.last_row = args.data<int>(T::kOffsets) + p.experts;
      params.rows = static_cast<int>(p.pairs());
      params.columns = static_cast<int>(p.hidden);
      return launched(kernel, params, ceil_div(p.pairs(), kMoeElementsThreads / 32), stream);
    }
    case Step::kRouteBackward: {
      MoeRouteBackwardParams params = {};
      params.logits = args[T::kLogits].data;
      params.logits_stride = args[T::kLogits].row_stride;
      params.expert_of = args.data<int>(T::kExperts);
      params.weights = args.data<float>(T::kWeights);
      params.positions = args.data<int>(T::kPositions);
      params.row_dweights = args.data<float>(T::kRowDweights);
      params.dweight_parts = static_cast<int>(args[T::kRowDweights].row_stride);
      params.offsets = args.data<int>(T::kOffsets);
      params.dbalance_loss = args.data<float>(T::kDbalanceLoss);
      params.dlogits = args[T::kDlogits].data;
      params.dlogits_stride = args[T::kDlogits].row_stride;
      params.dweights = args.data<float>(T::kDweights);
      params.tokens = tokens;
      params.experts = experts;
      params.top_k = top_k;
      params.normalized = p.normalized;
      params.balance_scale = balance_scale(p);
      return launched(kernel, params, ceil_div(p.m, kMoeRouteThreads / 32), stream);
    }
  }
  return {};
}

double bytes_of(Step step, const MoeProblem& p) {
  const auto size = static_cast<double>(size_of(p.dtype));
  const double x = static_cast<double>(p.m) * static_cast<double>(p.k) * size;
  const double rows = x * static_cast<double>(p.top_k);
  switch (step) {
    case Step::kPermute:
      return (x + rows) * (is_backward(p) ? 2 : 1);
    case Step::kCombine:
      return x + rows;
    case Step::kElements:
      return static_cast<double>(saturating_product(p.pairs(), p.hidden)) * size * (p.has(T::kGate) ? 6 : 4);
    default:
      return static_cast<double>(p.m) * static_cast<double>(p.experts) * 4;
  }
}

}  // namespace tessera::moe
