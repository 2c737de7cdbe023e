// The products of attention/decode.cuh over the keys of a segment, which is a row block's part of a sequence: queries into
// registers, scores, online softmax, output; and new keys into their tile.
#pragma once

#include "attention/decode_loads.cuh"
#include "ptx/math.cuh"
#include "tile/e4m3_products.cuh"
#include "tile/online_softmax.cuh"
#include "tile/probability.cuh"

namespace tessera {

template <AttentionDecodeConfig config>
struct DecodeSegment : DecodeLoads<config> {
  using Base = DecodeLoads<config>;
  using typename Base::TileQ, typename Base::TileV, Base::cache_k, Base::cache_v, Base::head_kv_of, Base::head_of,
      Base::kE4m3, Base::kInHalves, Base::kKeptSteps, Base::kKeyScales, Base::kKeyTiles, Base::kKeysPerWarp,
      Base::kRows, Base::kThreads, Base::kTma, Base::kType, Base::kValueTiles, Base::kWarps, Base::key_warp, Base::lane,
      Base::lane_again, Base::p, Base::queries, Base::query_of, Base::rotary_position, Base::row_of, Base::row_warp,
      Base::scales, Base::scales_k, Base::scales_v, Base::sync_warps, Base::tile_k, Base::tile_q, Base::tile_v,
      Base::value_scales;
  // Of the segment at hand.
  int query[2];  // positions of a lane's two rows
  float slope[2];
  int first_unit;
  float value_unit[2];  // with key_scales: a lane's two rows of the output are in multiples of it, a power of two

  unsigned kept[kKeptSteps > 0 ? kKeptSteps : 1][1][4];
  float scores[1][kKeyTiles][4];
  float output[1][kValueTiles][4];
  OnlineSoftmax<kKeyTiles> softmax;

  using DecodeLoads<config>::DecodeLoads;

