// The end of a segment in attention/decode.cuh: key warps are merged, and a result, whole or partial, is stored or sent to
// the cluster.
#pragma once

#include "attention/decode_segment.cuh"
#include "ptx/cluster.cuh"

namespace tessera {

template <AttentionDecodeConfig config>
struct DecodeResults : DecodeSegment<config> {
  using Base = DecodeSegment<config>;
  using Base::cluster_rank, Base::exchange, Base::first_unit, Base::head_of, Base::kAllThreads, Base::kE4m3,
      Base::kKeyScales, Base::kMergedTiles, Base::kRows, Base::kType, Base::kValueTiles, Base::key_warp, Base::lane,
      Base::lane_again, Base::output, Base::p, Base::query, Base::query_of, Base::row_of, Base::row_warp,
      Base::segment_scales, Base::softmax, Base::sync_warps, Base::tile_k, Base::value_unit;
  using DecodeSegment<config>::DecodeSegment;

  // Merges the key warps' results and stores them: O and LSE if the segment has all of the sequence's keys, else a
  // partial result.
  __forceinline__ void end_segment(const DecodeWalk& at, unsigned stage) {
    lane = lane_again();  // nothing of what follows is worth a register before
    float sum[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) sum[half] = softmax.total(0, half);
    const float value_scale = kE4m3 && !kKeyScales ? segment_scales().of_values[row_warp] : 1.0f;
    const int halves = row_of(at.column, row_warp * 16 + 8) < p.rows ? 2 : 1;  // that have rows
    if constexpr (config.key_warps > 1) {
      merge_key_warps(sum, halves, stage);
    } else if constexpr (kE4m3) {
      order_columns(output);
    }

    const bool whole = first_unit == 0 && at.ends_sequence();
    const Index slot = partial_slot(p.schedule, blockIdx.x, first_unit == 0, at.batch, at.column, first_unit);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (half >= halves) break;
      const int local = row_warp * 16 + half * 8 + lane / 4;
      const int row = row_of(at.column, local);
      const float inverse = sum[half] == 0.0f ? 0.0f : (kKeyScales ? value_unit[half] : value_scale) / sum[half];
      const float lse = softmax.log_sum_exp(sum[half], 0, half);
      if (row >= p.rows) continue;
      if constexpr (config.cluster > 1) {
        send_to_cluster(local, half, inverse, lse);
      } else if (whole) {
        store_result(at, row, half, inverse, lse);
      } else {
        store_partial(slot * kRows + local, half, inverse, lse);
      }
    }
  }

  // This lane's columns of a row, divided by its sum: those that this key warp has merged.
  template <class Store>
  __forceinline__ void for_columns(int half, float inverse, const Store& store) const {
#pragma unroll
    for (int i = 0; i < kMergedTiles; ++i) {
      const int n = i * config.key_warps + key_warp;
      if (n >= kValueTiles) break;
      store(kE4m3 ? ordered_column(n, lane) : n * 8 + lane % 4 * 2, output[0][i][half * 2] * inverse,
            output[0][i][half * 2 + 1] * inverse);
    }
  }

  __forceinline__ void store_result(const DecodeWalk& at, int row, int half, float inverse, float lse) const {
    const int head = head_of(at.column, row), query = query_of(row);
    Bits16* o = output_row(at.batch, head, query);
    for_columns(half, inverse, [&](int column, float low, float high) { store_pair(o + column, low, high); });
    if (p.lse && key_warp == 0 && lane % 4 == 0) *lse_of(at.batch, head, query) = lse;
  }

  __forceinline__ void store_partial(Index at, int half, float inverse, float lse) const {
    float* o = p.o_partial + at * config.dim_v;
    for_columns(half, inverse, [&](int column, float low, float high) {
      store_8(o + column, Words2{{bits_from_float(low), bits_from_float(high)}});
    });
    if (key_warp == 0 && lane % 4 == 0) p.lse_partial[at] = lse;
  }

  // Row r is combined by CTA r % cluster, which has a place for each CTA's part of it: Dv floats, then its LSE.
  static constexpr int kExchangeRows = (kRows + config.cluster - 1) / config.cluster;
  static constexpr int kExchangePitch = (config.dim_v + 4) * 4;

  __forceinline__ unsigned exchange_row(int part, int local) const {
    return exchange() + (part * kExchangeRows + local / config.cluster) * kExchangePitch;
  }

  __forceinline__ void send_to_cluster(int local, int half, float inverse, float lse) const {
#if __CUDA_ARCH__ >= 900
    const unsigned to = cluster_address(exchange_row(cluster_rank(), local), local % config.cluster);
    for_columns(half, inverse,
                [&](int column, float low, float high) { store_cluster_floats(to + column * 4, low, high); });
    if (key_warp == 0 && lane % 4 == 0) store_cluster(to + config.dim_v * 4, lse);
#endif
  }

