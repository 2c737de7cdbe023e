// Rotary position embedding. Entry point: norm_rotary, below.
//
// A thread has one slot of a head: 16 bytes of both halves, 16 bytes of whole pairs (interleaved), or 16 bytes behind the
// rotated dims, which it copies. It rotates its slot in `heads` heads of a token, so that cos and sin are loaded once for
// them and all their loads are in flight at a time. If anything is not aligned, a slot is one pair or one element.
#pragma once

#include "norm/rotary_config.h"
#include "norm/row.cuh"
#include "ptx/griddepcontrol.cuh"

namespace tessera {

template <DType dtype>
__forceinline__ float load_element(const void* data, Index at) {
  if constexpr (dtype == DType::kFloat32) {
    return load_read_only(static_cast<const float*>(data) + at, true);
  } else {
    return to_float<dtype>(load_read_only(static_cast<const Bits16*>(data) + at, true));
  }
}

template <DType dtype>
__forceinline__ void store_element(void* data, Index at, float value) {
  if constexpr (dtype == DType::kFloat32) {
    static_cast<float*>(data)[at] = value;
  } else {
    static_cast<Bits16*>(data)[at] = from_float<dtype>(value);
  }
}

// The angles of a slot: the tables' elements at column to column + kPairs - 1 of a row.
template <NormRotaryConfig config>
__forceinline__ void load_angles(float (&to)[norm_rotary_pairs(config)], const void* table, Index at) {
  constexpr int kPairs = norm_rotary_pairs(config);
  constexpr int kVector = norm_chunk_elements(config.table_dtype);
  if constexpr (config.aligned && kPairs % kVector == 0) {
#pragma unroll
    for (int i = 0; i < kPairs; i += kVector) {
      const char* from = static_cast<const char*>(table) + (at + i) * norm_element_bytes(config.table_dtype);
      const Chunk<config.table_dtype> chunk = unpacked<config.table_dtype>(load_16(from, true));
#pragma unroll
      for (int e = 0; e < kVector; ++e) to[i + e] = chunk.value[e];
    }
  } else {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) to[i] = load_element<config.table_dtype>(table, at + i);
  }
}

template <NormRotaryConfig config>
__forceinline__ void norm_rotary(const NormRotaryParams& p) {
  constexpr DType kType = config.dtype;
  constexpr int kBytes = norm_element_bytes(kType);
  constexpr int kPairs = norm_rotary_pairs(config), kVector = norm_rotary_vector(config);
  pdl_wait_and_launch_dependents();
  const unsigned index = blockIdx.x * blockDim.x + threadIdx.x;
  const unsigned slot = index % p.slots;
  const unsigned group = index / p.slots % p.head_groups;
  const unsigned token = index / p.slots / p.head_groups;
  if (token >= p.tokens) return;
  const unsigned b = token / p.seq, s = token % p.seq;
  const int first_head = static_cast<int>(group) * config.heads;
  const char* x = static_cast<const char*>(p.x) + (b * p.x_strides.batch + s * p.x_strides.seq) * kBytes;
  char* out = static_cast<char*>(p.out) + (b * p.out_strides.batch + s * p.out_strides.seq) * kBytes;
  const bool rotates = slot < p.rotating_slots;

  // The dims of the slot: two of them hold the elements of its pairs.
  const int half = p.rotated / 2;
  int dims[2];
  if (rotates && config.interleaved) {
    dims[0] = static_cast<int>(slot) * 2 * kPairs;
    dims[1] = dims[0] + 1;
  } else if (rotates) {
    dims[0] = static_cast<int>(slot) * kPairs;
    dims[1] = dims[0] + half;
  } else {
    dims[0] = dims[1] = p.rotated + static_cast<int>(slot - p.rotating_slots) * kVector;
  }
  // One load brings both elements of interleaved pairs, and there is one element to copy.
  const bool two = rotates && !(config.interleaved && config.aligned);

  // Issued before the angles' loads, whose addresses take longer.
  Words4 words[config.aligned ? config.heads : 1][2];
  if constexpr (config.aligned) {
#pragma unroll
    for (int h = 0; h < config.heads; ++h) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        words[h][i] = load_streaming_16(x + ((first_head + h) * p.x_strides.head + dims[i]) * kBytes,
                                        first_head + h < p.heads && (i == 0 || two));
      }
    }
  }
  float cos[kPairs] = {}, sin[kPairs] = {};
  if (rotates) {
    const Index position = p.positions != nullptr ? p.positions[b * p.positions_stride + s] : static_cast<Index>(s);
    if (position >= 0 && position < p.table_rows) {
      load_angles<config>(cos, p.cos, position * p.cos_stride + slot * kPairs);
      load_angles<config>(sin, p.sin, position * p.sin_stride + slot * kPairs);
    } else {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) cos[i] = sin[i] = float_from_bits(0x7fc00000u);
    }
#pragma unroll
    for (int i = 0; i < kPairs; ++i) sin[i] *= p.sign;
  }

  if constexpr (config.aligned) {
#pragma unroll
    for (int h = 0; h < config.heads; ++h) {
      if (first_head + h >= p.heads) break;
      Chunk<kType> first = unpacked<kType>(words[h][0]), second = unpacked<kType>(words[h][1]);
      if (rotates) {
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
          float& low = config.interleaved ? first.value[2 * i] : first.value[i];
          float& high = config.interleaved ? first.value[2 * i + 1] : second.value[i];
          const float was = low;
          low = was * cos[i] - high * sin[i];
          high = high * cos[i] + was * sin[i];
        }
        words[h][0] = packed<kType>(first);
        words[h][1] = packed<kType>(second);
      }
      char* to = out + (first_head + h) * p.out_strides.head * kBytes;
      store_16(to + dims[0] * kBytes, words[h][0]);
      if (two) store_16(to + dims[1] * kBytes, words[h][1]);
    }
  } else {
#pragma unroll
    for (int h = 0; h < config.heads; ++h) {
      if (first_head + h >= p.heads) break;
      const char* from = x + (first_head + h) * p.x_strides.head * kBytes;
      char* to = out + (first_head + h) * p.out_strides.head * kBytes;
      const float low = load_element<kType>(from, dims[0]), high = load_element<kType>(from, dims[1]);
      store_element<kType>(to, dims[0], rotates ? low * cos[0] - high * sin[0] : low);
      if (two) store_element<kType>(to, dims[1], high * cos[0] + low * sin[0]);
    }
  }
}

}  // namespace tessera