  __forceinline__ void begin_segment(const DecodeWalk& at, unsigned stage) {
    const int seq_q = static_cast<int>(p.schedule.seq_q.by);
    first_unit = at.tile >> p.schedule.unit_shift;
    const int offset = at.sequence.length - seq_q;  // query i is at position i + offset
    const int quad = lane_again() / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_of(at.column, row_warp * 16 + half * 8 + quad);
      query[half] = query_of(row) + offset;
      slope[half] = 0;
      if (config.score_mod && p.alibi_slopes && row < p.rows) {
        slope[half] = p.alibi_slopes[at.batch * p.alibi_batch_stride + head_of(at.column, row)];
      }
    }
#pragma unroll
    for (int n = 0; n < kValueTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) output[0][n][i] = 0;
    }
    value_unit[0] = value_unit[1] = 1;
    softmax.reset();
    softmax.scale_log2 = (config.score_mod ? 1.0f : p.scale) * kLog2E;
    if (p.status && at.tile == 0 && at.column == 0 && threadIdx.x == 0) {
      p.status[at.batch] = at.sequence.refused ? 1 : 0;
    }
    keep_queries(at, stage);
  }

  // Into registers, or to where they stay while the stage is reused.
  __forceinline__ void keep_queries(const DecodeWalk& at, unsigned stage) {
    if (config.append && p.rotary_dim > 0 && !at.sequence.refused) rotate_queries(at, stage);
    if constexpr (kE4m3) convert_queries(at, stage);
    if constexpr (kKeptSteps > 0) {
      rows(tile_q(stage)).keep(lane_again());
    } else {
      if constexpr (kTma) sync_warps();  // the queries before are no longer needed
      for (int index = threadIdx.x; index < kRows * TileQ::kChunks; index += kThreads) {
        const int local = index / TileQ::kChunks, chunk = index % TileQ::kChunks;
        store_shared_16(queries().address(local, chunk), load_shared_16(tile_q(stage).address(local, chunk)));
      }
      sync_warps();
    }
  }

  // Rotary embedding in place: a warp has whole rows, and a lane a chunk of each.
  __forceinline__ void rotate_queries(const DecodeWalk& at, unsigned stage) const {
    static_assert(TileQ::kChunks <= 32);
    const int position = rotary_position(at), chunk = lane_again();
    const bool mine = chunk < TileQ::kChunks;
#pragma unroll 1
    for (int local = threadIdx.x / 32; local < kRows; local += kWarps) {
      const int which = query_of(row_of(at.column, local));
      const auto value = [&](int column) {
        const unsigned pair = load_shared_4(tile_q(stage).address(local, column / 8) + column % 8 / 2 * 4);
        return column % 2 == 0 ? low_to_float<kType>(pair) : high_to_float<kType>(pair);
      };
      Words4 words = {};
      if (mine) words = rotated_chunk<kType>(p, value, chunk, position + (p.rotary_advances ? which : 0));
      __syncwarp();
      if (mine) store_shared_16(tile_q(stage).address(local, chunk), words);
    }
    sync_warps();
  }

  // In place, to what rows_by_e4m3_rows takes: fp16, with the pairs of every 16 columns interleaved. bf16 is brought into
  // fp16's range by a power of two for each row, without loss but of what is 2^-30 of the row's maximum. The warps of a
  // row warp have its rows, and a lane a chunk of each.
  __forceinline__ void convert_queries(const DecodeWalk& at, unsigned stage) {
    float* const row_scale = segment_scales().of_row;
    const int chunk = lane_again();
    const bool mine = chunk < TileQ::kChunks;
    const float key_scale = kKeyScales ? 1.0f : float_from_bits(load_shared_4(scales(stage)));
    if (!kKeyScales && key_warp == 0 && chunk == 0) {
      segment_scales().of_keys[row_warp] = key_scale;
      segment_scales().of_values[row_warp] = float_from_bits(load_shared_4(scales(stage) + 4));
    }
#pragma unroll 1
    for (int local = row_warp * 16 + key_warp; local < (row_warp + 1) * 16; local += config.key_warps) {
      if (row_of(at.column, local) >= p.rows) {  // zeros
        if (chunk == 0) row_scale[local] = 0;
        continue;
      }
      Words4 words = {};
      if (mine) words = load_shared_16(tile_q(stage).address(local, chunk));
      float restore = 1;
      if constexpr (kType == DType::kBFloat16) {
        float largest = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float low = low_to_float<kType>(words.word[i]), high = high_to_float<kType>(words.word[i]);
          largest = fmaxf(largest, fmaxf(fabsf(low), fabsf(high)));
        }
#pragma unroll
        for (int other = 1; other < 32; other *= 2) {
          largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, other));
        }
        // The largest becomes 2^14 or more, and stays below 2^15.
        const int exponent = max(static_cast<int>(bits_from_float(largest) >> 23), 15);
        const float factor = float_from_bits(static_cast<unsigned>(127 + 14 + 127 - exponent) << 23);
        restore = float_from_bits(static_cast<unsigned>(exponent - 14) << 23);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          words.word[i] = pack<DType::kFloat16>(low_to_float<kType>(words.word[i]) * factor,
                                                high_to_float<kType>(words.word[i]) * factor);
        }
      }
      __syncwarp();
      if (mine) {
        const int first = chunk / 2 * 2, at_byte = chunk % 2 * 8;
        store_shared_8(tile_q(stage).address(local, first) + at_byte, Words2{{words.word[0], words.word[2]}});
        store_shared_8(tile_q(stage).address(local, first + 1) + at_byte, Words2{{words.word[1], words.word[3]}});
      }
      if (chunk == 0) row_scale[local] = restore * key_scale;
    }
    sync_warps();
  }

  // Of an e4m3 cache, and of the segment at hand; in shared memory, since registers are scarcer. The warps that share a row
  // warp's entries meet at the end of a segment.
  struct SegmentScales {
    float of_row[kRows];  // from a product with the cache's key to one with the key itself
    float of_keys[config.row_warps];
    float of_values[config.row_warps];
  };
  __forceinline__ static SegmentScales& segment_scales() {
    __shared__ SegmentScales scales;
    return scales;
  }

  __forceinline__ RowOperand<TileQ, 1, kKeptSteps> rows(TileQ tile) { return {tile, row_warp * 16, kept}; }

  __forceinline__ void append_new_keys(const DecodeWalk& at, unsigned stage) {
    const int first_key = at.first_key();
    if (first_key + config.block_k <= at.sequence.old_length || at.sequence.old_length == at.sequence.length) return;
    const int head = head_kv_of(at.column);
    const bool writes = row_of(at.column, 0) == 0;
    const auto* k_new =
        static_cast<const Bits16*>(p.k_new) + at.batch * p.k_new_strides.batch + head * p.k_new_strides.head;
    const auto* v_new =
        static_cast<const Bits16*>(p.v_new) + at.batch * p.v_new_strides.batch + head * p.v_new_strides.head;
    const int position = p.rotary_dim > 0 ? rotary_position(at) : 0;
    if constexpr (kKeyScales) {
      append_with_key_scales<kType, kWarps, true>(p, tile_k(stage), cache_k(at), p.k_strides, scales_k(at),
                                                  p.k_scale_strides, scales(stage), k_new, p.k_new_strides.seq,
                                                  at.sequence, first_key, position, writes);
      append_with_key_scales<kType, kWarps, false>(p, tile_v(stage), cache_v(at), p.v_strides, scales_v(at),
                                                   p.v_scale_strides, value_scales(stage), v_new, p.v_new_strides.seq,
                                                   at.sequence, first_key, 0, writes);
      sync_warps();
      return;
    }
    const float key_scale = kE4m3 ? segment_scales().of_keys[row_warp] : 1.0f;
    const float value_scale = kE4m3 ? segment_scales().of_values[row_warp] : 1.0f;
    append_to_tile<kType, kThreads, config.vector, true, kE4m3>(p, tile_k(stage), cache_k(at), p.k_strides, k_new,
                                                                p.k_new_strides.seq, at.sequence, first_key, position,
                                                                key_scale, writes);
    append_to_tile<kType, kThreads, config.vector, false, kE4m3>(p, tile_v(stage), cache_v(at), p.v_strides, v_new,
                                                                 p.v_new_strides.seq, at.sequence, first_key, 0,
                                                                 value_scale, writes);
    sync_warps();
  }

  __forceinline__ void multiply(const DecodeWalk& at, unsigned stage) {
    const int row = key_warp * kKeysPerWarp;
    if constexpr (kE4m3) {
      rows_by_e4m3_rows<kInHalves>(scores, rows(queries()), tile_k(stage), row, lane_again());
      scale_scores(stage);
    } else {
      rows_by_rows<kType, kInHalves>(scores, rows(queries()), tile_k(stage), row, FromZero{}, lane_again());
    }
    const int first_key = at.first_key() + row;
    modify_scores(first_key);
    if (!all_see(at.sequence, first_key)) mask_scores(at.sequence, first_key);
    online_softmax(stage);
    unsigned probabilities[1][kKeyTiles / 2][4];
    if constexpr (kE4m3) {
      pack_operand<DType::kFloat16>(probabilities[0], scores[0]);
      add_by_e4m3_columns(output, probabilities, tile_v(stage), row, lane_again());
    } else {
      pack_operand<kType>(probabilities[0], scores[0]);
      add_by_columns<kType>(output, probabilities, tile_v(stage), row, lane_again());
    }
  }

  // This lane's two keys of tile n of eight, K's or V's.
  __forceinline__ void key_scales(float (&of)[2], unsigned scales, int n) const {
    load_shared_floats(of, scales + (key_warp * kKeysPerWarp + n * 8 + lane_again() % 4 * 2) * 4);
  }

  __forceinline__ void scale_scores(unsigned stage) {
    const float* const row = segment_scales().of_row + row_warp * 16 + lane_again() / 4;
    const float row_scale[2] = {row[0], row[8]};
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
      float key_scale[2] = {1, 1};
      if constexpr (kKeyScales) key_scales(key_scale, scales(stage), n);
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[0][n][i] *= row_scale[i / 2] * key_scale[i % 2];
    }
  }

  __forceinline__ void modify_scores(int first_key) {
    if constexpr (config.score_mod) {
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int key = first_key + n * 8 + lane % 4 * 2 + i % 2;
          modify_score(scores[0][n][i], p.scale, p.softcap, slope[i / 2], query[i / 2] - key);
        }
      }
    }
  }

  // Whether all rows see all of this warp's keys.
  __forceinline__ bool all_see(const DecodeSequence& sequence, int first_key) const {
    const int seq_q = static_cast<int>(p.schedule.seq_q.by);
    const Interval<int> seen = p.schedule.band.keys_of_all(sequence.length - seq_q, sequence.length - 1);
    return first_key >= max(seen.begin, sequence.begin) && first_key + kKeysPerWarp <= min(seen.end, sequence.length);
  }

  __forceinline__ void mask_scores(const DecodeSequence& sequence, int first_key) {
    Interval<int> keys[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Interval<int> seen = p.schedule.band.keys_of(query[half]);
      keys[half] = {max(seen.begin, sequence.begin), min(seen.end, sequence.length)};
    }
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = first_key + n * 8 + lane % 4 * 2 + i % 2;
        if (!keys[i / 2].contains(key)) scores[0][n][i] = -infinity();
      }
    }
  }

  __forceinline__ void online_softmax(unsigned stage) {
    auto& rows = reinterpret_cast<float(&)[1][kKeyTiles * 4]>(scores);
    float kept[2] = {1, 1};  // of what was summed before
    const bool grown = softmax.raise_references(rows, [&](int, int half, float factor) {
      kept[half] = factor;
      if constexpr (!kKeyScales) multiply_output(half, factor);
    });
    softmax.template exponentiate<false>(rows);
    if constexpr (kKeyScales) scale_probabilities(value_scales(stage), grown, kept);
  }

  __forceinline__ void multiply_output(int half, float factor) {
#pragma unroll
    for (int n = 0; n < kValueTiles; ++n) {
      output[0][n][half * 2] *= factor;
      output[0][n][half * 2 + 1] *= factor;
    }
  }

  // Multiplies probabilities by the scales of their values and, since fp16 is too narrow for that, divides them by the row's
  // unit. That stays until a product exceeds fp16's range or the softmax's reference is raised.
  __forceinline__ void scale_probabilities(unsigned of_values, bool grown, const float (&kept)[2]) {
    constexpr float kMost = 1 << 15;
    float largest[2] = {0, 0};
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
      float scale[2];
      key_scales(scale, of_values, n);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scores[0][n][i] *= scale[i % 2];
        largest[i / 2] = fmaxf(largest[i / 2], scores[0][n][i]);
      }
    }
    const bool fits = largest[0] <= kMost * value_unit[0] && largest[1] <= kMost * value_unit[1];
    if (grown || __any_sync(0xffffffffu, !fits)) choose_units(largest, kept);
    const float inverse[2] = {inverse_power_of_two(value_unit[0]), inverse_power_of_two(value_unit[1])};
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[0][n][i] *= inverse[i / 2];
    }
  }

  // A power of two with which the largest product of a probability and its value's scale, so far, becomes 4 to 8.
  __forceinline__ void choose_units(float (&largest)[2], const float (&kept)[2]) {
    constexpr int kBias = 127;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float& row = largest[half];
      row = fmaxf(row, __shfl_xor_sync(0xffffffffu, row, 1));
      row = fmaxf(row, __shfl_xor_sync(0xffffffffu, row, 2));
      row = fmaxf(row, 4 * kept[half] * value_unit[half]);
      const int exponent = static_cast<int>(bits_from_float(row) >> 23) - kBias - 2;
      const float next = power_of_two(max(kLeastScaleExponent, min(exponent, -kLeastScaleExponent)));
      multiply_output(half, kept[half] * (value_unit[half] * inverse_power_of_two(next)));
      value_unit[half] = next;
    }
  }

  // Values of keys that are not in use may be NaN, which a probability of 0 does not remove. Each warp clears its own.
  __forceinline__ bool clear_values(const DecodeWalk& at, unsigned stage) const {
    const int first_key = at.first_key() + key_warp * kKeysPerWarp;
    const int begin = at.sequence.begin, end = at.sequence.length;
    if (first_key >= begin && first_key + kKeysPerWarp <= end) return false;
    for (int index = lane_again(); index < kKeysPerWarp * TileV::kChunks; index += 32) {
      const int row = index / TileV::kChunks, chunk = index % TileV::kChunks;
      if (first_key + row >= begin && first_key + row < end) continue;
      store_shared_16(tile_v(stage).address(key_warp * kKeysPerWarp + row, chunk), Words4{});
    }
    __syncwarp();
    return true;
  }
};

}  // namespace tessera
