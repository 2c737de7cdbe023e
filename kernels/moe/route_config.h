// Configs and Params of moe/route.cuh.
#pragma once

#include "tile/types.h"

namespace tessera {

// Values of Config::scoring.
constexpr int kMoeSoftmax = 0;
constexpr int kMoeSigmoid = 1;
constexpr int kMoeGiven = 2;  // the caller has chosen experts and weights; there are no logits

constexpr int kMoeMostExperts = 512;
constexpr int kMoeMostTopK = 32;  // a lane of a warp has one of a token's experts
constexpr int kMoeRouteThreads = 256;

// The row of a pair in the order of experts; -1 if it is skipped. Of what the caller gives, only rows that exist are used.
constexpr int moe_row(int position, int rows) { return position >= 0 && position < rows ? position : -1; }

struct MoeRouteConfig {
  DType logits_dtype;
  int scoring;
  int per_lane;  // logits of a token that each lane of its warp has: ceil(experts / 32), rounded up to a power of two
};

template <class Visitor>
constexpr void visit_fields(const MoeRouteConfig& config, Visitor&& visit) {
  visit("logits_dtype", config.logits_dtype);
  visit("scoring", config.scoring);
  visit("per_lane", config.per_lane);
}

struct MoeRouteParams {
  const void* logits;  // [tokens, experts]
  Index logits_stride;
  int* expert_of;  // [tokens, top_k], written; kMoeGiven: read
  float* weights;  // [tokens, top_k], written; kMoeGiven: not used
  int* counts;     // [chunks, experts], written
  float* shares;   // [chunks, experts], written; null: no balance loss
  int tokens, experts, top_k;
  int chunk_tokens;  // a CTA has one chunk of consecutive tokens
  bool normalized;
};

struct MoeRouteBackwardParams {
  const void* logits;
  Index logits_stride;
  const int* expert_of;        // [tokens, top_k]
  const float* weights;        // [tokens, top_k]
  const int* positions;        // [tokens, top_k]: rows of row_dweights; negative: the pair was skipped
  const float* row_dweights;   // [tokens * top_k, dweight_parts]: the sum of a row's parts is its gradient
  const int* offsets;          // [experts + 1]
  const float* dbalance_loss;  // [1]; null: none
  void* dlogits;               // like logits, written; kMoeGiven: null
  Index dlogits_stride;
  float* dweights;  // [tokens, top_k], written: kMoeGiven
  int tokens, experts, top_k;
  int dweight_parts;
  bool normalized;
  float balance_scale;  // experts / tokens^2
};

}  // namespace tessera
