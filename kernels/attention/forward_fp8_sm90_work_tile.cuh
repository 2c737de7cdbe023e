// What the code that attention/forward_fp8_sm90.cuh shares with attention/forward_sm90.cuh asks of its Config
// (forward_sm90_work_tile.cuh).
#pragma once

#include "attention/forward_fp8_sm90_config.h"
#include "attention/forward_sm90_work_tile.cuh"

namespace tessera {

constexpr TileShape q_tile_of(const AttentionForwardFp8Sm90Config& config) {
  return {block_q_of(config) / q_boxes_of(config), config.rounds_q ? config.dim_qk : fp8_columns(config.dim_qk)};
}
constexpr bool loads_q_late(const AttentionForwardFp8Sm90Config& config) { return config.q_in_sums; }
constexpr TileShape k_tile_of(const AttentionForwardFp8Sm90Config& config) {
  return {config.block_k, fp8_columns(config.dim_qk)};
}
constexpr TileShape v_tile_of(const AttentionForwardFp8Sm90Config& config) {
  return {config.dim_v, fp8_columns(config.block_k)};
}
constexpr bool has_transposed_v(const AttentionForwardFp8Sm90Config&) { return true; }
constexpr ForwardFp8Sm90Layout layout_of(const AttentionForwardFp8Sm90Config& config) {
  return forward_fp8_sm90_layout(config);
}

// Of a packed sequence. The map of V transposed moves by 16-bit columns, and on its last axis by groups of keys.
__forceinline__ RowOrigin transposed_v_origin(const AttentionForwardFp8Sm90Params& p,
                                              const ForwardSm90WorkTileInfo& info) {
  const int length = static_cast<int>(value_length(info.len_k));
  const RowOrigin origin = row_origin(static_cast<int>(value_length(p.seq_k)), length,
                                      static_cast<int>(value_start(p.cu_seqlens_k[info.batch], info.batch)));
  return {origin.y / 2, origin.z / kValueGroup};
}

}  // namespace tessera
