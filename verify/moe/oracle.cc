#include <algorithm>
#include <cmath>
#include <numeric>

#include "verify/gemm/oracle.h"
#include "verify/mlp/cases.h"
#include "verify/moe/cases.h"

namespace tessera::verify::moe {
namespace {

using T = MoeTensor;
using M = MlpTensor;

double log_sigmoid(double x) { return x < 0 ? x - std::log1p(std::exp(x)) : -std::log1p(std::exp(-x)); }

HostTensor tensor_of(const MoeProblem& p, T tensor) {
  const auto dims = shape_of(p, tensor).dims;
  return {1, dims[0], dims[1], dims[2]};
}

// The scores of a token in fp64. Those that are divided by a sum are relative to the largest, since sigmoids may underflow.
struct Scores {
  std::vector<double> score, relative, share;
  std::vector<double> slope;  // the derivative of a score, divided by the score; of softmax without the part of the sum

  Scores(const MoeProblem& p, const HostTensor& logits, std::int64_t token) {
    const bool softmax = p.scoring == kMoeSoftmax;
    const auto log_score = [&](std::int64_t e) {
      const double x = logits.at(0, 0, token, e);
      return softmax ? x : log_sigmoid(x);
    };
    double max = -INFINITY, sum = 0;
    for (std::int64_t e = 0; e < p.experts; ++e) max = std::max(max, log_score(e));
    for (std::int64_t e = 0; e < p.experts; ++e) {
      relative.push_back(std::exp(log_score(e) - max));
      slope.push_back(softmax ? 1 : std::exp(log_sigmoid(-logits.at(0, 0, token, e))));
      sum += relative.back();
    }
    for (std::int64_t e = 0; e < p.experts; ++e) {
      share.push_back(relative[static_cast<std::size_t>(e)] / sum);
      score.push_back(softmax ? share.back() : std::exp(log_score(e)));
    }
  }
};

template <class Each>
void for_each_pair(const MoeProblem& p, Each each) {
  for (std::int64_t token = 0; token < p.m; ++token) {
    for (std::int64_t j = 0; j < p.top_k; ++j) each(token, j);
  }
}

// The plain computation has the MLP family's, and rounds every tensor.
class Computation {
 public:
  Computation(const MoeProblem& p, const Tensors& in, bool is_plain, int threads)
      : p_(p), in_(in), plain_(is_plain), threads_(threads) {}

  Tensors run() {
    if (p_.op == MoeOp::kForward) {
      results_ = routed(p_, in_);
      for (const T t : {T::kExperts, T::kWeights, T::kPositions, T::kOffsets}) {
        of(t) = is_written(p_, t) ? results_[at(t)] : in_[at(t)];
      }
    } else {
      for (const T t : {T::kExperts, T::kWeights, T::kPositions, T::kOffsets}) of(t) = in_[at(t)];
    }
    for (int i = 0; i < kMoeGivenTensors; ++i) {
      const T t = static_cast<T>(i);
      if (p_.has(t) && is_written(p_, t) && results_[at(t)].empty()) results_[at(t)] = tensor_of(p_, t);
    }
    dweights_ = HostTensor(1, 1, p_.m, p_.top_k);
    dweights_.row_noise.resize(static_cast<std::size_t>(p_.m));
    for (std::int64_t e = 0; e < p_.experts; ++e) run_expert(e);
    if (p_.has(T::kDweights)) results_[at(T::kDweights)] = dweights_;
    if (p_.has(T::kDlogits)) route_backward();
    if (plain_) {
      for (int i = 0; i < kMoeGivenTensors; ++i) {
        if (!is_integer(static_cast<T>(i))) round_all(dtype_of(p_, static_cast<T>(i)), results_[at(static_cast<T>(i))]);
      }
    }
    return std::move(results_);
  }

 private:
  static std::size_t at(T t) { return static_cast<std::size_t>(t); }
  HostTensor& of(T t) { return given_[at(t)]; }

  // One expert's layer of a tensor, as a matrix; or rows of a matrix.
  HostTensor layer(T t, std::int64_t expert) const {
    const HostTensor& all = in_[at(t)];
    HostTensor one(1, 1, all.shape[2], all.shape[3]);
    std::copy_n(all.data.begin() + static_cast<std::ptrdiff_t>(expert * one.size()), one.size(), one.data.begin());
    return one;
  }

