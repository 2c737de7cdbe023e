// Rows of a KV cache in 16-byte chunks, and rotary embedding of them.
#pragma once

#include "ptx/convert.cuh"
#include "ptx/global.cuh"
#include "tile/types.h"

namespace tessera {

// Element `column` of a row after rotary embedding at a position. value(column): of the row before it.
template <DType dtype, class Params, class Value>
__forceinline__ float rotated(const Params& p, const Value& value, int column, int position) {
  const float x = value(column);
  if (column >= p.rotary_dim) return x;
  const int half = p.rotary_dim / 2;
  const bool first = p.rotary_interleaved ? column % 2 == 0 : column < half;
  const int pair = p.rotary_interleaved ? column / 2 : first ? column : column - half;
  const int other = p.rotary_interleaved ? column ^ 1 : first ? column + half : column - half;
  const float y = value(other);
  const float cosine = to_float<dtype>(static_cast<const Bits16*>(p.rotary_cos)[position * p.rotary_cos_stride + pair]);
  const float sine = to_float<dtype>(static_cast<const Bits16*>(p.rotary_sin)[position * p.rotary_sin_stride + pair]);
  // Each product is rounded, as on the CPU and in PyTorch: the cache has the same bits everywhere.
  return __fadd_rn(__fmul_rn(x, cosine), first ? -__fmul_rn(y, sine) : __fmul_rn(y, sine));
}

template <DType dtype, class Params, class Value>
__forceinline__ Words4 rotated_chunk(const Params& p, const Value& value, int chunk, int position) {
  Words4 words;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int column = chunk * 8 + i * 2;
    words.word[i] =
        pack<dtype>(rotated<dtype>(p, value, column, position), rotated<dtype>(p, value, column + 1, position));
  }
  return words;
}

// Eight elements of a row.
template <int vector>
__forceinline__ Words4 load_chunk(const Bits16* from, bool wanted) {
  if constexpr (vector == 8) {
    return load_16(from, wanted);
  } else {
    Words4 words;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words.word[i] = static_cast<unsigned>(load_read_only(from + 2 * i, wanted)) |
                      static_cast<unsigned>(load_read_only(from + 2 * i + 1, wanted)) << 16;
    }
    return words;
  }
}
template <int vector>
__forceinline__ void store_chunk(Bits16* to, const Words4& words) {
  if constexpr (vector == 8) {
    store_16(to, words);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) to[i] = static_cast<Bits16>(words.word[i / 2] >> (i % 2 * 16));
  }
}

}  // namespace tessera
