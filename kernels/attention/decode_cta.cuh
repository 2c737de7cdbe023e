// What all parts of attention/decode.cuh share: its tiles in shared memory, its barriers, and where rows and keys are.
#pragma once

#include "attention/decode_cache.cuh"
#include "attention/decode_schedule.cuh"
#include "ptx/barrier.cuh"
#include "ptx/mbarrier.cuh"

namespace tessera {

template <bool tma, int rows, int dim>
struct DecodeTile {
  using Type = SharedTile<rows, dim>;
};
template <int rows, int dim>
struct DecodeTile<true, rows, dim> {
  using Type = AtomTile<rows, dim>;
};

template <AttentionDecodeConfig config>
struct DecodeCta {
  static constexpr DType kType = config.dtype;
  static constexpr bool kE4m3 = config.e4m3_cache;
  static constexpr bool kKeyScales = config.key_scales;
  static constexpr int kWarps = config.row_warps * config.key_warps;
  static constexpr int kThreads = kWarps * 32;  // of the warps that compute
  static constexpr bool kTma = config.box_rows > 0;
  static constexpr int kAllThreads = kThreads + (kTma ? 32 : 0);  // and of the producer warp
  static constexpr int kRows = config.row_warps * 16;
  static constexpr int kKeysPerWarp = config.block_k / config.key_warps;
  static constexpr int kKeyTiles = kKeysPerWarp / 8;
  static constexpr int kValueTiles = config.dim_v / 8;
  // Of these, that a warp has after the key warps' outputs have been merged.
  static constexpr int kMergedTiles = (kValueTiles + config.key_warps - 1) / config.key_warps;
  // Q stays in registers if the output leaves room for it.
  static constexpr int kKeptSteps = decode_keeps_queries(config) ? (config.dim_qk + 15) / 16 : 0;
  // Scores are summed in two halves, which is more accurate, if there are registers for it.
  static constexpr bool kInHalves = kKeyTiles <= (kE4m3 && kTma ? 2 : 4);
  static_assert(kKeysPerWarp % 16 == 0);
  static_assert(kE4m3 || !kKeyScales);

  using TileQ = SharedTile<kRows, config.dim_qk>;
  using TileK = typename DecodeTile<kTma, config.block_k, decode_columns(config, config.dim_qk)>::Type;
  using TileV = typename DecodeTile<kTma, config.block_k, decode_columns(config, config.dim_v)>::Type;
  using Cache = CacheRows<config.paged>;
  using Scales = CacheRows<config.paged, float>;
  static constexpr bool kAsync = config.stages > 1;
  static_assert(!kAsync || kTma || TileLoader<TileK, kThreads, config.vector>::kAsync);

  const AttentionDecodeParams& p;
  unsigned stages;  // address in shared memory
  int lane, row_warp, key_warp;

  __forceinline__ explicit DecodeCta(const AttentionDecodeParams& params) : p(params) {
    extern __shared__ __align__(kTileAlignment) unsigned char shared[];
    stages = shared_address(shared);
    const int thread = threadIdx.x;
    lane = thread % 32;
    row_warp = thread / 32 % config.row_warps;
    key_warp = thread / 32 / config.row_warps;
  }

  __forceinline__ TileQ queries() const { return {stages + config.stages * decode_stage_bytes(config)}; }
  __forceinline__ unsigned exchange() const { return queries().base + decode_own_query_bytes(config); }
  __forceinline__ unsigned barriers() const { return exchange() + decode_exchange_bytes(config); }
  __forceinline__ TileK tile_k(unsigned stage) const { return {stages + stage * decode_stage_bytes(config)}; }
  __forceinline__ TileV tile_v(unsigned stage) const {
    return {stages + stage * decode_stage_bytes(config) + TileK::kBytes};
  }
  __forceinline__ TileQ tile_q(unsigned stage) const {
    return {stages + stage * decode_stage_bytes(config) + decode_tiles_bytes(config)};
  }
  // K's and V's of the segment or, with key_scales, of the tile's keys.
  __forceinline__ unsigned scales(unsigned stage) const { return tile_q(stage).base + decode_query_bytes(config); }
  __forceinline__ unsigned value_scales(unsigned stage) const { return scales(stage) + config.block_k * 4; }
  __forceinline__ Cache cache_k(const DecodeWalk& at) const {
    return {p, p.k, p.k_strides, at.batch, head_kv_of(at.column)};
  }
  __forceinline__ Cache cache_v(const DecodeWalk& at) const {
    return {p, p.v, p.v_strides, at.batch, head_kv_of(at.column)};
  }

  __forceinline__ Scales scales_k(const DecodeWalk& at) const {
    return {p, p.k_scale, p.k_scale_strides, at.batch, head_kv_of(at.column)};
  }
  __forceinline__ Scales scales_v(const DecodeWalk& at) const {
    return {p, p.v_scale, p.v_scale_strides, at.batch, head_kv_of(at.column)};
  }

  // A column of the schedule is a row block of a key head. Row r of a group's queries is query r % Sq of its head r / Sq.
  __forceinline__ int head_kv_of(int column) const { return static_cast<int>(p.row_blocks.quotient(column)); }
  __forceinline__ int row_of(int column, int local) const {
    return (column - head_kv_of(column) * static_cast<int>(p.row_blocks.by)) * kRows + local;
  }
  __forceinline__ int head_in_group(int row) const { return static_cast<int>(p.schedule.seq_q.quotient(row)); }
  __forceinline__ int query_of(int row) const {
    return row - head_in_group(row) * static_cast<int>(p.schedule.seq_q.by);
  }
  __forceinline__ int head_of(int column, int row) const { return head_kv_of(column) * p.group + head_in_group(row); }

  __forceinline__ int rotary_position(const DecodeWalk& at) const {
    return p.schedule.rotary_seqlens ? p.schedule.rotary_seqlens[at.batch] : at.sequence.old_length;
  }

  __forceinline__ static int cluster_rank() { return blockIdx.x % config.cluster; }

  // For addresses that are not worth a register across the loop. The compiler sees the range, so that divisions are
  // shifts.
  __forceinline__ int lane_again() const { return recomputed(lane) & 31; }

  // TMA: a stage is full when its bytes have arrived, and empty again when every warp is done with it.
  __forceinline__ unsigned full_barrier(int stage) const { return barriers() + stage * 2 * kMbarrierBytes; }
  __forceinline__ unsigned empty_barrier(int stage) const { return full_barrier(stage) + kMbarrierBytes; }

  __forceinline__ void init_barriers() const {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0) {
      for (int stage = 0; stage < config.stages; ++stage) {
        mbarrier_init(full_barrier(stage), 1 + 32);  // the bytes, and the queries of each lane of the producer
        mbarrier_init(empty_barrier(stage), kWarps);
      }
      fence_mbarrier_init();
    }
    __syncthreads();
#endif
  }

  __forceinline__ void sync_warps() const { kTma ? named_barrier_sync(1, kThreads) : __syncthreads(); }
};

}  // namespace tessera
