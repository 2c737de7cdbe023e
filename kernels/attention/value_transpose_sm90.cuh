// V from [keys, Dv] to [Dv, keys], e4m3, with the keys of each 16 in the order of value_key: a step before
// attention/forward_fp8_sm90.cuh. Memory-bound: 2 bytes per element.
//
// A CTA transposes tiles of keys x columns of one head. A warp reads 4 bytes per lane of four keys' rows, those whose
// bytes are neighbours in `out`, and exchanges bytes within each lane: each of its four words then has four keys of one
// column. These go through shared memory, and each row of the result is written in pieces of 16 bytes. Keys beyond the
// sequence, up to the next multiple of 16, are written as zeros.
#pragma once

#include "attention/value_transpose_config.h"
#include "ptx/global.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/shared.cuh"
#include "tile/sequence.cuh"

namespace tessera {

template <ValueTransposeConfig config>
__forceinline__ void value_transpose(const ValueTransposeParams& p) {
  constexpr int kPitch = value_transpose_pitch(config);
  constexpr int kWordColumns = config.columns / 4;
  static_assert(config.keys % kValueGroup == 0 && config.columns == 128 && config.threads % 32 == 0);
  extern __shared__ __align__(16) unsigned char memory[];
  const unsigned shared = shared_address(memory);
  pdl_wait_and_launch_dependents();
  const unsigned tile = blockIdx.x % p.tiles;
  const unsigned head = blockIdx.x / p.tiles % p.heads;
  const unsigned batch = blockIdx.x / p.tiles / p.heads;
  const int length = length_of(p.cu_seqlens, batch, p.seq_k);
  const int first = static_cast<int>(tile) * config.keys;
  const int padded = static_cast<int>(value_length(length));
  if (first >= padded) return;

  const unsigned char* const v =
      static_cast<const unsigned char*>(p.v) + offset_of(p.strides, p.cu_seqlens, batch, head);
  const Index start = p.cu_seqlens ? value_start(p.cu_seqlens[batch], batch) : 0;
  unsigned char* const out = static_cast<unsigned char*>(p.out) +
                             (static_cast<Index>(p.cu_seqlens ? 0 : batch) * p.heads + head) * p.dim_v * p.pitch +
                             start;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int column = 0; column < p.dim_v; column += config.columns) {
    const bool mine = column + lane * 4 < p.dim_v;
#pragma unroll
    for (int word = warp; word < config.keys / 4; word += config.threads / 32) {
      unsigned row[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = first + word / 4 * kValueGroup + value_key(word % 4 * 4 + i);
        row[i] = 0;
        if (mine && key < length) {
          row[i] = *reinterpret_cast<const unsigned*>(v + key * p.strides.seq + column + lane * 4);
        }
      }
      // Byte j of row i becomes byte i of word j.
      const unsigned low01 = __byte_perm(row[0], row[1], 0x5140), high01 = __byte_perm(row[0], row[1], 0x7362);
      const unsigned low23 = __byte_perm(row[2], row[3], 0x5140), high23 = __byte_perm(row[2], row[3], 0x7362);
      const unsigned at = shared + (lane * kPitch + word) * 4;
      constexpr int kPlane = kWordColumns * kPitch * 4;
      store_shared_4(at, __byte_perm(low01, low23, 0x5410));
      store_shared_4(at + kPlane, __byte_perm(low01, low23, 0x7632));
      store_shared_4(at + 2 * kPlane, __byte_perm(high01, high23, 0x5410));
      store_shared_4(at + 3 * kPlane, __byte_perm(high01, high23, 0x7632));
    }
    __syncthreads();
    constexpr int kPieces = config.keys / 16;  // of a row
    for (int i = threadIdx.x; i < config.columns * kPieces; i += config.threads) {
      const int piece = i % kPieces, of = i / kPieces;  // columns in the order in which they lie in shared memory
      const int at = of % kWordColumns * 4 + of / kWordColumns;
      if (column + at >= p.dim_v || first + piece * 16 >= padded) continue;
      Words4 words;
#pragma unroll
      for (int j = 0; j < 4; ++j) words.word[j] = load_shared_4(shared + (of * kPitch + piece * 4 + j) * 4);
      store_16(out + (column + at) * p.pitch + first + piece * 16, words);
    }
    __syncthreads();
  }
}

}  // namespace tessera