  void run_expert(std::int64_t expert) {
    const auto first = static_cast<std::int64_t>(of(T::kOffsets).at(0, 0, 0, expert));
    const auto rows = static_cast<std::int64_t>(of(T::kOffsets).at(0, 0, 0, expert + 1)) - first;
    MlpProblem forward;
    forward.dtype = p_.dtype;
    forward.m = rows;
    forward.k = forward.n = p_.k;
    forward.hidden = p_.hidden;
    forward.activation = p_.activation;
    const bool gated = p_.has(T::kGate);
    forward.given = bit_of(M::kX) | bit_of(M::kUp) | bit_of(M::kDown) | bit_of(M::kOut) | bit_of(M::kBefore) |
                    bit_of(gated ? M::kGate : M::kHidden) | (gated ? bit_of(M::kBeforeGate) : 0);
    MlpProblem backward = forward;
    backward.op = MlpOp::kBackward;
    backward.given = bit_of(M::kX) | bit_of(M::kUp) | bit_of(M::kDown) | bit_of(M::kDout) | bit_of(M::kDx) |
                     bit_of(M::kDup) | bit_of(M::kDdown) | (gated ? bit_of(M::kGate) | bit_of(M::kDgate) : 0);
    mlp::Tensors in;
    const auto mlp_at = [](M t) { return static_cast<std::size_t>(t); };
    const bool is_forward = p_.op == MoeOp::kForward;
    HostTensor &x = in[mlp_at(M::kX)], &dout = in[mlp_at(M::kDout)];
    x = dout = HostTensor(1, 1, rows, p_.k);
    const auto each_row = [&](auto use) {
      for_each_pair(p_, [&](std::int64_t token, std::int64_t j) {
        const auto row = static_cast<std::int64_t>(of(T::kPositions).at(0, 0, token, j)) - first;
        if (of(T::kPositions).at(0, 0, token, j) >= 0 && row >= 0 && row < rows) use(token, j, row);
      });
    };
    each_row([&](std::int64_t token, std::int64_t j, std::int64_t row) {
      for (std::int64_t c = 0; c < p_.k; ++c) {
        x.at(0, 0, row, c) = in_[at(T::kX)].at(0, 0, token, c);
        if (!is_forward) {
          dout.at(0, 0, row, c) = in_[at(T::kDout)].at(0, 0, token, c) * of(T::kWeights).at(0, 0, token, j);
        }
      }
    });
    in[mlp_at(M::kUp)] = layer(T::kUp, expert);
    in[mlp_at(M::kDown)] = layer(T::kDown, expert);
    if (gated) in[mlp_at(M::kGate)] = layer(T::kGate, expert);
    const int threads =
        rows * p_.k * p_.hidden < 1 << 18 ? 1 : threads_;  // starting one takes longer than a small expert
    const mlp::Tensors y = plain_ ? mlp::plain(forward, in, threads) : mlp::exact(forward, in, threads);
    const HostTensor& result = y[mlp_at(M::kOut)];
    const auto put = [&](T to, const HostTensor& values, std::int64_t start) {
      if (!p_.has(to)) return;
      HostTensor& all = results_[at(to)];
      std::copy(values.data.begin(), values.data.end(), all.data.begin() + static_cast<std::ptrdiff_t>(start));
      all.terms = std::max(all.terms, values.terms);
      all.row_rounding.insert(all.row_rounding.end(), values.row_rounding.begin(), values.row_rounding.end());
    };
    if (is_forward) {
      HostTensor& out = results_[at(T::kOut)];
      each_row([&](std::int64_t token, std::int64_t j, std::int64_t row) {
        const double weight = of(T::kWeights).at(0, 0, token, j);
        for (std::int64_t c = 0; c < p_.k; ++c) out.at(0, 0, token, c) += weight * result.at(0, 0, row, c);
      });
      const double most = std::max(largest(of(T::kWeights)), 1.0) * static_cast<double>(p_.top_k);
      out.terms = std::max(out.terms, most * (result.terms + largest(result)));
      put(T::kXRows, x, first * p_.k);
      put(T::kBefore, y[mlp_at(M::kBefore)], first * p_.hidden);
      put(T::kBeforeGate, y[mlp_at(M::kBeforeGate)], first * p_.hidden);
      return;
    }
    const mlp::Tensors d = plain_ ? mlp::plain(backward, in, threads) : mlp::exact(backward, in, threads);
    each_row([&](std::int64_t token, std::int64_t j, std::int64_t row) {
      double dot = 0, size = 0;
      for (std::int64_t c = 0; c < p_.k; ++c) {
        const double term = in_[at(T::kDout)].at(0, 0, token, c) * result.at(0, 0, row, c);
        dot += term;
        size += std::abs(term);
        if (p_.has(T::kDx)) results_[at(T::kDx)].at(0, 0, token, c) += d[mlp_at(M::kDx)].at(0, 0, row, c);
      }
      dweights_.at(0, 0, token, j) = dot;
      // A weight's gradient is also the sum of dhidden hidden, whose factors are rounded to their type.
      double squares = 0;
      for (std::int64_t i = 0; i < p_.hidden; ++i) {
        double dhidden = 0;
        for (std::int64_t c = 0; c < p_.k; ++c) {
          dhidden += in_[at(T::kDout)].at(0, 0, token, c) * in[mlp_at(M::kDown)].at(0, 0, c, i);
        }
        const double before = y[mlp_at(M::kBefore)].at(0, 0, row, i);
        const double gate = gated ? y[mlp_at(M::kBeforeGate)].at(0, 0, row, i) : before;
        const double hidden = gemm::activated(p_.activation, gate) * (gated ? before : 1);
        squares += dhidden * dhidden * hidden * hidden;
      }
      double& noise = dweights_.row_noise[static_cast<std::size_t>(token)];
      noise = std::hypot(noise, epsilon_of(p_.dtype) / 2 * std::sqrt(squares));
      dweights_.terms = std::max(dweights_.terms, size);
    });
    if (p_.has(T::kDx)) {
      HostTensor& dx = results_[at(T::kDx)];
      dx.terms = std::max(dx.terms, static_cast<double>(p_.top_k) * (d[mlp_at(M::kDx)].terms + largest(dx)));
    }
    put(T::kDup, d[mlp_at(M::kDup)], expert * p_.hidden * p_.k);
    put(T::kDgate, d[mlp_at(M::kDgate)], expert * p_.hidden * p_.k);
    put(T::kDdown, d[mlp_at(M::kDdown)], expert * p_.hidden * p_.k);
  }

