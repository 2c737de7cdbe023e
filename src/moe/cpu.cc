// The steps on the CPU. Results do not depend on the number of threads.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "base/arithmetic.h"
#include "cpu/elements.h"
#include "cpu/thread_pool.h"
#include "gemm/cpu/activations.h"
#include "moe/steps.h"

namespace tessera::moe {
namespace {

using tessera::cpu::load;
using tessera::cpu::load_row;
using tessera::cpu::parallel_for;
using tessera::cpu::sigmoid;
using tessera::cpu::store;
using tessera::cpu::store_row;
using T = MoeTensor;

std::int64_t pair_at(const MoeProblem& p, std::int64_t token, std::int64_t j) { return token * p.top_k + j; }
int row_of(const MoeArgs& args, std::int64_t pair) {
  return moe_row(args.data<int>(T::kPositions)[pair], static_cast<int>(args.problem.pairs()));
}

// The logits of a token with what makes scores of them.
struct Logits {
  const MoeArgs& args;
  std::int64_t row;  // its first element
  float max = -std::numeric_limits<float>::infinity();
  double sum = 0;  // of scaled scores

  Logits(const MoeArgs& given, std::int64_t token) : args(given), row(token * given[T::kLogits].row_stride) {
    for (std::int64_t e = 0; e < args.problem.experts; ++e) max = std::max(max, at(e));
    for (std::int64_t e = 0; e < args.problem.experts; ++e) sum += scaled_score(e);
  }
  float at(std::int64_t expert) const { return load(args.problem.logits_dtype, args[T::kLogits].data, row + expert); }
  // Scores, all divided by the same number, so that the largest does not underflow.
  float scaled_score(std::int64_t expert) const {
    const float x = at(expert);
    if (args.problem.scoring == kMoeSoftmax) return std::exp(x - max);
    return max < 0 ? std::exp(x - max) / (1 + std::exp(x)) : sigmoid(x);
  }
  float share(std::int64_t expert) const { return static_cast<float>(scaled_score(expert) / sum); }

