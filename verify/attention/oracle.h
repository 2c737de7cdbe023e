// The oracle: attention in scalar fp64, written to be read.
//
//   s_ij  = scale * <q_i, k_j>;  softcap: s = c * tanh(s / c);  ALiBi: s -= slope * |position(i) - j|
//   p_ij  = exp(s_ij) / sum over visible j;  lse_i = log(sum exp(s_ij));  o_i = sum_j p_ij v_j
//
// A kernel passes if its error against the oracle is at most twice that of the plain computation in the same
// precision (products in the input type with fp32 sums, softmax in fp32, P and dS rounded to the input type before
// they are multiplied), plus a floor. Nothing here shares code with the kernels, the mask relation included.
//
// Rotated queries and new keys are rounded to the input type before anything else, as the contract has it. In a cache of
// e4m3, new keys and values are then divided by their scale in fp32, and rounded; if each has its own, that is the least
// power of two with which they fit.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "attention/problem.h"
#include "verify/host_tensor.h"

namespace tessera::oracle {

using verify::HostTensor;

// q, k, v, o and their gradients are [B, S, H, D] (varlen: [1, total, H, D]; paged k and v: [pages, page_size, H, D]);
// lse and d_lse are [B, H, S, 1] (varlen: [1, H, total, 1]).

// What is asked. Values of q, k, v and d_o are expected to be rounded to problem.dtype already.
struct Inputs {
  AttentionProblem problem;
  HostTensor q, k, v;                    // fp8, rounds_to_fp8, fp8_cache: what e4m3 holds times its scale
  HostTensor q_e4m3, k_e4m3, v_e4m3;     // fp8, fp8_cache (k and v): what e4m3 holds
  HostTensor q_given, k_given, v_given;  // rounds_to_fp8: before that
  // fp8, fp8_cache: [1, B or 1, H or 1, blocks]; beside the keys of a cache [1, rows or pages, H or 1, keys or 1]
  HostTensor q_scale, k_scale, v_scale;
  HostTensor d_o;                                        // backward
  HostTensor d_lse;                                      // backward, if problem.with_dlse
  std::vector<double> alibi_slopes;                      // [Hq] or [B * Hq], if problem.alibi
  std::vector<std::int32_t> cu_seqlens_q, cu_seqlens_k;  // [B + 1], if problem.varlen
  std::vector<std::int32_t> cache_seqlens;               // [B], decode, before an append; empty: the whole cache
  std::vector<std::int32_t> page_table;                  // [B, max_pages_per_seq], if problem.paged

  HostTensor k_new, v_new;                    // [B, Sn, Hkv, D], decode, if problem.seq_new
  HostTensor rotary_cos, rotary_sin;          // [1, 1, positions, R / 2], if problem.rotary_dim
  std::vector<std::int32_t> rotary_seqlens;   // [B], or empty: cache_seqlens
  std::vector<std::int32_t> cache_batch_idx;  // [B], or empty: sequence b's row of k and v is b
  std::vector<std::int32_t> leftpad_k;        // [B], or empty
};

struct Outputs {
  HostTensor o, lse;
  HostTensor dq, dk, dv;             // if problem.op is kBackward
  HostTensor k, v;                   // the cache afterwards, if problem.seq_new; fp8_cache: what e4m3 holds
  HostTensor k_scale, v_scale;       // and its scales, if those of new keys are written
  std::vector<std::int32_t> status;  // [B], decode
};

// The oracle's own mask relation: does query i of a sequence of len_q see key j of len_k?
bool is_visible(const AttentionProblem& problem, std::int64_t i, std::int64_t j, std::int64_t len_q,
                std::int64_t len_k);

// Decode: whether the lengths or indices of sequence b do not fit the cache. Such a sequence's o is 0 and its lse -inf.
bool is_refused(const Inputs& inputs, std::int64_t b);

// Visible (query, key) pairs of one head, summed over the batch.
std::int64_t count_visible_pairs(const Inputs& inputs);

// Of sequence b and a head.
double scale_of(const HostTensor& scale, std::int64_t b, std::int64_t head);

// Scales beside the keys of a cache: the index of that of the vector that begins at element `at` of k or v.
std::size_t key_scale_index(const HostTensor& scale, const HostTensor& cache, std::int64_t at);

// Decode: the inputs with q and k_new rotated, and k_new and v_new in the cache. Lengths stay those before the append.
Inputs appended(const Inputs& inputs);

// fp64 throughout. threads 0: as many as the machine has. Not bound by Tessera's own thread setting.
Outputs attention(const Inputs& inputs, int threads = 0);

// The plain same-precision computation that sets the scale of acceptable error. Outputs are rounded to the input type
// (lse to fp32).
Outputs plain_attention(const Inputs& inputs, int threads = 0);

}  // namespace tessera::oracle
