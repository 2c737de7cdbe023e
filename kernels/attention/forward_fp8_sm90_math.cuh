// What a consumer of attention/forward_fp8_sm90.cuh computes with: scores, probabilities and output of its 64 rows, in
// registers, the products of e4m3 operands, and their scales.
#pragma once

#include "attention/forward_fp8_sm90_work_tile.cuh"
#include "attention/forward_sm90_rows.cuh"
#include "attention/fp8_round.cuh"
#include "attention/fp8_softmax.cuh"
#include "ptx/barrier.cuh"
#include "ptx/e4m3.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "tile/shared_tile.cuh"

namespace tessera {

template <AttentionForwardFp8Sm90Config config>
struct ForwardFp8Sm90Math {
  static constexpr int kKeyTiles = config.block_k / 8;
  static constexpr int kValueTiles = config.dim_v / 8;
  static constexpr int kQkColumns = fp8_columns(config.dim_qk);
  static constexpr int kKeyColumns = fp8_columns(config.block_k);
  static constexpr int kQkSteps = (config.dim_qk + 31) / 32;
  static constexpr int kPvSteps = config.block_k / 32;
  static constexpr int kFactors = config.k_blocks ? config.block_k / kScaleKeys : 1;
  static constexpr bool kRoundsQ = config.rounds_q;
  static constexpr unsigned kNeverStored = 0xffffffffu;  // a NaN of no computation
  static constexpr int kRoundBarrier = 4;                // named barrier of consumer 0, behind those of ping-pong

  ForwardSm90Rows<config, AttentionForwardFp8Sm90Params> rows;

  // Of the work tile whose scores are being computed.
  float q_factor = 0;               // scale and Q's scale; in exp2 units, unless scores are modified
  const float* k_scales = nullptr;  // of the head
  const float* v_scales = nullptr;
  unsigned first_scale = 0;  // tile_scales, instead: where the head's begin, K's and V's
  float v_unit = 1;          // of O: V's scale

  float scores[kKeyTiles * 4];    // [tile of 8 keys][value of a lane]
  unsigned weights[kPvSteps][4];  // P as wgmma's A operand
  float output[kValueTiles * 4];  // [tile of 8 columns][value of a lane]
  Fp8Softmax<kKeyTiles, kFactors, config.tile_scales> softmax = {};
  float rescale[2];         // factors for O if its rows' references were raised
  float k_scale[kFactors];  // of the key tile whose scores are in flight
  float v_scale = 1;
  bool promotes = false;  // O, before the product with this key tile
  bool packed = false;    // P of this key tile

  __forceinline__ void start(const ForwardSm90WorkTileInfo& info, bool sees_keys) {
    const auto& p = rows.p;
    const unsigned key_head = p.by_group.quotient(info.head);
    if constexpr (config.tile_scales) {
      first_scale = static_cast<unsigned>(info.batch * p.k_scale.strides.batch + key_head * p.k_scale.strides.head);
    } else {
      k_scales = p.k_scale.of(info.batch, key_head);
      v_scales = p.v_scale.of(info.batch, key_head);
    }
    if (!sees_keys) return;
    q_factor = p.scale * (config.score_mod ? 1.0f : kLog2E);
    if constexpr (!kRoundsQ) q_factor *= p.q_scale.of(info.batch, info.head)[rows.first_q >> p.q_scale.shift];
    if constexpr (!config.k_blocks && !config.tile_scales) k_scale[0] = *k_scales;
  }

