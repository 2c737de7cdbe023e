// Rounds activations to e4m3 with scales that are powers of two, as the fp8 forwards take them: k, q and v in one launch, V
// transposed for attention/forward_fp8_sm90.cuh, k and v alone if that rounds q itself, or one tensor. Memory-bound: 3 bytes per element. sm_89 and newer.
//
//   load a tile (registers) → its largest value → that of the group → multiply, round → write, V by way of shared memory
//
// A CTA has a tile of rows of one head. A thread's part are items of 4 rows x 8 columns: the rows are those whose bytes
// are neighbours in V transposed (value_key). The scale is the least power of two that brings the largest value of its
// group within e4m3's range. A group of more than one tile has as many CTAs, up to what the GPU runs at once; each adds
// its largest value to the group's and waits for the others, holding its tile in registers. Tiles beyond that are read
// twice. If the others do not come, because other grids hold the SMs, a CTA reads the whole group itself: no CTA depends
// on another one being run.
//
// rotates: blocks of a row's columns are multiplied by a Hadamard matrix with random signs, which leaves q k^T unchanged
// and spreads large channels. The result is rounded to dtype.
//
// residuals: CTAs of k find the largest value of each channel, too, and those of q wait for them. They come later in the
// grid, so that all that they wait for is running.
#pragma once

#include "attention/fp8_round.cuh"
#include "attention/quantize_fp8_config.h"
#include "ptx/acquire_release.cuh"
#include "ptx/convert.cuh"
#include "ptx/e4m3.cuh"
#include "ptx/global.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/shared.cuh"
#include "tile/sequence.cuh"

namespace tessera {

// x times the orthonormal Hadamard matrix of size `block`, if each lane has 8 columns of a row and neighbours the next.
template <int block>
__forceinline__ void hadamard(float (&x)[8], int lane) {
#pragma unroll
  for (int step = 1; step < 8; step *= 2) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if ((i & step) != 0) continue;
      const float low = x[i], high = x[i + step];
      x[i] = low + high;
      x[i + step] = low - high;
    }
  }
#pragma unroll
  for (int step = 1; step < block / 8; step *= 2) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float other = __shfl_xor_sync(0xffffffffu, x[i], step);
      x[i] = (lane & step) != 0 ? other - x[i] : x[i] + other;
    }
  }
  // The square root of a power of two.
  constexpr int kLog2 = block == 8 ? 3 : block == 16 ? 4 : block == 32 ? 5 : block == 64 ? 6 : block == 128 ? 7 : 8;
  constexpr float kNorm = (kLog2 % 2 != 0 ? 0.70710678118654752f : 1.0f) / static_cast<float>(1 << kLog2 / 2);
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] *= kNorm;
}

enum class Fp8Role { kKeys, kQueries, kValues };  // one tensor alone is as keys without residuals

__forceinline__ void store_8(void* address, Words2 v, bool wanted) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\n@p st.global.v2.u32 [%0], {%1, %2};\n}\n" ::"l"(address),
               "r"(v.word[0]), "r"(v.word[1]), "r"(static_cast<int>(wanted))
               : "memory");
}

template <QuantizeFp8Config config, int dim, Fp8Role role>
struct Fp8Quantizer {
  static constexpr bool transposed = role == Fp8Role::kValues && config.transposes;
  static constexpr bool kResiduals = role != Fp8Role::kValues && config.residuals;
  static constexpr int kChunks = dim / 8;  // of 16 bytes, in a row
  static constexpr int kWords = config.rows / 4;
  static constexpr int kItems = (kWords * kChunks + config.threads - 1) / config.threads;
  static constexpr bool kRotates = config.rotates && role != Fp8Role::kValues;
  static constexpr int kWarps = config.threads / 32;
  static constexpr bool kTiles = config.blocks && config.dim_v > 0;  // k and v for a forward that rounds q itself
  static_assert(dim % 16 == 0 && config.rows % kValueGroup == 0 && config.threads % 32 == 0);

  const QuantizedTensor& t;
  const QuantizeFp8Params& p;
  unsigned shared;     // a tile of V transposed
  float* largest;      // [kWarps + 1], in shared memory
  unsigned* channels;  // [dim] bits of each channel's largest, then [kResidualChannels] the largest channels; likewise
  unsigned batch, head, tile;
  int length;  // of the sequence
  Words4 words[kItems][4];

