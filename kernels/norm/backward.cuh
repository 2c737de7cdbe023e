// The gradients of RMSNorm and LayerNorm. With n = (x - mean) rstd and g = dout weight:
//
//   dx = rstd (g - n mean(g n) - mean(g)) + dsum        (RMSNorm: without mean(g))
//   dweight = sum of dout n, dbias = sum of dout, over all rows
//
// Entry point: norm_backward, below. As in norm/forward.cuh, row_threads threads hold a row in registers and the CTAs are
// persistent and bring the next row into L2. A thread has the same columns in every row, and sums their dweight and dbias in registers. At the end, each
// CTA writes its sums to the workspace; norm/parameter_gradients.cuh adds them in a fixed order.
//
// A row that is too long for the registers (looped) is read twice, and the CTA's sums are in the workspace all the time.
#pragma once

#include "norm/backward_config.h"
#include "norm/row.cuh"
#include "ptx/griddepcontrol.cuh"

namespace tessera {

template <NormBackwardConfig config>
__forceinline__ void norm_backward(const NormBackwardParams& p) {
  constexpr DType kType = config.dtype;
  constexpr int kBytes = norm_element_bytes(kType), kElements = norm_chunk_elements(kType);
  constexpr int kRows = config.threads / config.row_threads;  // per CTA, at a time
  constexpr int kTileColumns = norm_tile_columns(config);
  __shared__ float partial[2][32];
  extern __shared__ float sums[];  // [1 or 2][tile columns], if there are several rows at a time
  RowSum<config.row_threads> row_sum{partial};
  const RowChunks<kType, config.aligned, config.row_threads> own{static_cast<int>(threadIdx.x) % config.row_threads};
  const int tiles = config.looped ? (p.columns + kTileColumns - 1) / kTileColumns : 1;
  const float inverse = 1.0f / static_cast<float>(p.columns);
  float* const dweights = p.partial + static_cast<Index>(blockIdx.x) * p.columns * (config.centered ? 2 : 1);
  float* const dbiases = dweights + p.columns;
  pdl_wait_and_launch_dependents();

  Words4 weight[config.chunks];
  const auto load_weights = [&](int tile) {
#pragma unroll
    for (int c = 0; c < config.chunks; ++c) {
      weight[c] = p.weight != nullptr ? own.load(p.weight, p.columns, tile * config.chunks + c) : all_ones<kType>();
    }
  };
  if constexpr (!config.looped) load_weights(0);

  float dweight[config.chunks][kElements] = {}, dbias[config.chunks][kElements] = {};
  // Calls f(sum, element of the CTA's sums) for every column of this thread.
  const auto for_columns = [&](int tile, auto&& f) {
#pragma unroll
    for (int c = 0; c < config.chunks; ++c) {
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        const int column = own.column(tile * config.chunks + c, e);
        if (column >= p.columns) continue;
        f(dweight[c][e], dweights[column]);
        if constexpr (config.centered) f(dbias[c][e], dbiases[column]);
      }
    }
  };

