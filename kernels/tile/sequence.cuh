// Offsets of a sequence's rows in global memory, packed or not.
#pragma once

#include "ptx/convert.cuh"
#include "tile/types.h"

namespace tessera {

__forceinline__ int length_of(const int* cu_seqlens, unsigned batch, int seq) {
  return cu_seqlens ? cu_seqlens[batch + 1] - cu_seqlens[batch] : seq;
}

// Row 0 of a head, [B, S, H, D] or [total, H, D].
__forceinline__ Index offset_of(const Strides& strides, const int* cu_seqlens, unsigned batch, unsigned head) {
  return (cu_seqlens ? cu_seqlens[batch] * strides.seq : batch * strides.batch) + head * strides.head;
}
__forceinline__ const Bits16* rows_of(const void* data, const Strides& strides, const int* cu_seqlens, unsigned batch,
                                      unsigned head) {
  return static_cast<const Bits16*>(data) + offset_of(strides, cu_seqlens, batch, head);
}
__forceinline__ Bits16* rows_of(void* data, const Strides& strides, const int* cu_seqlens, unsigned batch,
                                unsigned head) {
  return static_cast<Bits16*>(data) + offset_of(strides, cu_seqlens, batch, head);
}

// [B, H, S], or [H, total].
__forceinline__ Index offset_of(const RowStrides& strides, const int* cu_seqlens, unsigned batch, unsigned head) {
  return (cu_seqlens ? cu_seqlens[batch] : batch * strides.batch) + head * strides.head;
}

}  // namespace tessera
