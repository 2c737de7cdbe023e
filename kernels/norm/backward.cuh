// The gradients of RMSNorm and LayerNorm. With n = (x - mean) rstd and g = dout weight:
//
//   dx = rstd (g - n mean(g n) - mean(g)) + dsum        (RMSNorm: without mean(g))
//   dweight = sum of dout n, dbias = sum of dout, over all rows
//
// Entry point: norm_backward, below. row_threads threads share a row, and the CTAs are persistent. A thread has the same
// columns in every row, and sums their dweight and dbias in registers. At the end, each CTA writes its sums to the workspace;
// norm/parameter_gradients.cuh adds them in a fixed order.
//
// A thread copies its chunks of the next rows to shared memory with cp.async, `stages` rows deep, and reads them from there in
// both passes:
//
//   shared memory   [stages][x, dout, dsum][chunks][threads] of 16 bytes
//
// Nobody else reads them, so that needs no barrier, and no registers. Without cp.async (sm_75), and if rows are not aligned, rows
// are loaded into registers, and the next one is brought into L2.
//
// A row that is too long for the registers (looped) is read twice, and the CTA's sums are in the workspace all the time.
#pragma once

#include "norm/backward_config.h"
#include "norm/row.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/shared.cuh"

namespace tessera {

// RowSum of several sums at once, with one barrier for all of them.
template <int kRowThreads, int count>
struct RowSums {
  float (*shared)[count][32];  // [2][count][warps of the CTA]
  int half = 0;

  __forceinline__ void operator()(float (&x)[count]) {
    constexpr int kLanes = kRowThreads < 32 ? kRowThreads : 32;
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) {
#pragma unroll
      for (float& one : x) one += __shfl_xor_sync(~0u, one, step);
    }
    if constexpr (kRowThreads > 32) {
      constexpr int kWarps = kRowThreads / 32;
      const int warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll
      for (int i = 0; i < count; ++i) {
        if (threadIdx.x % 32 == 0) shared[half][i][warp] = x[i];
        x[i] = 0;
      }
      __syncthreads();
      constexpr int kVector = kWarps < 4 ? kWarps : 4;
      using Vector = float[kVector];
#pragma unroll
      for (int w = 0; w < kWarps; w += kVector) {
#pragma unroll
        for (int i = 0; i < count; ++i) {
          Vector some;
          load_shared_floats(some, shared_address(&shared[half][i][warp / kWarps * kWarps + w]));
#pragma unroll
          for (const float one : some) x[i] += one;
        }
      }
      half ^= 1;
    }
  }
};

