// The elements between the layers of experts, backward. Entry point: moe_elements, below. With w the weight of a row and
// dhidden the product of the token's dout, without the weight, and the expert's down:
//
//   hidden  = f(before), or before f(before_gate)
//   dw      = sum(dhidden hidden)           over the row: the results of the experts are not kept for it
//   dbefore = w dhidden f'(before), or w dhidden f(before_gate)
//   dbefore_gate = w dhidden before f'(before_gate)
//
// hidden is written times w, because ddown = (w dout)^T hidden = dout^T (w hidden): so the rows of dout are copied as they
// are. It waits for memory. A warp has a row, so that the sum needs no shared memory.
#pragma once

#include "gemm/epilogue.cuh"
#include "moe/elements_config.h"
#include "ptx/griddepcontrol.cuh"

namespace tessera {

template <MoeElementsConfig config>
struct MoeElements {
  static constexpr int kVector = config.vector;
  const MoeElementsParams& p;

  struct Elements {
    float value[kVector];
  };
  __forceinline__ Elements load(const GemmMatrix& from, Index row, int column) const {
    Elements e;
    const Bits16* at = static_cast<const Bits16*>(from.data) + row * from.row_stride + column;
    const bool wanted = column < p.columns;
    if constexpr (kVector == 8) {
      const Words4 words = load_streaming_16(at, wanted);
#pragma unroll
      for (int i = 0; i < kVector / 2; ++i) {
        e.value[2 * i] = low_to_float<config.dtype>(words.word[i]);
        e.value[2 * i + 1] = high_to_float<config.dtype>(words.word[i]);
      }
    } else {
      e.value[0] = to_float<config.dtype>(load_read_only(at, wanted));
    }
    return e;
  }
  __forceinline__ void store(const GemmMatrix& to, Index row, int column, const Elements& e) const {
    if (column >= p.columns) return;
    Bits16* at = static_cast<Bits16*>(to.data) + row * to.row_stride + column;
    if constexpr (kVector == 8) {
      Words4 words;
#pragma unroll
      for (int i = 0; i < kVector / 2; ++i) words.word[i] = pack<config.dtype>(e.value[2 * i], e.value[2 * i + 1]);
      store_16(at, words);
    } else {
      *at = from_float<config.dtype>(e.value[0]);
    }
  }

  __forceinline__ void run() const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const Index row = static_cast<Index>(blockIdx.x) * (kMoeElementsThreads / 32) + static_cast<int>(threadIdx.x) / 32;
    if (row >= p.rows || row >= *p.last_row) return;
    const float weight = p.row_weights[row];
    float sum = 0;
    for (int first = 0; first < p.columns; first += 32 * kVector) {
      const int column = first + lane * kVector;
      const Elements before = load(p.before, row, column), dhidden = load(p.dhidden, row, column);
      Elements gate = {};
      if constexpr (config.gated) gate = load(p.before_gate, row, column);
      Elements hidden, dbefore, dgate;
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const float d = weight * dhidden.value[i], x = before.value[i], g = gate.value[i];
        const float f = activate<config.activation>(config.gated ? g : x);
        const float h = config.gated ? x * f : f;
        const float slope = activation_derivative<config.activation>(config.gated ? g : x);
        sum += dhidden.value[i] * h;
        hidden.value[i] = weight * h;
        dbefore.value[i] = d * (config.gated ? f : slope);
        dgate.value[i] = d * x * slope;
      }
      store(p.dbefore, row, column, dbefore);
      if constexpr (config.gated) store(p.dbefore_gate, row, column, dgate);
      if (p.hidden.data != nullptr) store(p.hidden, row, column, hidden);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (lane == 0) p.row_dweights[row] = sum;
  }
};

template <MoeElementsConfig config>
__forceinline__ void moe_elements(const MoeElementsParams& p) {
  pdl_wait_and_launch_dependents();
  MoeElements<config>{p}.run();
}

}  // namespace tessera
