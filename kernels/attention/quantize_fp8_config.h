// Config, shared-memory layout and Params of attention/quantize_fp8.cuh.
#pragma once

#include "attention/fp8.h"
#include "tile/scheduler.h"

namespace tessera {

struct QuantizeFp8Config {
  DType dtype;  // of the activations
  int dim;      // of k and q, or of the one tensor; a multiple of 16 up to 256
  int dim_v;    // of V, the third tensor; 0: there is one tensor alone
  int rows;     // of a tile, which is a block if blocks have scales: a multiple of 16
  int threads;
  bool blocks;      // each tile has a scale of its own; else a scale is of heads
  bool transposes;  // V is written transposed
  bool rotates;     // rows of k and q are multiplied by a random-sign Hadamard matrix first
  bool residuals;   // rows of k and q get kResidualColumns more; not with blocks
  bool values;      // writes what e4m3 and the scale hold, in dtype, rotated back
};

template <class Visitor>
constexpr void visit_fields(const QuantizeFp8Config& config, Visitor&& visit) {
  visit("dtype", config.dtype);
  visit("dim", config.dim);
  visit("dim_v", config.dim_v);
  visit("rows", config.rows);
  visit("threads", config.threads);
  visit("blocks", config.blocks);
  visit("transposes", config.transposes);
  visit("rotates", config.rotates);
  visit("residuals", config.residuals);
  visit("values", config.values);
}

// A tile of V, as words of four keys of a column: [8][dim_v / 8][rows / 4], the first index being a column's place among
// its 8. Rows have two words more, so that neither side has bank conflicts.
constexpr int transposed_tile_pitch(const QuantizeFp8Config& config) { return config.rows / 4 + 2; }
constexpr int quantize_fp8_shared_bytes(const QuantizeFp8Config& config) {
  return config.transposes ? config.dim_v * transposed_tile_pitch(config) * 4 : 0;
}

// What rounding took from the largest key channels of each head, as more columns: k has the rest of these channels and
// then the channels once more, q the channels and then their rest. So q k^T has the products of either rest.
constexpr int kResidualChannels = 8;
constexpr int kResidualColumns = 2 * kResidualChannels;

// A rotation mixes the columns of blocks of this size: the largest power of two that divides the head dim.
constexpr int rotation_block(int dim) { return dim & -dim; }
// Whether a column's sign is changed before: bits of a product, without a pattern.
constexpr bool changes_sign(int column) {
  return (static_cast<unsigned>(column / 8 + 1) * 0x9e3779b1u >> (16 + column % 8) & 1u) != 0;
}

// What a scale is of is a group of tiles, in the order of tile, head, sequence. Its CTAs find the largest value together.
struct QuantizedTensor {
  const void* x;    // [B, S, H, D], or [total, H, D]
  void* out;        // e4m3 or `values`, likewise; transposed: e4m3 [B, H, D, pitch], or [H, D, pitch]
  float* scale;     // [groups], or [groups][tiles] if blocks have scales
  unsigned* found;  // [groups][found_words], 0 at the start: CTAs that have added theirs; bits of the largest value;
                    // k with residuals: of each channel's largest
  const int* cu_seqlens;  // [B + 1], null: every sequence has seq rows
  Strides x_strides;
  Strides out_strides;
  Index pitch;  // of V transposed: keys of a row
  int seq;      // of the longest sequence if packed
  unsigned heads;
  unsigned found_words;
  unsigned group_tiles;
  Divisor group_ctas;   // at most group_tiles
  Divisor tiles;        // of a head of the longest sequence
  Divisor group_heads;  // heads that have a scale of their own: 1 or all
  Divisor other_heads;  // all or 1
  unsigned end;         // CTAs of this tensor and of those before it
};

struct QuantizeFp8Params {
  QuantizedTensor tensor[3];  // k, q and v, or one; with blocks, there is no q
  unsigned* tile_counter;     // of the forward, which is set to 0; may be null
  unsigned group;             // query heads that share a key head
};

}  // namespace tessera