template <NormBackwardConfig config>
__forceinline__ void norm_backward(const NormBackwardParams& p) {
  constexpr DType kType = config.dtype;
  constexpr int kBytes = norm_element_bytes(kType), kElements = norm_chunk_elements(kType);
  constexpr int kRows = config.threads / config.row_threads;  // per CTA, at a time
  constexpr int kTileColumns = norm_tile_columns(config);
  constexpr int kSums = config.centered ? 2 : 1;  // of a row: g n, and g
  constexpr int kMatrices = norm_backward_matrices(config);
  static_assert(config.stages == 0 || (config.stages > 1 && config.aligned && !config.looped));
  __shared__ __align__(16) float partial[2][kSums][32];
  // Rows on their way, then [1 or 2][tile columns] if there are several rows at a time.
  extern __shared__ __align__(16) float memory[];
  float* const sums = memory + config.stages * norm_backward_stage_bytes(config) / 4;
  RowSums<config.row_threads, kSums> row_sums{partial};
  const RowChunks<kType, config.aligned, config.row_threads> own{static_cast<int>(threadIdx.x) % config.row_threads};
  const int tiles = config.looped ? (p.columns + kTileColumns - 1) / kTileColumns : 1;
  const float inverse = 1.0f / static_cast<float>(p.columns);
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
    float* const dweights = p.partial + static_cast<Index>(blockIdx.x) * p.columns * (config.centered ? 2 : 1);
    [[maybe_unused]] float* const dbiases = dweights + p.columns;
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

  const Index stride = static_cast<Index>(gridDim.x) * kRows;
  const int own_row = kRows > 1 ? static_cast<int>(threadIdx.x) / config.row_threads : 0;
  const auto slot = [&](int stage, int matrix, int chunk) {
    return shared_address(memory) + stage * norm_backward_stage_bytes(config) +
           ((matrix * config.chunks + chunk) * config.threads + threadIdx.x) * 16;
  };
  // This thread's chunks of a row to a stage: zeros, if the row does not exist.
  const auto copy = [&](Index row, int stage) {
#if __CUDA_ARCH__ >= 800
    const char* rows[3] = {row_at(p.x, row, kBytes), row_at(p.dout, row, kBytes), row_at(p.dsum, row, kBytes)};
#pragma unroll
    for (int matrix = 0; matrix < kMatrices; ++matrix) {
#pragma unroll
      for (int c = 0; c < config.chunks; ++c) {
        const int column = own.column(c, 0);
        cp_async_16(slot(stage, matrix, c), rows[matrix] + column * kBytes, row < p.rows && column < p.columns);
      }
    }
    cp_async_commit_group();
#endif
  };
  int stage = 0;
  const Index begin = static_cast<Index>(blockIdx.x) * kRows;
  if constexpr (config.stages > 0) {
    for (int i = 0; i < config.stages - 1; ++i) copy(begin + own_row + i * stride, i);
  }
  const auto load_statistics = [&](Index row, float& rstd, float& mean) {
    rstd = load_read_only(p.rstd + row, row < p.rows);
    mean = config.centered ? load_read_only(p.mean + row, row < p.rows) : 0.0f;
  };
  float rstd, mean, next_rstd, next_mean;
  if constexpr (config.stages > 0) load_statistics(begin + own_row, next_rstd, next_mean);

  for (Index first = begin; first < p.rows; first += stride) {
    const Index row = first + own_row;
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

    // In a stage, or in registers.
    const auto fetch = [&](int matrix, int c) {
      if constexpr (config.stages > 0) return load_shared_16(slot(stage, matrix, c));
      Words4& words = matrix == 0 ? x[c] : matrix == 1 ? dout[c] : dsum[c];
      stay_packed(words);
      return words;
    };

    if constexpr (config.stages > 0) {
      rstd = next_rstd, mean = next_mean;
      load_statistics(row + stride, next_rstd, next_mean);
    } else {
      load_statistics(row, rstd, mean);
    }
    float of_row[kSums] = {};
    for (int tile = 0; tile < tiles; ++tile) {
      if constexpr (config.stages > 0) {
#if __CUDA_ARCH__ >= 800
        copy(row + (config.stages - 1) * stride, stage == 0 ? config.stages - 1 : stage - 1);
        cp_async_wait_group<config.stages - 1>();
#endif
      } else {
        load(tile, !config.looped);
      }
      if constexpr (!config.looped && config.stages == 0) {
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
        stay_packed(weight[c]);
        const Chunk<kType> h = unpacked<kType>(fetch(0, c)), d = unpacked<kType>(fetch(1, c));
        const Chunk<kType> w = unpacked<kType>(weight[c]);
#pragma unroll
        for (int e = 0; e < kElements; ++e) {
          const float g = d.value[e] * w.value[e];
          of_row[0] += g * ((h.value[e] - mean) * rstd);
          if constexpr (config.centered) of_row[1] += g;
        }
      }
    }
    row_sums(of_row);
    const float product_mean = of_row[0] * inverse;
    const float mean_of_g = config.centered ? of_row[kSums - 1] * inverse : 0.0f;

    for (int tile = 0; tile < tiles; ++tile) {
      if constexpr (config.looped) {
        load(tile, true);
        if constexpr (config.parameters) {
          const bool starts = first < stride;  // the workspace holds nothing yet
          for_columns(tile, [&](float& sum_here, float& stored) { sum_here = starts ? 0.0f : stored; });
        }
      }
#pragma unroll
      for (int c = 0; c < config.chunks; ++c) {
        stay_packed(weight[c]);
        const Chunk<kType> h = unpacked<kType>(fetch(0, c)), d = unpacked<kType>(fetch(1, c));
        const Chunk<kType> w = unpacked<kType>(weight[c]);
        Chunk<kType> more = {};
        if constexpr (config.residual) more = unpacked<kType>(fetch(2, c));
        Chunk<kType> dx;
#pragma unroll
        for (int e = 0; e < kElements; ++e) {
          const float n = (h.value[e] - mean) * rstd;
          dx.value[e] = rstd * (d.value[e] * w.value[e] - n * product_mean - mean_of_g) + more.value[e];
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
    if constexpr (config.stages > 0) stage = stage + 1 < config.stages ? stage + 1 : 0;
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