  static __forceinline__ int word_of(int item) { return (threadIdx.x + item * config.threads) / kChunks; }
  static __forceinline__ int chunk_of(int item) { return (threadIdx.x + item * config.threads) % kChunks; }
  __forceinline__ int first_row() const { return static_cast<int>(tile) * config.rows; }
  // Of the item's rows i, counted from its first: value_key(word % 4 * 4 + i).
  static __forceinline__ int first_row_of(int item) { return word_of(item) / 4 * kValueGroup + word_of(item) % 4 * 2; }
  static constexpr int row_of(int i) { return i / 2 * 8 + i % 2; }
  static_assert(value_key(0) == row_of(0) && value_key(5) == 2 + row_of(1) && value_key(14) == 6 + row_of(2));

  // All of the tile's rows are in the sequence, and every item is in the tile.
  __forceinline__ bool is_whole() const {
    return kItems * config.threads == kWords * kChunks && first_row() + config.rows <= length;
  }

  __forceinline__ bool is_inside(int item, int i) const {
    return word_of(item) < kWords && first_row() + first_row_of(item) + row_of(i) < length;
  }
  template <class Visit>
  static __forceinline__ void each_row(const Visit& visit) {
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
#pragma unroll
      for (int i = 0; i < 4; ++i) visit(item, i);
    }
  }

  // Tile n of group g.
  __forceinline__ void find(unsigned g, unsigned n) {
    const unsigned rest = t.tiles.quotient(n), group_batch = t.group_heads.quotient(g);
    const unsigned more = t.other_heads.quotient(rest);
    tile = n - rest * t.tiles.by;
    head = g - group_batch * t.group_heads.by + rest - more * t.other_heads.by;
    batch = group_batch + more;
    length = length_of(t.cu_seqlens, batch, t.seq);
  }

  // Rows beyond the sequence are zeros.
  __forceinline__ void load() {
    const Bits16* const x = rows_of(t.x, t.x_strides, t.cu_seqlens, batch, head);
    const Bits16* from[kItems];
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      from[item] = x + (first_row() + first_row_of(item)) * t.x_strides.seq + chunk_of(item) * 8;
    }
    if (is_whole()) {
      each_row(
          [&](int item, int i) { words[item][i] = load_streaming_16(from[item] + row_of(i) * t.x_strides.seq, true); });
    } else {
      each_row([&](int item, int i) {
        words[item][i] = load_streaming_16(from[item] + row_of(i) * t.x_strides.seq, is_inside(item, i));
      });
    }
    if constexpr (kRotates) rotate();
  }

  __forceinline__ void pack(const float (&x)[8], Words4& to) const {
    constexpr float kLargest = config.dtype == DType::kFloat16 ? 65504.0f : 3.3895313892515355e38f;
    // NaN stays: fminf and fmaxf would make a number of it.
    const auto finite = [](float v) { return v > kLargest ? kLargest : v < -kLargest ? -kLargest : v; };
#pragma unroll
    for (int w = 0; w < 4; ++w) to.word[w] = tessera::pack<config.dtype>(finite(x[2 * w]), finite(x[2 * w + 1]));
  }
  __forceinline__ void change_signs(int chunk, float (&x)[8]) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = changes_sign(chunk * 8 + i) ? -x[i] : x[i];
  }
  __forceinline__ void rotate() {
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float x[8];
        unpack_8<config.dtype>(words[item][i], x);
        change_signs(chunk_of(item), x);
        hadamard<rotation_block(dim)>(x, threadIdx.x % 32);
        pack(x, words[item][i]);
      }
    }
  }

  __forceinline__ float largest_of_words() const {
    unsigned most = 0;
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int w = 0; w < 4; ++w) most = max_abs<config.dtype>(most, words[item][i].word[w]);
      }
    }
    return larger_half<config.dtype>(most);
  }
  // Of all threads.
  __forceinline__ float largest_of_cta(float amax) const {
    // Bits of numbers that are not negative have their order.
    const unsigned of_warp = __reduce_max_sync(0xffffffffu, bits_from_float(amax));
    if (threadIdx.x % 32 == 0) largest[threadIdx.x / 32] = float_from_bits(of_warp);
    __syncthreads();
    const int lane = threadIdx.x % 32;
    const unsigned of_lane = lane < kWarps ? bits_from_float(largest[lane]) : 0;
    return float_from_bits(__reduce_max_sync(0xffffffffu, of_lane));
  }
  static constexpr int kFoundValue = 1, kFoundChannels = 2;  // in `found`, behind the number of CTAs

  // Of the group; negative if its CTAs do not come.
  __forceinline__ float largest_of_group(unsigned g, float amax) const {
    constexpr int kPatience = 2000;  // loads of about half a microsecond
    unsigned* const found = t.found + g * t.found_words;
    if constexpr (kResiduals && role == Fp8Role::kKeys) {
      for (int d = threadIdx.x; d < dim; d += config.threads) atomicMax(found + kFoundChannels + d, channels[d]);
      __syncthreads();
    }
    if (threadIdx.x == 0) {
      atomicMax(found + kFoundValue, bits_from_float(amax));
      increment_release(found);
      bool all = false;
      for (int i = 0; i < kPatience && !all; ++i) all = load_acquire(found) == t.group_ctas.by;
      largest[kWarps] = all ? float_from_bits(load_acquire(found + kFoundValue)) : -1.0f;
    }
    __syncthreads();
    if (kResiduals && role == Fp8Role::kKeys && largest[kWarps] >= 0) load_channels(found);
    return largest[kWarps];
  }

  __forceinline__ void load_channels(const unsigned* found) const {
    for (int d = threadIdx.x; d < dim; d += config.threads) channels[d] = load_acquire(found + kFoundChannels + d);
    __syncthreads();
  }
  __forceinline__ void wait_for_keys() const {
    const QuantizedTensor& keys = p.tensor[0];
    const unsigned* const found = keys.found + (batch * keys.heads + head / p.group) * keys.found_words;
    const unsigned ctas = keys.end > 0 ? keys.group_ctas.by : 0;  // none if there are no keys
    if (threadIdx.x == 0) {
      while (load_acquire(found) != ctas) {
      }
    }
    __syncthreads();
    load_channels(found);
  }
  // The largest channels, by their largest values; of equal ones, the first.
  __forceinline__ void choose_channels() const {
    for (int d = threadIdx.x; d < dim; d += config.threads) {
      int larger = 0;
      for (int other = 0; other < dim; ++other) {
        larger += channels[other] > channels[d] || (channels[other] == channels[d] && other < d) ? 1 : 0;
      }
      if (larger < kResidualChannels) channels[dim + larger] = d;
    }
    __syncthreads();
  }
  __forceinline__ void find_largest_of_channels() const {
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      if (word_of(item) >= kWords) continue;
      float most[8] = {};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float x[8];
        unpack_8<config.dtype>(words[item][i], x);
#pragma unroll
        for (int j = 0; j < 8; ++j) most[j] = fmaxf(most[j], fabsf(x[j]));
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) atomicMax(channels + chunk_of(item) * 8 + j, bits_from_float(most[j]));
    }
  }

  // The largest value of tiles n, n + step, ...; the last one stays in registers.
  __forceinline__ float largest_of_tiles(unsigned g, unsigned n, unsigned step) {
    float amax = 0;
#pragma unroll 1
    for (; n < t.group_tiles; n += step) {
      find(g, n);
      load();
      amax = fmaxf(amax, largest_of_words());
      if constexpr (kResiduals && role == Fp8Role::kKeys) find_largest_of_channels();
    }
    return largest_of_cta(amax);
  }

  __forceinline__ void run(unsigned cta) {
    unsigned g = t.group_ctas.quotient(cta), own = cta - g * t.group_ctas.by;
    if constexpr (config.blocks) {
      // Heads first: CTAs that run together read and write whole rows of all heads.
      const unsigned rest = t.group_heads.quotient(cta), of_batch = t.tiles.quotient(rest);
      own = rest - of_batch * t.tiles.by;
      g = of_batch * t.group_heads.by + cta - rest * t.group_heads.by;
    }
    float amax = 0;
    bool waits = !config.blocks && (t.group_ctas.by > 1 || kResiduals);
    if constexpr (kResiduals && role == Fp8Role::kKeys) {
      for (int d = threadIdx.x; d < dim; d += config.threads) channels[d] = 0;
      __syncthreads();
    }
    unsigned first = own, step = t.group_ctas.by;
#pragma unroll 1
    while (true) {
      amax = largest_of_tiles(g, first, step);
      if (!waits) break;
      const float of_group = largest_of_group(g, amax);
      if (of_group >= 0) {
        amax = of_group;
        break;
      }
      first = 0, step = 1;
      waits = false;
      __syncthreads();  // `largest` may still be read
    }
    if constexpr (kResiduals) {
      if constexpr (role == Fp8Role::kQueries) wait_for_keys();
      choose_channels();
    }
    // A forward's tile of zeros must not raise the unit of O (forward_fp8_sm90_math.cuh).
    const int exponent = kTiles && amax == 0.0f ? kLeastScaleExponent : fp8_scale_exponent(amax);
    if (threadIdx.x == 0)
      t.scale[config.blocks ? g * t.tiles.by + own : g] = power_of_two(exponent);  // a group's CTAs write the same
    bool held = step == t.group_ctas.by;  // the last of the CTA's tiles is in registers
#pragma unroll 1
    for (unsigned n = own + t.group_ctas.quotient(t.group_tiles - 1 - own) * t.group_ctas.by;; n -= t.group_ctas.by) {
      if (!held) {
        find(g, n);
        load();
      }
      held = false;
      write(power_of_two(-exponent), power_of_two(exponent));
      if constexpr (kResiduals) write_residuals(power_of_two(-exponent));
      if (n == own) break;
    }
  }

  __forceinline__ void write(float inverse, float scale) const {
    if constexpr (transposed) {
      write_transposed(inverse);
    } else {
      Index start[kItems];
#pragma unroll
      for (int item = 0; item < kItems; ++item) {
        start[item] = offset_of(t.out_strides, t.cu_seqlens, batch, head) +
                      (first_row() + first_row_of(item)) * t.out_strides.seq + chunk_of(item) * 8;
      }
      if (is_whole()) {
        each_row([&](int item, int i) {
          write_row(words[item][i], start[item] + row_of(i) * t.out_strides.seq, chunk_of(item), true, inverse, scale);
        });
      } else {
        each_row([&](int item, int i) {
          write_row(words[item][i], start[item] + row_of(i) * t.out_strides.seq, chunk_of(item), is_inside(item, i),
                    inverse, scale);
        });
      }
    }
  }
  __forceinline__ void write_row(const Words4& from, Index at, int chunk, bool wanted, float inverse,
                                 float scale) const {
    const Words2 bytes = round_8<config.dtype>(from, inverse);
    if constexpr (!config.values) {
      store_8(static_cast<unsigned char*>(t.out) + at, bytes, wanted);
    } else {
      float x[2][4], y[8];
      unpack_e4m3(bytes.word[0], x[0]);
      unpack_e4m3(bytes.word[1], x[1]);
#pragma unroll
      for (int j = 0; j < 8; ++j) y[j] = x[j / 4][j % 4] * scale;
      if constexpr (kRotates) {
        hadamard<rotation_block(dim)>(y, threadIdx.x % 32);
        change_signs(chunk, y);
      }
      Words4 packed;
      pack(y, packed);
      if (wanted) store_16(static_cast<Bits16*>(t.out) + at, packed);
    }
  }

  // Half of a row's residual columns per thread. x is still in the L2 cache.
  __forceinline__ void write_residuals(float inverse) const {
    const Bits16* const x = rows_of(t.x, t.x_strides, t.cu_seqlens, batch, head);
    unsigned char* const out = static_cast<unsigned char*>(t.out) + offset_of(t.out_strides, t.cu_seqlens, batch, head);
    for (int i = threadIdx.x; i < config.rows * 2; i += config.threads) {
      const int row = first_row() + i / 2, half = i % 2;
      if (row >= length) continue;
      float value[8];
#pragma unroll
      for (int n = 0; n < kResidualChannels; ++n) {
        value[n] = to_float<config.dtype>(x[row * t.x_strides.seq + channels[dim + n]]) * inverse;
      }
      Words2 bytes = {pack_e4m3(value[0], value[1], value[2], value[3]),
                      pack_e4m3(value[4], value[5], value[6], value[7])};
      if ((half == 0) == (role == Fp8Role::kKeys)) {
#pragma unroll
        for (int w = 0; w < 2; ++w) {
          float held[4];
          unpack_e4m3(bytes.word[w], held);
          const float* const of = value + 4 * w;
          bytes.word[w] = pack_e4m3(of[0] - held[0], of[1] - held[1], of[2] - held[2], of[3] - held[3]);
        }
      }
      store_8(out + row * t.out_strides.seq + dim + half * kResidualChannels, bytes);
    }
  }

  // Keys beyond the sequence, up to the next multiple of kValueGroup, are written as zeros.
  __forceinline__ void write_transposed(float inverse) const {
    constexpr int kPitch = transposed_tile_pitch(config) * 4;
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      if (word_of(item) >= kWords) continue;
      Words2 row[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) row[i] = round_8<config.dtype>(words[item][i], inverse);
      const unsigned at = shared + chunk_of(item) * kPitch + word_of(item) * 4;
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        // Byte j of row i becomes byte i of word j.
        const unsigned low01 = __byte_perm(row[0].word[w], row[1].word[w], 0x5140);
        const unsigned high01 = __byte_perm(row[0].word[w], row[1].word[w], 0x7362);
        const unsigned low23 = __byte_perm(row[2].word[w], row[3].word[w], 0x5140);
        const unsigned high23 = __byte_perm(row[2].word[w], row[3].word[w], 0x7362);
        constexpr int kPlane = kChunks * kPitch;
        store_shared_4(at + (4 * w) * kPlane, __byte_perm(low01, low23, 0x5410));
        store_shared_4(at + (4 * w + 1) * kPlane, __byte_perm(low01, low23, 0x7632));
        store_shared_4(at + (4 * w + 2) * kPlane, __byte_perm(high01, high23, 0x5410));
        store_shared_4(at + (4 * w + 3) * kPlane, __byte_perm(high01, high23, 0x7632));
      }
    }
    __syncthreads();
    constexpr int kPieces = config.rows / 16;  // of 16 bytes, in a row of the result
    const int padded = static_cast<int>(value_length(length));
    const Index start = t.cu_seqlens ? value_start(t.cu_seqlens[batch], batch) : 0;
    unsigned char* const out = static_cast<unsigned char*>(t.out) + start +
                               (static_cast<Index>(t.cu_seqlens ? 0 : batch) * t.heads + head) * dim * t.pitch;
