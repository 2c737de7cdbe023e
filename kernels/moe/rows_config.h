// Configs and Params of moe/rows.cuh.
#pragma once

#include "moe/route_config.h"

namespace tessera {

constexpr int kMoePermuteThreads = kMoeMostExperts;
constexpr int kMoeCombineThreads = 256;

struct MoePermuteConfig {
  bool sorts;  // positions and offsets are made; else positions are read
  int vector;  // elements per access: 8 (16 bytes), or 1 if rows do not consist of whole, aligned chunks
};

template <class Visitor>
constexpr void visit_fields(const MoePermuteConfig& config, Visitor&& visit) {
  visit("sorts", config.sorts);
  visit("vector", config.vector);
}

struct MoeCopy {
  const void* from;  // [tokens, columns]; null: none
  Index from_stride;
  void* to;  // [tokens * top_k, columns]
  Index to_stride;
};

struct MoePermuteParams {
  MoeCopy copy[2];
  int* positions;        // [tokens, top_k]; the row of each pair in the order of experts; -1: the pair is skipped
  const int* expert_of;  // [tokens, top_k]: sorts
  const int* counts;     // [chunks, experts]: sorts
  int* offsets;          // [experts + 1], written: sorts
  const float* shares;   // [chunks, experts]; null: no balance loss
  float* balance_loss;   // [1], written
  const float* weights;  // [tokens, top_k]; null: not wanted
  float* row_weights;    // [tokens * top_k], written: weights in the order of experts
  int tokens, columns, top_k;
  int experts, padded_experts;  // the latter a power of two
  int chunks, chunk_tokens;     // as in MoeRouteParams
  float balance_scale;          // experts / tokens^2
};

struct MoeCombineConfig {
  DType dtype;
  int vector;  // as above
  bool weighted;
};

template <class Visitor>
constexpr void visit_fields(const MoeCombineConfig& config, Visitor&& visit) {
  visit("dtype", config.dtype);
  visit("vector", config.vector);
  visit("weighted", config.weighted);
}

struct MoeCombineParams {
  const void* from;  // [rows, columns], in the order of experts
  Index from_stride;
  const int* positions;  // [tokens, top_k]
  const float* weights;  // [tokens, top_k]: weighted
  void* out;             // [tokens, columns], written
  Index out_stride;
  Index tokens;
  int rows;  // tokens * top_k
  int columns, top_k;
  unsigned row_chunks;  // ceil(columns / vector)
};

}  // namespace tessera
