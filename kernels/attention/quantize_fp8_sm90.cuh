// Rounds an activation to e4m3 with scales that are powers of two, as attention/forward_fp8_sm90.cuh takes it. Memory-bound:
// 3 bytes per element if each tile has a scale of its own, 5 if the largest value of a head or of all is found first.
//
// A CTA has a tile of rows of one head, all of it in registers: it finds the largest absolute value, then multiplies,
// rounds and writes. The scale is the least power of two that brings the largest value within e4m3's range. A largest value
// that is found first is kept in place of the scale, with the sign bit set; CTAs of the next launch may find it so, or
// already replaced by the scale.
#pragma once

#include "attention/quantize_fp8_config.h"
#include "ptx/convert.cuh"
#include "ptx/global.cuh"
#include "ptx/griddepcontrol.cuh"
#include "tile/sequence.cuh"

namespace tessera {

// The exponent of the scale for a largest value: the least with value <= 448 * 2^exponent, 448 being 1.75 * 2^8. Kept
// within bounds so that products of scales are finite; beyond them, values saturate or lose bits.
__forceinline__ int fp8_scale_exponent(float amax) {
  constexpr int kBound = 60;
  const unsigned bits = bits_from_float(amax);
  const int exponent = static_cast<int>(bits >> 23) - 127 - 8 + ((bits & 0x7fffffu) > 0x600000u ? 1 : 0);
  return amax == 0.0f ? 0 : max(-kBound, min(exponent, kBound));
}
constexpr unsigned kSign = 0x80000000u;
__forceinline__ float power_of_two(int exponent) {
  return float_from_bits(static_cast<unsigned>(exponent + 127) << 23);
}

// Beyond the largest e4m3, to the largest.
__forceinline__ unsigned round_to_e4m3x4(float v0, float v1, float v2, float v3) {
  unsigned packed;
  asm("{\n.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}\n"
      : "=r"(packed)
      : "f"(v0), "f"(v1), "f"(v2), "f"(v3));
  return packed;
}

template <QuantizeFp8Config config>
__forceinline__ void quantize_fp8(const QuantizeFp8Params& p) {
  constexpr int kChunks = config.dim / 8;  // of 16 bytes, in a row
  constexpr int kLoads = (config.rows * kChunks + config.threads - 1) / config.threads;
  constexpr int kWarps = config.threads / 32;
  static_assert(config.dim % 8 == 0 && config.threads % 32 == 0);
  __shared__ float largest[kWarps];
  pdl_wait_and_launch_dependents();
  const unsigned tile = blockIdx.x % p.tiles;
  const unsigned head = blockIdx.x / p.tiles % p.heads;
  const unsigned batch = blockIdx.x / p.tiles / p.heads;
  const int length = length_of(p.cu_seqlens, batch, p.seq);
  const int first = static_cast<int>(tile) * config.rows;
  const Index scale_at = batch * p.scale_strides.batch + head * p.scale_strides.head;
  if (first >= length) {
    // Blocks behind a sequence that is shorter than the longest, and scales of no values at all.
    if (threadIdx.x == 0 && !config.finds_amax) {
      if (!config.of_whole) p.scale[scale_at + tile] = 1.0f;
      if (config.of_whole && reinterpret_cast<unsigned*>(p.scale)[scale_at] == 0) p.scale[scale_at] = 1.0f;
    }
    return;
  }

  const Bits16* const x = rows_of(p.x, p.x_strides, p.cu_seqlens, batch, head);
  Words4 words[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int chunk = threadIdx.x + i * config.threads;
    const int row = chunk / kChunks;
    words[i] = load_streaming_16(x + (first + row) * p.x_strides.seq + chunk % kChunks * 8,
                                 row < config.rows && first + row < length);
  }
  float amax = 0;
  if constexpr (!config.of_whole) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        amax = fmaxf(amax, fmaxf(fabsf(low_to_float<config.dtype>(words[i].word[w])),
                                 fabsf(high_to_float<config.dtype>(words[i].word[w]))));
      }
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, step));
    if (threadIdx.x % 32 == 0) largest[threadIdx.x / 32] = amax;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < kWarps; ++w) amax = fmaxf(amax, largest[w]);
  }
  if constexpr (config.finds_amax) {
    if (threadIdx.x == 0) atomicMax(reinterpret_cast<unsigned*>(p.scale) + scale_at, bits_from_float(amax) | kSign);
    return;
  }
  int exponent = 0;
  if constexpr (config.of_whole) {
    const float found = *static_cast<const volatile float*>(p.scale + scale_at);
    const bool replaced = (bits_from_float(found) & kSign) == 0;
    exponent = replaced ? static_cast<int>(bits_from_float(found) >> 23) - 127 : fp8_scale_exponent(fabsf(found));
  } else {
    exponent = fp8_scale_exponent(amax);
  }
  const float inverse = power_of_two(-exponent);
  // Those that share a scale write the same.
  if (threadIdx.x == 0 && (!config.of_whole || tile == 0)) {
    p.scale[scale_at + (config.of_whole ? 0 : tile)] = power_of_two(exponent);
  }
  unsigned char* const out = static_cast<unsigned char*>(p.out) + offset_of(p.out_strides, p.cu_seqlens, batch, head);
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int chunk = threadIdx.x + i * config.threads;
    const int row = chunk / kChunks;
    Words2 rounded;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const unsigned a = words[i].word[half * 2], b = words[i].word[half * 2 + 1];
      rounded.word[half] =
          round_to_e4m3x4(low_to_float<config.dtype>(a) * inverse, high_to_float<config.dtype>(a) * inverse,
                          low_to_float<config.dtype>(b) * inverse, high_to_float<config.dtype>(b) * inverse);
    }
    if (row < config.rows && first + row < length) {
      store_8(out + (first + row) * p.out_strides.seq + chunk % kChunks * 8, rounded);
    }
  }
}

}  // namespace tessera
