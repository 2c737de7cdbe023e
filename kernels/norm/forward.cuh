// RMSNorm and LayerNorm, with the residual added before: h = x + residual, y = (h - mean) rstd weight + bias. Entry point:
// norm_forward, below.
//
// row_threads threads share a row and hold it in registers, so every byte is read and written once. The CTAs are
// persistent; weight and bias stay in registers from row to row, and the next row is brought into L2 while this one is
// normalised. h is rounded to its type first: y is the norm of the h that is written. LayerNorm's variance is the mean of
// squares of differences from the mean, in a second pass over the registers, since E[h^2] - mean^2 would cancel.
//
//   row     load x, residual -> h -> store sum     mean (LayerNorm)     rstd     y -> store
//
// A row that is too long for the registers (looped) is read again by every pass; it is then mostly in L2.
#pragma once

#include "norm/forward_config.h"
#include "norm/row.cuh"
#include "ptx/griddepcontrol.cuh"

namespace tessera {

template <NormForwardConfig config>
__forceinline__ void norm_forward(const NormForwardParams& p) {
  constexpr DType kType = config.dtype;
  constexpr int kBytes = norm_element_bytes(kType), kElements = norm_chunk_elements(kType);
  constexpr int kRows = config.threads / config.row_threads;  // per CTA, at a time
  constexpr int kTileColumns = norm_tile_columns(config);
  __shared__ float partial[2][32];
  RowSum<config.row_threads> row_sum{partial};
  const RowChunks<kType, config.aligned, config.row_threads> own{static_cast<int>(threadIdx.x) % config.row_threads};
  const int tiles = config.looped ? (p.columns + kTileColumns - 1) / kTileColumns : 1;
  const float inverse = 1.0f / static_cast<float>(p.columns);
  pdl_wait_and_launch_dependents();

  Words4 weight[config.chunks], bias[config.chunks];
  const auto load_weights = [&](int tile) {
#pragma unroll
    for (int c = 0; c < config.chunks; ++c) {
      const int chunk = tile * config.chunks + c;
      weight[c] = p.weight != nullptr ? own.load(p.weight, p.columns, chunk) : all_ones<kType>();
      if constexpr (config.centered) bias[c] = own.load(p.bias, p.bias != nullptr ? p.columns : 0, chunk);
    }
  };
  if constexpr (!config.looped) load_weights(0);

  for (Index first = static_cast<Index>(blockIdx.x) * kRows; first < p.rows;
       first += static_cast<Index>(gridDim.x) * kRows) {
    const Index row = first + static_cast<int>(threadIdx.x) / config.row_threads;
    const int columns = row < p.rows ? p.columns : 0;  // nothing is read or written beyond the last row
    const char* x = row_at(p.x, row, kBytes);
    const char* residual = row_at(p.residual, row, kBytes);

    Words4 h[config.chunks];
    const auto load = [&](int tile) {
#pragma unroll
      for (int c = 0; c < config.chunks; ++c) {
        h[c] = own.load(x, columns, tile * config.chunks + c);
      }
      if constexpr (config.residual) {
        Words4 more[config.chunks];
#pragma unroll
        for (int c = 0; c < config.chunks; ++c) {
          more[c] = own.load(residual, columns, tile * config.chunks + c);
        }
#pragma unroll
        for (int c = 0; c < config.chunks; ++c) {
          Chunk<kType> sum = unpacked<kType>(h[c]);
          const Chunk<kType> other = unpacked<kType>(more[c]);
#pragma unroll
          for (int e = 0; e < kElements; ++e) sum.value[e] += other.value[e];
          h[c] = packed<kType>(sum);
        }
      }
    };

    float sum = 0;  // of h, or of its squares
    for (int tile = 0; tile < tiles; ++tile) {
      if constexpr (!config.looped) {
        const Index next = row + static_cast<Index>(gridDim.x) * kRows;
        const int next_columns = next < p.rows ? p.columns : 0;
#pragma unroll
        for (int c = 0; c < config.chunks; ++c) {
          own.prefetch(row_at(p.x, next, kBytes), next_columns, c);
          if constexpr (config.residual) own.prefetch(row_at(p.residual, next, kBytes), next_columns, c);
        }
      }
      load(tile);
#pragma unroll
      for (int c = 0; c < config.chunks; ++c) {
        if constexpr (config.residual) {
          own.store(row_at(p.sum, row, kBytes), columns, tile * config.chunks + c, h[c]);
        }
        const Chunk<kType> chunk = unpacked<kType>(h[c]);
#pragma unroll
        for (const float value : chunk.value) sum += config.centered ? value : value * value;
      }
    }
    float mean = 0, variance = row_sum(sum) * inverse;
    if constexpr (config.centered) {
      mean = variance;
      float squares = 0;
      for (int tile = 0; tile < tiles; ++tile) {
        if constexpr (config.looped) load(tile);
#pragma unroll
        for (int c = 0; c < config.chunks; ++c) {
          stay_packed(h[c]);
          const Chunk<kType> chunk = unpacked<kType>(h[c]);
#pragma unroll
          for (int e = 0; e < kElements; ++e) {
            const bool here = own.column(tile * config.chunks + c, config.aligned ? 0 : e) < columns;
            const float difference = here ? chunk.value[e] - mean : 0.0f;
            squares += difference * difference;
          }
        }
      }
      variance = row_sum(squares) * inverse;
    }
    const float rstd = rsqrtf(variance + p.eps);
    if (own.thread == 0 && columns > 0) {
      if (p.rstd != nullptr) p.rstd[row] = rstd;
      if (config.centered && p.mean != nullptr) p.mean[row] = mean;
    }

    for (int tile = 0; tile < tiles; ++tile) {
      if constexpr (config.looped) {
        load(tile);
        load_weights(tile);
      }
#pragma unroll
      for (int c = 0; c < config.chunks; ++c) {
        stay_packed(h[c]);
        stay_packed(weight[c]);
        if constexpr (config.centered) stay_packed(bias[c]);
        Chunk<kType> chunk = unpacked<kType>(h[c]);
        const Chunk<kType> w = unpacked<kType>(weight[c]);
        Chunk<kType> b = {};
        if constexpr (config.centered) b = unpacked<kType>(bias[c]);
#pragma unroll
        for (int e = 0; e < kElements; ++e) {
          chunk.value[e] = (chunk.value[e] - mean) * rstd * w.value[e] + b.value[e];
        }
        own.store(row_at(p.out, row, kBytes), columns, tile * config.chunks + c, packed<kType>(chunk));
      }
    }
  }
}

}  // namespace tessera