  // rounds_q: this warp's rows of a 16-bit tile to e4m3. `to` is read by wgmma of all warps, which must have finished
  // those of the previous work tile before and find all rows afterwards.
  __forceinline__ void round_q(unsigned from, unsigned to) {
    constexpr int kPieces = padded_dim(kQkColumns, config.min_atom) / 8;  // of 16 columns, in a row; the last are zeros
    constexpr int kItems = 16 * kPieces / 32;
    constexpr int kBoxRows = q_tile_of(config).rows;
    if constexpr (q_boxes_of(config) > 1) from += rows.consumer * layout_of(config).sums_part;
    const auto row_of = [&](int item) { return rows.first_row() + rows.warp * 16 + (item * 32 + rows.lane) / kPieces; };
    const auto column_of = [&](int item) { return (item * 32 + rows.lane) % kPieces * 16; };
    const auto load = [&](int item, int half) {
      if (column_of(item) >= config.dim_qk) return Words4{};
      return load_shared_16(from + offset_in_tile(row_of(item) % kBoxRows, column_of(item) + half * 8, kBoxRows,
                                                  config.dim_qk, config.min_atom));
    };
    unsigned most = 0;
#pragma unroll 2  // O still has most of the registers
    for (int item = 0; item < kItems; ++item) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Words4 words = load(item, half);
#pragma unroll
        for (int w = 0; w < 4; ++w) most = max_abs<config.dtype>(most, words.word[w]);
      }
    }
    // Bits of numbers that are not negative have their order.
    const unsigned amax = __reduce_max_sync(0xffffffffu, bits_from_float(larger_half<config.dtype>(most)));
    const int exponent = fp8_scale_exponent(float_from_bits(amax));
    q_factor *= power_of_two(exponent);
    named_barrier_sync(kRoundBarrier + rows.consumer, kWarpgroup);
#pragma unroll 2
    for (int item = 0; item < kItems; ++item) {
      const Words2 low = round_8<config.dtype>(load(item, 0), power_of_two(-exponent));
      const Words2 high = round_8<config.dtype>(load(item, 1), power_of_two(-exponent));
      store_shared_16(
          to + offset_in_tile(row_of(item), column_of(item) / 2, block_q_of(config), kQkColumns, config.min_atom),
          {low.word[0], low.word[1], high.word[0], high.word[1]});
    }
    fence_proxy_async();
    named_barrier_sync(kRoundBarrier + rows.consumer, kWarpgroup);
  }

  // The scales of a key tile; keys beyond the sequence have those of the last block.
  __forceinline__ void load_scales(int tile) {
    if constexpr (config.k_blocks) {
#pragma unroll
      for (int g = 0; g < kFactors; ++g) {
        k_scale[g] = k_scales[min(tile * config.block_k + g * kScaleKeys, rows.len_k - 1) >> rows.p.k_scale.shift];
      }
    }
    if constexpr (config.v_blocks) v_scale = v_scales[(tile * config.block_k) >> rows.p.v_scale.shift];
    if constexpr (config.tile_scales) {
      k_scale[0] = rows.p.k_scale.data[first_scale + tile];
      v_scale = rows.p.v_scale.data[first_scale + tile];
    }
  }

  __forceinline__ void reset() {
    v_unit = config.v_blocks || config.tile_scales ? v_scale : *v_scales;
    softmax.reset();
    store_shared_floats(row_state() + kRest, 0.0f, 0.0f);
    if constexpr (config.promoted_tiles > 0) store_shared_floats(row_state() + kSumsFactor, 0.0f, 0.0f);
    clear_output();
  }

  // promoted_tiles: the tensor cores truncate every sum, which makes a long one smaller. So what they have summed up is
  // added to sums in shared memory from time to time, each thread its own, and they start from 0 again. The sums are of
  // fp16, rounded to nearest: 2^-12 of a sum is far below what rounding P to e4m3 costs.
  static constexpr int kSumsPitch = kWarpgroup * 16;  // of two tiles of 8 columns
  __forceinline__ unsigned sums() const {
    extern __shared__ __align__(kTileAlignment) unsigned char memory[];
    return shared_address(memory) + layout_of(config).sums + rows.consumer * layout_of(config).sums_part +
           (recomputed(rows.warp) * 32 + rows.lane) * 16;
  }
  // What a thread holds of its two rows in shared memory, for lack of registers: pairs of floats, at these offsets.
  static constexpr int kSumsFactor = 0;  // what the sums are to be multiplied by; 0 if there are none
  static constexpr int kRest = 8;        // Fp8Softmax::rest, until finish(); then the LSE
  static constexpr int kLse = kRest;
  static constexpr int kTotal = 16;  // of P
  __forceinline__ unsigned row_state() const {
    extern __shared__ __align__(kTileAlignment) unsigned char memory[];
    return shared_address(memory) + layout_of(config).row_state +
           (rows.consumer * kWarpgroup + recomputed(rows.warp) * 32 + rows.lane) * kRowStateBytes;
  }

  __forceinline__ void add_sums() {
    float factor[2];
    load_shared_floats(factor, row_state() + kSumsFactor);
    if (factor[0] == 0 && factor[1] == 0) return;
    unsigned from = sums();
#pragma unroll
    for (int n = 0; n < kValueTiles; n += 2) {
      const Words4 sum = load_shared_16(from + n / 2 * kSumsPitch);
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        output[n * 4 + w * 2] += low_to_float<DType::kFloat16>(sum.word[w]) * factor[w % 2];
        output[n * 4 + w * 2 + 1] += high_to_float<DType::kFloat16>(sum.word[w]) * factor[w % 2];
      }
      // A few at a time: the next address is known when these are there, so that their registers are free again.
      if (n % 4 == 2) from += sum.word[0] == kNeverStored ? 1 : 0;
    }
  }
  // The sums become those of before, times what their unit has become, and O, times the factor that brings it into fp16's
  // range: probabilities, which e4m3 at most doubles, times 448.
  __forceinline__ void promote() {
    float old[2], factor[2];
    load_shared_floats(old, row_state() + kSumsFactor);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      constexpr int kLargestExponent = 5;
      const int exponent = max(static_cast<int>(bits_from_float(softmax.total(half)) >> 23) - 127, kLeastScaleExponent);
      factor[half] = power_of_two(kLargestExponent - exponent);
    }
    store_shared_floats(row_state() + kSumsFactor, inverse_power_of_two(factor[0]), inverse_power_of_two(factor[1]));
    if (old[0] == 0 && old[1] == 0) {
      move_output_to_sums(factor, [](unsigned, const Words4& words) { return words; });
    } else {
      const unsigned ratio[2] = {pack<DType::kFloat16>(old[0] * factor[0], old[0] * factor[0]),
                                 pack<DType::kFloat16>(old[1] * factor[1], old[1] * factor[1])};
      move_output_to_sums(factor, [&](unsigned at, const Words4& words) {
        Words4 sum = load_shared_16(at);
#pragma unroll
        for (int w = 0; w < 4; ++w) sum.word[w] = fma_half(sum.word[w], ratio[w % 2], words.word[w]);
        return sum;
      });
    }
    clear_output();
  }
  template <class Sum>
  __forceinline__ void move_output_to_sums(const float (&factor)[2], const Sum& sum) {
    unsigned at = sums();
#pragma unroll
    for (int n = 0; n < kValueTiles; n += 2, at += kSumsPitch) {
      Words4 words;
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float* const o = output + n * 4 + w * 2;
        words.word[w] = pack<DType::kFloat16>(o[0] * factor[w % 2], o[1] * factor[w % 2]);
      }
      store_shared_16(at, sum(at, words));
    }
  }

  // tile_scales: O is in units of the largest scale so far, and the probabilities of a tile with a smaller one are multiplied
  // by their ratio. So O is seldom rescaled, and no value of V is held with fewer bits than one scale for all would give it.
  __forceinline__ void shift_probabilities() {
    constexpr int kLeastShift = -32;  // P is 0 in e4m3, and its sum is far from underflow
    const int ratio = static_cast<int>(bits_from_float(v_scale) - bits_from_float(v_unit)) >> 23;
    const int shift = max(min(ratio, 0), kLeastShift);
    softmax.shift = static_cast<float>(shift);
    softmax.unshift = power_of_two(-shift);
  }

  // What storing O needs besides waits in shared memory. The sums are added here, where the scores' registers are free.
  __forceinline__ void finish() {
    load_rest();
    const float total[2] = {softmax.total(0), softmax.total(1)};
    store_shared_floats(row_state() + kLse, softmax.log_sum_exp(total[0], 0), softmax.log_sum_exp(total[1], 1));
    store_shared_floats(row_state() + kTotal, total[0], total[1]);
    if constexpr (config.promoted_tiles > 0) {
      wgmma_wait_group<0>();
      finish_output();
      add_sums();
      if constexpr (config.q_in_sums) fence_proxy_async();  // TMA writes there next
    }
  }

  __forceinline__ void clear_output() {
#pragma unroll
    for (int i = 0; i < kValueTiles * 4; ++i) output[i] = 0;
  }

  // Exact if V's scales are powers of two.
  __forceinline__ void rescale_output(bool grown) {
    scale_output(grown);
    if constexpr (config.promoted_tiles > 0) {
      if (!promotes) return;
      pack_scores();  // frees the registers of the scores
      promote();
      packed = true;
    }
  }
  __forceinline__ void scale_output(bool grown) {
    if (config.v_blocks ? v_scale != v_unit : config.tile_scales && v_scale > v_unit) {
      const float ratio = v_unit / v_scale;
#pragma unroll
      for (int half = 0; half < 2; ++half) rescale[half] = grown ? rescale[half] * ratio : ratio;
      v_unit = v_scale;
      grown = true;
    }
    if (!grown) return;
#pragma unroll
    for (int i = 0; i < kValueTiles * 4; ++i) output[i] *= rescale[i / 2 % 2];
    if constexpr (config.promoted_tiles > 0) {
      float factor[2];
      load_shared_floats(factor, row_state() + kSumsFactor);
      store_shared_floats(row_state() + kSumsFactor, factor[0] * rescale[0], factor[1] * rescale[1]);
    }
  }
  __forceinline__ void finish_output() { wgmma_fence_operand(output); }

  template <class Issue>
  static __forceinline__ void with_descriptors(const SwizzleAtom& atom, unsigned a, unsigned b, const Issue& issue) {
    if (atom.width == 64) {
      issue(matrix_descriptor<64>(a, 16), matrix_descriptor<64>(b, 16));
    } else if (atom.width == 32) {
      issue(matrix_descriptor<32>(a, 16), matrix_descriptor<32>(b, 16));
    } else {
      issue(matrix_descriptor<16>(a, 16), matrix_descriptor<16>(b, 16));
    }
  }

  // S = Q K^T.
  __forceinline__ void issue_scores(unsigned q_tile, unsigned k_tile) {
#pragma unroll
    for (int step = 0; step < kQkSteps; ++step) {
      const SwizzleAtom atom = atom_at(kQkColumns, config.min_atom, step * 16);
      const unsigned within = (step * 16 - atom.column) * 2;
      with_descriptors(
          atom,
          q_tile + atom_offset(atom, block_q_of(config)) + static_cast<unsigned>(rows.first_row() * atom.width) * 2,
          k_tile + atom_offset(atom, config.block_k), [&](const MatrixDescriptor& q, const MatrixDescriptor& k) {
            WgmmaE4m3<config.block_k>::shared_shared(scores, q.at(within), k.at(within), step > 0);
          });
    }
  }

  // O += P V.
  __forceinline__ void issue_output(unsigned v_tile) {
#pragma unroll
    for (int step = 0; step < kPvSteps; ++step) {
      const SwizzleAtom atom = atom_at(kKeyColumns, config.min_atom, step * 16);
      const unsigned within = (step * 16 - atom.column) * 2;
      const unsigned from = v_tile + atom_offset(atom, config.dim_v);
      with_descriptors(atom, from, from, [&](const MatrixDescriptor& v, const MatrixDescriptor&) {
        WgmmaE4m3<config.dim_v>::registers_shared(output, weights[step], v.at(within), true);
      });
    }
  }

  // Scores to probabilities. Returns whether O, which a product may still be adding to, must be rescaled afterwards.
  template <class Recompute>
  __forceinline__ bool softmax_of(int tile, const KeyRange& keys, const Recompute& recompute) {
    const int first_k = tile * config.block_k;
    if constexpr (config.promoted_tiles > 0) promotes = tile % config.promoted_tiles == config.promoted_tiles - 1;
    const bool masked = keys.is_masked(first_k, config.block_k);
    float factor[kFactors];
#pragma unroll
    for (int g = 0; g < kFactors; ++g) factor[g] = q_factor * k_scale[g];
    if constexpr (config.score_mod) {
#pragma unroll
      for (int i = 0; i < kKeyTiles * 4; ++i) {
        rows.modify(scores[i], factor[softmax.group_of(i)], first_k + i / 4 * 8, i % 4);
      }
#pragma unroll
      for (int g = 0; g < kFactors; ++g) factor[g] = kLog2E;
    }
    if (masked) rows.mask(scores, first_k);
    if constexpr (config.tile_scales) shift_probabilities();
    load_rest();
    const bool grown = softmax.update(scores, factor, masked || config.score_mod, rescale, recompute);
    if (grown && !softmax.settled) store_shared_floats(row_state() + kRest, softmax.rest[0], softmax.rest[1]);
    return grown;
  }
  // 0 for rows that are settled.
  __forceinline__ void load_rest() {
    softmax.rest[0] = softmax.rest[1] = 0;
    if (!softmax.settled) load_shared_floats(softmax.rest, row_state() + kRest);
  }

  __forceinline__ void pack_weights() {
    if (!packed) pack_scores();
    packed = false;
  }
  __forceinline__ void pack_scores() {
#pragma unroll
    for (int step = 0; step < kPvSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* const s = scores + step * 16 + i / 2 * 8 + i % 2 * 2;
        weights[step][i] = pack_e4m3(s[0], s[1], s[4], s[5]);
      }
    }
  }

  // Recomputes S on the CUDA cores, each lane its own values: wgmma would need all warps of the consumer. The stage of
  // K is still held. This almost never runs, so code size matters and speed does not.
  __forceinline__ void recompute_scores(unsigned q_tile, unsigned k_tile) {
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
      float sum[4] = {};
#pragma unroll 1
      for (int column = 0; column < kQkColumns; column += 2) {
        float q[2][4], k[2][4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          unpack_e4m3(load_shared_4(q_tile + offset_in_tile(rows.first_row() + rows.row_of(i), column,
                                                            block_q_of(config), kQkColumns, config.min_atom)),
                      q[i]);
          unpack_e4m3(load_shared_4(k_tile + offset_in_tile(n * 8 + rows.lane % 4 * 2 + i, column, config.block_k,
                                                            kQkColumns, config.min_atom)),
                      k[i]);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
          for (int j = 0; j < 4; ++j) sum[i] += q[i / 2][j] * k[i % 2][j];
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[n * 4 + i] = sum[i];
    }
  }

  // Divides by the row sums and writes O and LSE.
  __forceinline__ void store(const ForwardSm90WorkTileInfo& info) {
    float lse[2], total[2];
    load_shared_floats(lse, row_state() + kLse);
    load_shared_floats(total, row_state() + kTotal);
    rows.store(
        info, output, v_unit, [&](int half) { return total[half]; }, [&](float, int half) { return lse[half]; });
  }
};

}  // namespace tessera
