// The oracle: attention in scalar fp64, written to be read, and the rule by which a kernel's result is judged.
//
//   s_ij  = scale * <q_i, k_j>;  softcap: s = c * tanh(s / c);  ALiBi: s -= slope * |position(i) - j|
//   p_ij  = exp(s_ij) / sum over visible j;  lse_i = log(sum exp(s_ij));  o_i = sum_j p_ij v_j
//
// A kernel passes when its error against the oracle is at most twice that of the plain computation in the same
// precision (products in the input type with fp32 sums, softmax in fp32, P and dS rounded to the input type before
// they are multiplied), plus a floor. Nothing here shares code with the kernels, the mask relation included.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "ops/attention.h"

namespace tessera::oracle {

// A compact row-major tensor of fp64 values. q, k, v, o and their gradients are [B, S, H, D] (varlen: [1, total, H, D];
// paged k and v: [pages, page_size, H, D]); lse and d_lse are [B, H, S, 1] (varlen: [1, H, total, 1]).
struct HostTensor {
  std::array<std::int64_t, 4> shape{0, 0, 0, 0};
  std::vector<double> data;

  // Results of the oracle only: the largest sum of absolute terms that went into an element (a bound, not exact). Where
  // terms cancel, fp32 arithmetic can be no better than its epsilon times this.
  double terms = 0;

  // Results of the oracle only, dq and dk: what rounding O to its type does to each row along the last dim, as a norm.
  // Every backward is given a rounded O; the error of rowsum(dO o O) is one number for a whole row of dS, so it does
  // not average out, and the plain computation's may be small by luck.
  std::vector<double> row_noise;

  // Likewise: the error to be expected of each row where dS is rounded to its type before it is multiplied, as a norm.
  // Where the vectors that it multiplies are alike and their sum cancels, a row's error is one random number, and the
  // plain computation's may be small by luck.
  std::vector<double> row_rounding;

  HostTensor() = default;
  HostTensor(std::int64_t a, std::int64_t b, std::int64_t c, std::int64_t d)
      : shape{a, b, c, d}, data(static_cast<std::size_t>(a * b * c * d), 0.0) {}

  bool empty() const { return data.empty(); }
  std::int64_t size() const { return static_cast<std::int64_t>(data.size()); }
  std::int64_t offset(std::int64_t a, std::int64_t b, std::int64_t c, std::int64_t d = 0) const {
    return ((a * shape[1] + b) * shape[2] + c) * shape[3] + d;
  }
  double& at(std::int64_t a, std::int64_t b, std::int64_t c, std::int64_t d = 0) {
    return data[static_cast<std::size_t>(offset(a, b, c, d))];
  }
  double at(std::int64_t a, std::int64_t b, std::int64_t c, std::int64_t d = 0) const {
    return data[static_cast<std::size_t>(offset(a, b, c, d))];
  }
};

// Rounding to nearest, ties to even, straight from fp64; overflow gives infinity.
double round_to(DType dtype, double value);
void round_all(DType dtype, HostTensor& tensor);
std::uint16_t to_bits16(DType dtype, double value);  // fp16 and bf16
double from_bits16(DType dtype, std::uint16_t bits);
double epsilon_of(DType dtype);  // the gap between 1 and the next number: 2^-23, 2^-10, 2^-7

// What is asked. Values of q, k, v and d_o are expected to be rounded to problem.dtype already.
struct Inputs {
  AttentionProblem problem;
  HostTensor q, k, v;
  HostTensor d_o;                                        // backward
  HostTensor d_lse;                                      // backward, where problem.with_dlse
  std::vector<double> alibi_slopes;                      // [Hq] or [B * Hq], where problem.alibi
  std::vector<std::int32_t> cu_seqlens_q, cu_seqlens_k;  // [B + 1], where problem.varlen
  std::vector<std::int32_t> cache_seqlens;               // [B], decode; empty: the whole cache
  std::vector<std::int32_t> page_table;                  // [B, max_pages_per_seq], where problem.paged
};

struct Outputs {
  HostTensor o, lse;
  HostTensor dq, dk, dv;  // where problem.op is kBackward
};

// The oracle's own mask relation: does query i of a sequence of len_q see key j of len_k?
bool is_visible(const AttentionProblem& problem, std::int64_t i, std::int64_t j, std::int64_t len_q,
                std::int64_t len_k);

// Visible (query, key) pairs of one head, summed over the batch.
std::int64_t count_visible_pairs(const Inputs& inputs);

// fp64 throughout. threads 0: as many as the machine has. Not bound by Tessera's own thread setting.
Outputs attention(const Inputs& inputs, int threads = 0);

// The plain same-precision computation that sets the scale of acceptable error. Outputs are rounded to the input type
// (lse to fp32).
Outputs plain_attention(const Inputs& inputs, int threads = 0);

struct Verdict {
  bool pass = false;
  double max_abs_err = 0;   // of the result against the oracle
  double baseline_err = 0;  // of the plain computation against the oracle
  double allowed = 0;       // 2 * baseline_err + floor
  double rel_fro = 0;       // Frobenius norm of the error over that of the oracle
  std::int64_t first_bad_index = -1;
  std::string message;  // empty where it passes

  // Error over what is allowed, by the strictest of the rules: at most 1 where it passes.
  double ratio = 0;
};

// Passes when, both in the largest element and in the Frobenius norm,
//   error <= 2 * baseline error
//            + floor * (epsilon_of(dtype) * size of the oracle's values + fp32 epsilon * terms + row_noise)
// each row along the last dim is held against a wider bound of its own (judge.cc: judge_rows), no element is NaN, and
// infinities stand exactly where the oracle has them. dtype is that of the tensor judged: the input type for o and
// gradients, fp32 for lse.
Verdict judge(const HostTensor& result, const HostTensor& oracle, const HostTensor& baseline, DType dtype,
              double floor);

}  // namespace tessera::oracle