  // Four columns of a row for each thread.
  __forceinline__ void combine_cluster(const DecodeWalk& at) const {
#if __CUDA_ARCH__ >= 900
    constexpr int kVectors = config.dim_v / 4;
    const int parts = min(config.cluster, at.sequence.tiles);  // the other CTAs had no tile
    cluster_sync();
    for (int index = threadIdx.x; index < kExchangeRows * kVectors; index += kAllThreads) {
      const int local = index / kVectors * config.cluster + cluster_rank(), vector = index % kVectors;
      const int row = row_of(at.column, local);
      if (row >= p.rows) break;
      float lse[config.cluster], part[config.cluster][4];
      float largest = -infinity();
#pragma unroll
      for (int other = 0; other < config.cluster; ++other) {
        lse[other] = -infinity();
        if (other >= parts) continue;
        const unsigned from = exchange_row(other, local);
        lse[other] = float_from_bits(load_shared_4(from + config.dim_v * 4));
        load_shared_floats(part[other], from + vector * 16);
      }
#pragma unroll
      for (int other = 0; other < config.cluster; ++other) largest = fmaxf(largest, lse[other]);
      float sum = 0, o[4] = {};
#pragma unroll
      for (int other = 0; other < config.cluster; ++other) {
        if (lse[other] == -infinity()) continue;
        const float weight = fast_exp2((lse[other] - largest) * kLog2E);
        sum += weight;
#pragma unroll
        for (int i = 0; i < 4; ++i) o[i] += weight * part[other][i];
      }
      const float scale = sum == 0.0f ? 0.0f : fast_reciprocal(sum);
      const int head = head_of(at.column, row), query = query_of(row);
      Bits16* to = output_row(at.batch, head, query) + vector * 4;
      store_pair(to, o[0] * scale, o[1] * scale);
      store_pair(to + 2, o[2] * scale, o[3] * scale);
      if (p.lse && vector == 0) {
        *lse_of(at.batch, head, query) = sum == 0.0f ? -infinity() : largest + fast_log2(sum) * kLn2;
      }
    }
#endif
  }

  __forceinline__ Bits16* output_row(int batch, int head, int query) const {
    return static_cast<Bits16*>(p.o) + batch * p.o_strides.batch + query * p.o_strides.seq + head * p.o_strides.head;
  }
  __forceinline__ float* lse_of(int batch, int head, int query) const {
    return p.lse + batch * p.lse_strides.batch + head * p.lse_strides.head + query;
  }

  __forceinline__ static void store_pair(Bits16* to, float low, float high) {
    const unsigned pair = pack<kType>(low, high);
    if constexpr (config.vector == 8) {
      *reinterpret_cast<unsigned*>(to) = pair;
    } else {
      to[0] = static_cast<Bits16>(pair);
      to[1] = static_cast<Bits16>(pair >> 16);
    }
  }

  // Afterwards every key warp has the references and sums of all, and in output[0][i] the merged output of tile
  // i * key_warps + key_warp of eight columns.
  __forceinline__ void merge_key_warps(float (&sum)[2], int halves, unsigned stage) {
    __shared__ float row_reference[config.key_warps][kRows];
    __shared__ float row_sum[config.key_warps][kRows];
    __shared__ float row_unit[kKeyScales ? config.key_warps : 1][kRows];
    constexpr unsigned kRowsBytes = 32 * 8;  // of eight rows of a tile: two columns for each lane
    const unsigned base = tile_k(stage).base + row_warp * kValueTiles * 2 * kRowsBytes + lane * 8;
    const auto place = [&](int other, int n, int half) {
      return base + ((other * config.row_warps * kValueTiles + n) * 2 + half) * kRowsBytes;
    };
    const int row = row_warp * 16 + lane / 4;
    sync_warps();  // the stage has been read
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (half >= halves) break;
#pragma unroll
      for (int n = 0; n < kValueTiles; ++n) {
        store_shared_floats(place(key_warp, n, half), output[0][n][half * 2], output[0][n][half * 2 + 1]);
      }
      if (lane % 4 == 0) {
        row_reference[key_warp][row + half * 8] = softmax.reference[0][half];
        row_sum[key_warp][row + half * 8] = sum[half];
        if constexpr (kKeyScales) row_unit[key_warp][row + half * 8] = value_unit[half];
      }
    }
    sync_warps();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (half >= halves) break;
      float references[config.key_warps], factor[config.key_warps];
      float reference = -infinity();
#pragma unroll
      for (int other = 0; other < config.key_warps; ++other) {
        references[other] = row_reference[other][row + half * 8];
        reference = fmaxf(reference, references[other]);
      }
      softmax.reference[0][half] = reference;
      sum[half] = 0;
#pragma unroll
      for (int other = 0; other < config.key_warps; ++other) {
        factor[other] = softmax.factor_between(references[other], reference);
        sum[half] += row_sum[other][row + half * 8] * factor[other];
        if constexpr (kKeyScales) factor[other] *= row_unit[other][row + half * 8];
      }
      value_unit[half] = 1;
#pragma unroll
      for (int i = 0; i < kMergedTiles; ++i) {
        const int n = i * config.key_warps + key_warp;
        if (n >= kValueTiles) break;
        float merged[2] = {};
#pragma unroll
        for (int other = 0; other < config.key_warps; ++other) {
          float part[2];
          if constexpr (kE4m3) {  // as order_columns() does it
            part[0] = float_from_bits(load_shared_4(place(other, n / 2 * 2, half) + n % 2 * 4));
            part[1] = float_from_bits(load_shared_4(place(other, n / 2 * 2 + 1, half) + n % 2 * 4));
          } else {
            load_shared_floats(part, place(other, n, half));
          }
          merged[0] += part[0] * factor[other];
          merged[1] += part[1] * factor[other];
        }
        output[0][i][half * 2] = merged[0];
        output[0][i][half * 2 + 1] = merged[1];
      }
    }
  }
};

}  // namespace tessera