#pragma unroll 4
    for (int i = threadIdx.x; i < dim * kPieces; i += config.threads) {
      const int piece = i % kPieces, of = i / kPieces;  // columns in the order in which they lie in shared memory
      const int column = of % kChunks * 8 + of / kChunks;
      if (first_row() + piece * 16 >= padded) continue;
      float parts[2][2];
      load_shared_floats(parts[0], shared + of * kPitch + piece * 16);
      load_shared_floats(parts[1], shared + of * kPitch + piece * 16 + 8);
      store_16(out + column * t.pitch + first_row() + piece * 16,
               {bits_from_float(parts[0][0]), bits_from_float(parts[0][1]), bits_from_float(parts[1][0]),
                bits_from_float(parts[1][1])});
    }
    __syncthreads();
  }
};

template <QuantizeFp8Config config>
__forceinline__ void quantize_fp8(const QuantizeFp8Params& p) {
  static_assert(!config.residuals || (!config.blocks && !config.rotates && !config.values));
  __shared__ float largest[config.threads / 32 + 1];
  __shared__ unsigned channels[config.residuals ? config.dim + kResidualChannels : 1];
  extern __shared__ __align__(16) unsigned char memory[];
  const unsigned shared = shared_address(memory);
  pdl_wait_and_launch_dependents();
  const unsigned cta = blockIdx.x;
  if (p.tile_counter && cta == 0 && threadIdx.x == 0) *p.tile_counter = 0;
  if constexpr (config.dim_v > 0) {
    if (cta >= p.tensor[1].end) {
      Fp8Quantizer<config, config.dim_v, Fp8Role::kValues> quantizer{p.tensor[2], p, shared, largest, channels};
      quantizer.run(cta - p.tensor[1].end);
      return;
    }
    if (!config.blocks && cta >= p.tensor[0].end) {
      Fp8Quantizer<config, config.dim, Fp8Role::kQueries> quantizer{p.tensor[1], p, shared, largest, channels};
      quantizer.run(cta - p.tensor[0].end);
      return;
    }
  }
  Fp8Quantizer<config, config.dim, Fp8Role::kKeys> quantizer{p.tensor[0], p, shared, largest, channels};
  quantizer.run(cta);
}

}  // namespace tessera