  // An order of logits as integers; NaN is below all. Adding 0 makes -0 equal to 0.
  std::uint32_t order_of(std::int64_t expert) const {
    const float x = at(expert) + 0.0f;
    const auto bits = std::bit_cast<std::uint32_t>(x);
    return std::isnan(x) ? 1 : (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
  }
  // The first of all experts that come after this one, by falling order, then by rising index.
  std::int64_t after(std::int64_t expert) const {
    std::int64_t best = -1;
    for (std::int64_t e = 0; e < args.problem.experts; ++e) {
      const std::uint32_t order = order_of(e);
      const bool later = expert < 0 || order < order_of(expert) || (order == order_of(expert) && e > expert);
      if (later && (best < 0 || order > order_of(best))) best = e;
    }
    return best;
  }
};

void route(const MoeArgs& args, int threads) {
  const MoeProblem& p = args.problem;
  if (p.scoring == kMoeGiven) return;
  int* experts = args.data<int>(T::kExperts);
  float* weights = args.data<float>(T::kWeights);
  parallel_for(p.m, threads, [&](std::int64_t token, int) {
    const Logits logits(args, token);
    double sum = 0;
    std::int64_t expert = -1;
    for (std::int64_t j = 0; j < p.top_k; ++j) {
      expert = logits.after(expert);
      experts[pair_at(p, token, j)] = static_cast<int>(expert);
      sum += logits.scaled_score(expert);
    }
    for (std::int64_t j = 0; j < p.top_k; ++j) {
      const std::int64_t pair = pair_at(p, token, j);
      const int e = experts[pair];
      weights[pair] = p.normalized               ? static_cast<float>(logits.scaled_score(e) / sum)
                      : p.scoring == kMoeSoftmax ? logits.share(e)
                                                 : sigmoid(logits.at(e));
    }
  });
}

void sort(const MoeArgs& args, int threads) {
  const MoeProblem& p = args.problem;
  const int* experts = args.data<int>(T::kExperts);
  int* offsets = args.data<int>(T::kOffsets);
  const auto counts = [&](std::int64_t pair) { return experts[pair] >= 0 && experts[pair] < p.experts; };
  std::fill_n(offsets, p.experts + 1, 0);
  for (std::int64_t pair = 0; pair < p.pairs(); ++pair) {
    if (counts(pair)) ++offsets[experts[pair] + 1];
  }
  if (args[T::kBalanceLoss].data != nullptr) {
    std::vector<double> losses(static_cast<std::size_t>(p.m));
    parallel_for(p.m, threads, [&](std::int64_t token, int) {
      const Logits logits(args, token);
      double loss = 0;
      for (std::int64_t e = 0; e < p.experts; ++e) loss += static_cast<double>(logits.share(e)) * offsets[e + 1];
      losses[static_cast<std::size_t>(token)] = loss;
    });
    double sum = 0;
    for (const double loss : losses) sum += loss;
    const auto tokens = static_cast<double>(std::max<std::int64_t>(p.m, 1));
    *args.data<float>(T::kBalanceLoss) = static_cast<float>(sum * static_cast<double>(p.experts) / (tokens * tokens));
  }
  for (std::int64_t e = 0; e < p.experts; ++e) offsets[e + 1] += offsets[e];
  std::vector<int> next(offsets, offsets + p.experts);
  for (std::int64_t pair = 0; pair < p.pairs(); ++pair) {
    args.data<int>(T::kPositions)[pair] = counts(pair) ? next[static_cast<std::size_t>(experts[pair])]++ : -1;
  }
}

void permute(const MoeArgs& args, int threads) {
  const MoeProblem& p = args.problem;
  if (p.op == MoeOp::kForward) sort(args, threads);
  const auto size = static_cast<std::int64_t>(size_of(p.dtype));
  const auto copy = [&](T from, T to, std::int64_t token, std::int64_t row) {
    if (args[to].data == nullptr) return;
    std::memcpy(args.data<std::byte>(to) + row * args[to].row_stride * size,
                args.data<std::byte>(from) + token * args[from].row_stride * size,
                static_cast<std::size_t>(p.k * size));
  };
  parallel_for(p.m, threads, [&](std::int64_t token, int) {
    for (std::int64_t j = 0; j < p.top_k; ++j) {
      const int row = row_of(args, pair_at(p, token, j));
      if (row < 0) continue;
      if (copies_x(p)) copy(T::kX, T::kXRows, token, row);
      if (p.op == MoeOp::kForward) continue;
      copy(T::kDout, T::kDoutRows, token, row);
      args.data<float>(T::kRowWeights)[row] = args.data<float>(T::kWeights)[pair_at(p, token, j)];
    }
  });
}

constexpr std::int64_t kChunk = 256;  // columns that are widened to fp32 at a time

TESSERA_CLONED void combine_row(const MoeArgs& args, std::int64_t token) {
  const MoeProblem& p = args.problem;
  const bool forward = p.op == MoeOp::kForward;
  const GemmView &rows = args[forward ? T::kOutRows : T::kDxRows], &out = args[forward ? T::kOut : T::kDx];
  float sums[kChunk], x[kChunk];
  for (std::int64_t first = 0; first < p.k; first += kChunk) {
    const std::int64_t count = std::min(kChunk, p.k - first);
    std::fill_n(sums, count, 0.0f);
    for (std::int64_t j = 0; j < p.top_k; ++j) {
      const std::int64_t pair = pair_at(p, token, j);
      const int row = row_of(args, pair);
      if (row < 0) continue;
      const float weight = forward ? args.data<float>(T::kWeights)[pair] : 1.0f;
      load_row(p.dtype, rows.data, row * rows.row_stride + first, count, x);
      for (std::int64_t i = 0; i < count; ++i) sums[i] += weight * x[i];
    }
    store_row(p.dtype, out.data, token * out.row_stride + first, count, sums);
  }
}

void combine(const MoeArgs& args, int threads) {
  parallel_for(args.problem.m, threads, [&](std::int64_t token, int) { combine_row(args, token); });
}

TESSERA_CLONED void elements_row(const MoeArgs& args, std::int64_t row) {
  using namespace gemm::cpu_backend;
  const MoeProblem& p = args.problem;
  const bool gated = p.has(T::kGate);
  const float weight = args.data<float>(T::kRowWeights)[row];
  float before[kChunk], dhidden[kChunk], gate[kChunk], active[kChunk], slope[kChunk], hidden[kChunk], sum = 0;
  for (std::int64_t first = 0; first < p.hidden; first += kChunk) {
    const std::int64_t count = std::min(kChunk, p.hidden - first);
    const auto read = [&](T t, float* to) {
      load_row(p.dtype, args[t].data, row * args[t].row_stride + first, count, to);
    };
    const auto write = [&](T t, const float* from) {
      if (args[t].data != nullptr) {
        store_row(p.dtype, args[t].data, row * args[t].row_stride + first, count, from);
      }
    };
    read(T::kBefore, before);
    read(T::kDhidden, dhidden);
    if (gated) read(T::kBeforeGate, gate);
    const float* const of = gated ? gate : before;
    derivative(p.activation, of, count, slope);
    activated(p.activation, of, count, active);
    for (std::int64_t i = 0; i < count; ++i) hidden[i] = gated ? before[i] * active[i] : active[i];
    sum += tessera::cpu::sum_of(count, [&](std::int64_t i) { return dhidden[i] * hidden[i]; });
    for (std::int64_t i = 0; i < count; ++i) {
      hidden[i] *= weight;
      dhidden[i] *= weight;
      if (gated) before[i] *= dhidden[i] * slope[i];
      dhidden[i] *= gated ? active[i] : slope[i];
    }
    write(T::kHidden, hidden);
    write(T::kDbefore, dhidden);
    if (gated) write(T::kDbeforeGate, before);
  }
  args.data<float>(T::kRowDweights)[row] = sum;
}

void elements(const MoeArgs& args, int threads) {
  const std::int64_t rows =
      std::min<std::int64_t>(args.data<int>(T::kOffsets)[args.problem.experts], args.problem.pairs());
  parallel_for(rows, threads, [&](std::int64_t row, int) { elements_row(args, row); });
}

// kernels/moe/route.cuh has the formulas.
void route_backward(const MoeArgs& args, int threads) {
  const MoeProblem& p = args.problem;
  const int *experts = args.data<int>(T::kExperts), *offsets = args.data<int>(T::kOffsets);
  const float* weights = args.data<float>(T::kWeights);
  const auto dweight = [&](std::int64_t pair) {
    const int row = row_of(args, pair);
    return row >= 0 ? args.data<float>(T::kRowDweights)[row] : 0.0f;
  };
  if (p.scoring == kMoeGiven) {
    for (std::int64_t pair = 0; pair < p.pairs(); ++pair) args.data<float>(T::kDweights)[pair] = dweight(pair);
    return;
  }
  const float* dloss = args.data<float>(T::kDbalanceLoss);
  const auto tokens = static_cast<float>(p.m);
  const float per_pair = dloss == nullptr ? 0.0f : *dloss * static_cast<float>(p.experts) / tokens / tokens;
  const bool of_shares = p.scoring == kMoeSoftmax && !p.normalized;
  std::vector<float> scratch(static_cast<std::size_t>(threads * p.experts * 2));
  parallel_for(p.m, threads, [&](std::int64_t token, int slot) {
    const Logits logits(args, token);
    float* dshare = scratch.data() + slot * p.experts * 2;
    float* direct = dshare + p.experts;
    for (std::int64_t e = 0; e < p.experts; ++e) {
      dshare[e] = per_pair * static_cast<float>(offsets[e + 1] - offsets[e]);
      direct[e] = 0;
    }
    float mean_dweight = 0;
    for (std::int64_t j = 0; p.normalized && j < p.top_k; ++j) {
      mean_dweight += weights[pair_at(p, token, j)] * dweight(pair_at(p, token, j));
    }
    for (std::int64_t j = 0; j < p.top_k; ++j) {
      const std::int64_t pair = pair_at(p, token, j);
      if (experts[pair] < 0 || experts[pair] >= p.experts) continue;
      if (of_shares) {
        dshare[experts[pair]] += dweight(pair);
      } else {
        direct[experts[pair]] = weights[pair] * (dweight(pair) - mean_dweight);
      }
    }
    float mean = 0;
    for (std::int64_t e = 0; e < p.experts; ++e) mean += dshare[e] * logits.share(e);
    for (std::int64_t e = 0; e < p.experts; ++e) {
      float d = direct[e] + logits.share(e) * (dshare[e] - mean);
      if (p.scoring == kMoeSigmoid) d /= 1 + std::exp(logits.at(e));
      store(p.logits_dtype, args[T::kDlogits].data, token * args[T::kDlogits].row_stride + e, d);
    }
  });
}

}  // namespace

void run_on_cpu(Step step, const MoeArgs& args, int threads) {
  threads = std::max(threads, 1);
  switch (step) {
    case Step::kRoute:
      return route(args, threads);
    case Step::kPermute:
      return permute(args, threads);
    case Step::kCombine:
      return combine(args, threads);
    case Step::kElements:
      return elements(args, threads);
    case Step::kRouteBackward:
      return route_backward(args, threads);
  }
}

}  // namespace tessera::moe
