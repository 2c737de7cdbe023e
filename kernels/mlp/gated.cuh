// The elements between the layers of a gated MLP, for every architecture. Entry point: mlp_gated, below.
//
//   forward    hidden  = before f(before_gate)
//   gradient   dbefore = dhidden f(before_gate)    dbefore_gate = dhidden before f'(before_gate)    hidden again
//
// It waits for memory: each thread has 8 elements of a row, in one 16-byte access per matrix, if rows allow that. The
// hidden rows are made again because ddown needs them, and writing them here costs less than keeping them from the forward.
#pragma once

#include "gemm/epilogue.cuh"
#include "mlp/gated_config.h"
#include "ptx/griddepcontrol.cuh"

namespace tessera {

template <MlpGatedConfig config>
struct MlpGated {
  static constexpr int kVector = config.vector;
  const MlpGatedParams& p;

  struct Elements {
    float value[kVector];
  };

  // What is behind a row's last element is neither read nor written.
  __forceinline__ Elements load(const GemmMatrix& from, Index row, int column) const {
    Elements e = {};
    const Bits16* at = static_cast<const Bits16*>(from.data) + row * from.row_stride + column;
    if (kVector == 8 && column + 8 <= p.columns) {
      const Words4 words = load_streaming_16(at, true);
#pragma unroll
      for (int i = 0; i < kVector / 2; ++i) {
        e.value[2 * i] = low_to_float<config.dtype>(words.word[i]);
        e.value[2 * i + 1] = high_to_float<config.dtype>(words.word[i]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        e.value[i] = to_float<config.dtype>(load_read_only(at + i, column + i < p.columns));
      }
    }
    return e;
  }
  __forceinline__ void store(const GemmMatrix& to, Index row, int column, const Elements& e) const {
    Bits16* at = static_cast<Bits16*>(to.data) + row * to.row_stride + column;
    if (kVector == 8 && column + 8 <= p.columns) {
      Words4 words = {};
#pragma unroll
      for (int i = 0; i < kVector / 2; ++i) words.word[i] = pack<config.dtype>(e.value[2 * i], e.value[2 * i + 1]);
      store_16(at, words);
    } else {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        if (column + i < p.columns) at[i] = from_float<config.dtype>(e.value[i]);
      }
    }
  }

  __forceinline__ void run() const {
    const Index index = static_cast<Index>(blockIdx.x) * blockDim.x + threadIdx.x;
    const Index row = index / p.row_chunks;
    if (row >= p.rows) return;
    const int column = static_cast<int>(index - row * p.row_chunks) * kVector;
    const Elements before = load(p.before, row, column), gate = load(p.before_gate, row, column);
    Elements hidden;
    if constexpr (config.gradient) {
      const Elements dhidden = load(p.dhidden, row, column);
      Elements dbefore, dgate;
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const float f = activate<config.activation>(gate.value[i]);
        hidden.value[i] = before.value[i] * f;
        dbefore.value[i] = dhidden.value[i] * f;
        dgate.value[i] = dhidden.value[i] * before.value[i] * activation_derivative<config.activation>(gate.value[i]);
      }
      store(p.dbefore, row, column, dbefore);
      store(p.dbefore_gate, row, column, dgate);
      if (p.hidden.data != nullptr) store(p.hidden, row, column, hidden);
    } else {
#pragma unroll
      for (int i = 0; i < kVector; ++i) hidden.value[i] = before.value[i] * activate<config.activation>(gate.value[i]);
      store(p.hidden, row, column, hidden);
    }
  }
};

template <MlpGatedConfig config>
__forceinline__ void mlp_gated(const MlpGatedParams& p) {
  pdl_wait_and_launch_dependents();
  MlpGated<config>{p}.run();
}

}  // namespace tessera