  for (Index first = static_cast<Index>(blockIdx.x) * kRows; first < p.rows;
       first += static_cast<Index>(gridDim.x) * kRows) {
    const Index row = first + static_cast<int>(threadIdx.x) / config.row_threads;
    const int columns = row < p.rows ? p.columns : 0;  // nothing is read or written beyond the last row
    const char* x_row = row_at(p.x, row, kBytes);
    const char* dout_row = row_at(p.dout, row, kBytes);
    const char* dsum_row = row_at(p.dsum, row, kBytes);

    Words4 x[config.chunks], dout[config.chunks], dsum[config.chunks];
    const auto load = [&](int tile, bool last) {
#pragma unroll
      for (int c = 0; c < config.chunks; ++c) {
        x[c] = own.load(x_row, columns, tile * config.chunks + c);
        dout[c] = own.load(dout_row, columns, tile * config.chunks + c);
      }
      if (config.residual && last) {
#pragma unroll
        for (int c = 0; c < config.chunks; ++c) {
          dsum[c] = own.load(dsum_row, columns, tile * config.chunks + c);
        }
      }
      if constexpr (config.looped) load_weights(tile);
    };

    const float rstd = load_read_only(p.rstd + row, columns > 0);
    const float mean = config.centered ? load_read_only(p.mean + row, columns > 0) : 0.0f;
    float product_sum = 0, sum = 0;  // of g n, and of g
    for (int tile = 0; tile < tiles; ++tile) {
      load(tile, !config.looped);
      if constexpr (!config.looped) {
        const Index next = row + static_cast<Index>(gridDim.x) * kRows;
        const int next_columns = next < p.rows ? p.columns : 0;
#pragma unroll
        for (int c = 0; c < config.chunks; ++c) {
          own.prefetch(row_at(p.x, next, kBytes), next_columns, c);
          own.prefetch(row_at(p.dout, next, kBytes), next_columns, c);
          if constexpr (config.residual) own.prefetch(row_at(p.dsum, next, kBytes), next_columns, c);
        }
      }
#pragma unroll
      for (int c = 0; c < config.chunks; ++c) {
        stay_packed(x[c]);
        stay_packed(dout[c]);
        stay_packed(weight[c]);
        const Chunk<kType> h = unpacked<kType>(x[c]), d = unpacked<kType>(dout[c]), w = unpacked<kType>(weight[c]);
#pragma unroll
        for (int e = 0; e < kElements; ++e) {
          const float g = d.value[e] * w.value[e];
          product_sum += g * ((h.value[e] - mean) * rstd);
          if constexpr (config.centered) sum += g;
        }
      }
    }
    product_sum = row_sum(product_sum) * inverse;
    if constexpr (config.centered) sum = row_sum(sum) * inverse;

    for (int tile = 0; tile < tiles; ++tile) {
      if constexpr (config.looped) {
        load(tile, true);
        if constexpr (config.parameters) {
          const bool starts = first < static_cast<Index>(gridDim.x) * kRows;  // the workspace holds nothing yet
          for_columns(tile, [&](float& sum_here, float& stored) { sum_here = starts ? 0.0f : stored; });
        }
      }
#pragma unroll
      for (int c = 0; c < config.chunks; ++c) {
        stay_packed(x[c]);
        stay_packed(dout[c]);
        stay_packed(weight[c]);
        const Chunk<kType> h = unpacked<kType>(x[c]), d = unpacked<kType>(dout[c]), w = unpacked<kType>(weight[c]);
        Chunk<kType> more = {};
        if constexpr (config.residual) more = unpacked<kType>(dsum[c]);
        Chunk<kType> dx;
#pragma unroll
        for (int e = 0; e < kElements; ++e) {
          const float n = (h.value[e] - mean) * rstd;
          dx.value[e] = rstd * (d.value[e] * w.value[e] - n * product_sum - sum) + more.value[e];
          if constexpr (config.parameters) {
            dweight[c][e] += d.value[e] * n;
            if constexpr (config.centered) dbias[c][e] += d.value[e];
          }
        }
        own.store(row_at(p.dx, row, kBytes), columns, tile * config.chunks + c, packed<kType>(dx));
      }
      if constexpr (config.looped && config.parameters) {
        for_columns(tile, [](float sum_here, float& stored) { stored = sum_here; });
      }
    }
  }

  if constexpr (config.parameters && !config.looped) {
    if constexpr (kRows > 1) {
      const int group = static_cast<int>(threadIdx.x) / config.row_threads;
      for (int turn = 0; turn < kRows; ++turn) {
        if (group == turn) {
#pragma unroll
          for (int c = 0; c < config.chunks; ++c) {
#pragma unroll
            for (int e = 0; e < kElements; ++e) {
              float* at = sums + (c * config.row_threads + own.thread) * kElements + e;
              dweight[c][e] = *at = (turn > 0 ? *at : 0.0f) + dweight[c][e];
              if constexpr (config.centered) {
                at += kTileColumns;
                dbias[c][e] = *at = (turn > 0 ? *at : 0.0f) + dbias[c][e];
              }
            }
          }
        }
        __syncthreads();
      }
      if (group < kRows - 1) return;
    }
    for_columns(0, [](float sum_here, float& stored) { stored = sum_here; });
  }
}

}  // namespace tessera
