// What a consumer of attention/forward_sm90.cuh computes with: scores, probabilities and output of its 64 rows, in
// registers, and the products of 16-bit operands.
#pragma once

#include "attention/forward_sm90_rows.cuh"
#include "ptx/shared.cuh"
#include "ptx/wgmma.cuh"
#include "tile/online_softmax.cuh"

namespace tessera {

template <AttentionForwardSm90Config config>
struct ForwardSm90Math {
  static constexpr DType kType = config.dtype;
  static constexpr int kMinAtom = config.min_atom;
  static constexpr int kKeyTiles = config.block_k / 8;
  static constexpr int kValueTiles = config.dim_v / 8;
  static constexpr int kQkSteps = (config.dim_qk + 15) / 16;
  static constexpr int kPvSteps = config.block_k / 16;
  static constexpr bool kRoundsQ = false;

  ForwardSm90Rows<config, AttentionForwardSm90Params> rows;

  float scores[kKeyTiles * 4];    // [tile of 8 keys][value of a lane]
  unsigned weights[kPvSteps][4];  // P as wgmma's A operand
  float output[kValueTiles * 4];  // [tile of 8 columns][value of a lane]
  OnlineSoftmax<kKeyTiles> softmax = {.scale_log2 = (config.score_mod ? 1.0f : rows.p.scale) * kLog2E};
  float rescale[2];  // factors for O if its rows' references were raised

  __forceinline__ void start(const ForwardSm90WorkTileInfo&, bool) {}
  __forceinline__ void load_scales(int) {}
  __forceinline__ void finish() {}
  __forceinline__ void reset() {
    softmax.reset();
#pragma unroll
    for (int i = 0; i < kValueTiles * 4; ++i) output[i] = 0;
  }

  // S = Q K^T.
  __forceinline__ void issue_scores(unsigned q_tile, unsigned k_tile) {
#pragma unroll
    for (int step = 0; step < kQkSteps; ++step) {
      issue_score_step(step, atom_at(config.dim_qk, kMinAtom, step * 16), q_tile, k_tile);
    }
  }
  __forceinline__ void issue_score_step(int step, const SwizzleAtom& atom, unsigned q_tile, unsigned k_tile) {
    const unsigned from_q =
        q_tile + atom_offset(atom, block_q_of(config)) + static_cast<unsigned>(rows.first_row() * atom.width) * 2;
    const unsigned from_k = k_tile + atom_offset(atom, config.block_k);
    const unsigned within = (step * 16 - atom.column) * 2;
    const auto issue = [&](const MatrixDescriptor& q, const MatrixDescriptor& k) {
      Wgmma<config.block_k>::template shared_shared<kType, false>(scores, q.at(within), k.at(within), step > 0);
    };
    if (atom.width == 64) {
      issue(matrix_descriptor<64>(from_q, 16), matrix_descriptor<64>(from_k, 16));
    } else if (atom.width == 32) {
      issue(matrix_descriptor<32>(from_q, 16), matrix_descriptor<32>(from_k, 16));
    } else {
      issue(matrix_descriptor<16>(from_q, 16), matrix_descriptor<16>(from_k, 16));
    }
  }

  // O += P V, or with few_keys O = P V: one product covers all atoms of 64 columns, and each narrower atom has its own.
  __forceinline__ void issue_output(unsigned v_tile) {
    constexpr int kWide = padded_dim(config.dim_v, kMinAtom) / kWidestAtom * kWidestAtom;
    constexpr int kWideColumns = kWide < config.dim_v ? kWide : config.dim_v;
    if constexpr (kWideColumns > 0) add_columns<64, 0, kWideColumns>(v_tile);
    if constexpr (kWideColumns < config.dim_v) {
      constexpr SwizzleAtom kNext = atom_at(config.dim_v, kMinAtom, kWide);
      constexpr int kEnd = kNext.column + kNext.width < config.dim_v ? kNext.column + kNext.width : config.dim_v;
      add_columns<kNext.width, kNext.column, kEnd - kNext.column>(v_tile);
      if constexpr (kEnd < config.dim_v) add_columns<16, kEnd, config.dim_v - kEnd>(v_tile);
    }
  }
  template <int width, int first, int count>
  __forceinline__ void add_columns(unsigned v_tile) {
    const MatrixDescriptor v =
        matrix_descriptor<width>(v_tile + first * config.block_k * 2, config.block_k * kWidestAtom * 2);
    float(&sums)[count / 2] = reinterpret_cast<float(&)[count / 2]>(output[first / 2]);
#pragma unroll
    for (int step = 0; step < kPvSteps; ++step) {
      Wgmma<count>::template registers_shared<kType, true>(sums, weights[step], v.at(step * 16 * width * 2),
                                                           !config.few_keys || step > 0);
    }
  }
  __forceinline__ void finish_output() { wgmma_fence_operand(output); }
  __forceinline__ void rescale_output(bool grown) {
    if (!grown) return;
#pragma unroll
    for (int i = 0; i < kValueTiles * 4; ++i) output[i] *= rescale[i / 2 % 2];
  }

  // Scores to probabilities. Returns whether O, which a product may still be adding to, must be rescaled afterwards.
  template <class Recompute>
  __forceinline__ bool softmax_of(int tile, const KeyRange& keys, const Recompute& recompute) {
    const int first_k = tile * config.block_k;
    const bool masked = keys.is_masked(first_k, config.block_k);
    if constexpr (config.score_mod) {
#pragma unroll
      for (int i = 0; i < kKeyTiles * 4; ++i) rows.modify(scores[i], rows.p.scale, first_k + i / 4 * 8, i % 4);
    }
    if (masked) rows.mask(scores, first_k);
    return softmax.update_speculatively(reinterpret_cast<float(&)[1][kKeyTiles * 4]>(scores),
                                        masked || config.score_mod, recompute,
                                        [&](int, int half, float factor) { rescale[half] = factor; });
  }

  // Scores to probabilities, of the only key tile.
  __forceinline__ void softmax_of_few_keys() {
    if (config.masked || rows.len_k < config.block_k) rows.mask(scores, 0);
    softmax.take_all(reinterpret_cast<float(&)[1][kKeyTiles * 4]>(scores));
  }

  __forceinline__ void pack_weights() {
#pragma unroll
    for (int step = 0; step < kPvSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        weights[step][i] = pack<kType>(scores[step * 8 + i * 2], scores[step * 8 + i * 2 + 1]);
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
      for (int column = 0; column < config.dim_qk; column += 2) {
        unsigned q[2], k[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          q[i] = load_shared_4(q_tile + offset_in_tile(rows.first_row() + rows.row_of(i), column, block_q_of(config),
                                                       config.dim_qk, kMinAtom));
          k[i] = load_shared_4(
              k_tile + offset_in_tile(n * 8 + rows.lane % 4 * 2 + i, column, config.block_k, config.dim_qk, kMinAtom));
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sum[i] += low_to_float<kType>(q[i / 2]) * low_to_float<kType>(k[i % 2]) +
                    high_to_float<kType>(q[i / 2]) * high_to_float<kType>(k[i % 2]);
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[n * 4 + i] = sum[i];
    }
  }

  // Divides by the row sums and writes O and LSE.
  __forceinline__ void store(const ForwardSm90WorkTileInfo& info) const {
    rows.store(
        info, output, 1.0f, [&](int half) { return softmax.total(0, half); },
        [&](float sum, int half) { return softmax.log_sum_exp(sum, 0, half); });
  }
};

}  // namespace tessera