  void route_backward() {
    HostTensor& dlogits = results_[at(T::kDlogits)];
    const double dloss = p_.has(T::kDbalanceLoss) ? in_[at(T::kDbalanceLoss)].data[0] : 0;
    const auto tokens = static_cast<double>(p_.m);
    double most = 0;
    for (std::int64_t token = 0; token < p_.m; ++token) {
      const Scores scores(p_, in_[at(T::kLogits)], token);
      const auto expert_at = [&](std::int64_t j) {
        return static_cast<std::size_t>(of(T::kExperts).at(0, 0, token, j));
      };
      // The gradients of the logits of chosen experts, by their weights, and of all shares.
      std::vector<double> through_weight(scores.score.size()), dshare(scores.score.size());
      double sum = 0, mean_dweight = 0;
      for (std::int64_t j = 0; j < p_.top_k; ++j) sum += scores.relative[expert_at(j)];
      for (std::int64_t j = 0; j < p_.top_k; ++j) {
        mean_dweight += scores.relative[expert_at(j)] / sum * dweights_.at(0, 0, token, j);
      }
      for (std::size_t e = 0; e < dshare.size(); ++e) {
        const double count = of(T::kOffsets).data[e + 1] - of(T::kOffsets).data[e];
        dshare[e] = dloss * static_cast<double>(p_.experts) * count / (tokens * tokens);
        most = std::max(most, std::abs(dshare[e]));
      }
      for (std::int64_t j = 0; j < p_.top_k; ++j) {
        const std::size_t e = expert_at(j);
        const double dw = dweights_.at(0, 0, token, j);
        if (p_.normalized) {
          through_weight[e] = scores.relative[e] / sum * scores.slope[e] * (dw - mean_dweight);
        } else if (p_.scoring == kMoeSoftmax) {
          dshare[e] += dw;
        } else {
          through_weight[e] = scores.score[e] * scores.slope[e] * dw;
        }
      }
      double mean = 0;
      for (std::size_t e = 0; e < dshare.size(); ++e) mean += dshare[e] * scores.share[e];
      for (std::size_t e = 0; e < dshare.size(); ++e) {
        dlogits.at(0, 0, token, static_cast<std::int64_t>(e)) =
            through_weight[e] + scores.share[e] * scores.slope[e] * (dshare[e] - mean);
      }
    }
    // A row's gradient is a difference of dweights, times weights of at most 1.
    dlogits.row_noise = dweights_.row_noise;
    dlogits.terms = 4 * (dweights_.terms + largest(dweights_) + most);
  }

