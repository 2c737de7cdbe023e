// The oracle for sequences too long to be computed whole: some query rows and some keys, in fp64, over all that they
// see.
//
// A row of O, LSE or dQ needs its own query and every key: the full oracle's arithmetic, for that row alone. A row of
// dK or dV needs P and dS of every query at that key, and so every query's LSE and rowsum(dO o O), which cost as much
// as the whole forward. These are taken from what the backward itself is given, its inputs o and lse: dK and dV are
// then exact for these inputs, and o and lse are judged by rows of their own.
#pragma once

#include "verify/attention/oracle.h"

namespace tessera::oracle {

struct Sample {
  std::vector<std::int64_t> rows;  // of every head's queries
  std::vector<std::int64_t> keys;  // of every key head
};

// `count` of each, always with the first and the last; the rest spread over the length, at offsets within a tile that
// differ.
Sample make_sample(const AttentionProblem& problem, std::int64_t count, std::uint64_t seed);

// o, lse: [B, Rows, Hq, Dv] and [B, Hq, Rows, 1]; backward also dq: [B, Rows, Hq, Dqk], dk and dv: [B, Keys, Hkv, D].
// saved_o, saved_lse: what the backward is given, whole. No packed sequences, no pages.
Outputs sampled_attention(const Inputs& inputs, const Sample& sample, const HostTensor& saved_o,
                          const HostTensor& saved_lse, int threads = 0);
// As plain_attention is to attention.
Outputs sampled_plain_attention(const Inputs& inputs, const Sample& sample, const HostTensor& saved_o,
                                const HostTensor& saved_lse, int threads = 0);

// The sample's part of whole results.
Outputs take_sample(const AttentionProblem& problem, const Sample& sample, const Outputs& whole);

}  // namespace tessera::oracle