  const MoeProblem& p_;
  const Tensors& in_;
  bool plain_;
  int threads_;
  Tensors given_;  // the router's, whether read or made
  Tensors results_;
  HostTensor dweights_;
};

}  // namespace

Tensors routed(const MoeProblem& p, const Tensors& in) {
  Tensors out;
  const auto make = [&](T t) -> HostTensor& { return out[static_cast<std::size_t>(t)] = tensor_of(p, t); };
  HostTensor &experts = make(T::kExperts), &weights = make(T::kWeights);
  HostTensor &positions = make(T::kPositions), &offsets = make(T::kOffsets), &loss = make(T::kBalanceLoss);
  const HostTensor& logits = in[static_cast<std::size_t>(T::kLogits)];
  std::vector<double> shares(static_cast<std::size_t>(p.experts));
  for (std::int64_t token = 0; token < p.m && p.scoring != kMoeGiven; ++token) {
    const Scores scores(p, logits, token);
    std::vector<std::int64_t> order(static_cast<std::size_t>(p.experts));
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) {
      return logits.at(0, 0, token, a) > logits.at(0, 0, token, b);
    });
    double sum = 0;
    for (std::int64_t j = 0; j < p.top_k; ++j) {
      const std::int64_t expert = order[static_cast<std::size_t>(j)];
      experts.at(0, 0, token, j) = static_cast<double>(expert);
      const auto& chosen_from = p.normalized ? scores.relative : scores.score;
      weights.at(0, 0, token, j) = chosen_from[static_cast<std::size_t>(expert)];
      sum += weights.at(0, 0, token, j);
    }
    for (std::int64_t j = 0; p.normalized && j < p.top_k; ++j) weights.at(0, 0, token, j) /= sum;
    for (std::size_t e = 0; e < shares.size(); ++e) shares[e] += scores.share[e];
  }
  const HostTensor& chosen = p.scoring == kMoeGiven ? in[static_cast<std::size_t>(T::kExperts)] : experts;
  std::int64_t row = 0;
  std::fill(positions.data.begin(), positions.data.end(), -1.0);
  for (std::int64_t e = 0; e < p.experts; ++e) {
    for_each_pair(p, [&](std::int64_t token, std::int64_t j) {
      if (chosen.at(0, 0, token, j) == static_cast<double>(e))
        positions.at(0, 0, token, j) = static_cast<double>(row++);
    });
    offsets.at(0, 0, 0, e + 1) = static_cast<double>(row);
    const double count = offsets.at(0, 0, 0, e + 1) - offsets.at(0, 0, 0, e);
    const auto tokens = static_cast<double>(std::max<std::int64_t>(p.m, 1));
    loss.data[0] += static_cast<double>(p.experts) * count / tokens * shares[static_cast<std::size_t>(e)] / tokens;
  }
  loss.terms = loss.data[0];  // none of them is negative
  weights.terms = 1e-30;      // below fp32's normal numbers, a row of weights has no relative precision
  return out;
}

Tensors exact(const MoeProblem& problem, const Tensors& inputs, int threads) {
  return Computation(problem, inputs, false, threads).run();
}
Tensors plain(const MoeProblem& problem, const Tensors& inputs, int threads) {
  return Computation(problem, inputs, true, threads).run();
}

}  // namespace tessera::verify::moe
