// A consumer of gemm/dense_sm90.cuh: a warpgroup that multiplies, applies the epilogue and stores.
#pragma once

#include "gemm/dense_sm90_config.h"
#include "gemm/dense_sm90_work.cuh"
#include "gemm/epilogue.cuh"
#include "ptx/barrier.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "tile/pipeline.cuh"
#include "tile/shared_tile.cuh"
#include "tile/shift.cuh"

namespace tessera {

template <GemmDenseSm90Config config>
struct GemmDenseSm90Consumer {
  using Params = GemmDenseSm90ParamsOf<config>;
  static constexpr gemm_sm90::Layout kAt = gemm_sm90::layout(config);
  static constexpr int kRowTiles = gemm_sm90::consumer_rows(config) / 64;  // of wgmma
  static constexpr int kAtomBytes = gemm_sm90::kAtomBytes;
  static constexpr int kBoxColumns = gemm_sm90::stored_columns(config);
  static constexpr int kOutColumns = gemm_sm90::out_columns(config);
  static constexpr int kBoxes = (kOutColumns + kBoxColumns - 1) / kBoxColumns;  // side by side
  static constexpr int kBuffers = gemm_sm90::staging_buffers(config);
  static constexpr bool kLoadsStaged = gemm_sm90::loads_staged(config);
  static constexpr bool kIsFloat = gemm_sm90::stored_type(config) == DType::kFloat32;
  static constexpr int kWords = kIsFloat ? 2 : 1;  // of 16 bits, in an element
  static constexpr int kStaged = 1;                // named barrier of consumer 0: its threads have written a box
  static constexpr int kTurn = 3;                  // named barrier of consumer 0: it may wait for its stages
  static constexpr int kCleared = 5;               // named barrier of both: terms of other groups have been cleared
  static constexpr GemmEpilogueConfig kEpilogue = epilogue_of(config);

  const Params& p;
  unsigned shared;
  int consumer;  // warp-uniform, and the compiler knows it
  int lane, warp;
  PipelineState<config.stages> pipe = {};
  PipelineState<kBuffers> staging = {};  // the next buffer

  float sums[kRowTiles][config.block_n / 2];  // [64 rows][tile of 8 columns][value of a lane]

  __forceinline__ int first_row() const {
    return config.ping_pong ? 0 : consumer * gemm_sm90::consumer_rows(config);
  }  // in the tile

  __forceinline__ void multiply(int stage, bool is_first) {
    const unsigned a = shared + kAt.a + stage * gemm_sm90::a_bytes(config);
    const MatrixDescriptor of_b =
        matrix_descriptor<64>(shared + kAt.b + stage * gemm_sm90::b_bytes(config), kAtomBytes);
    // A tile of 64 rows is 64 rows of the stage, or one atom: as many bytes.
    const MatrixDescriptor of_a = matrix_descriptor<64>(a + first_row() / 64 * kAtomBytes, kAtomBytes);
    constexpr int kStepA = config.a_transposed ? 16 * 128 : 32;
    constexpr int kStepB = config.b_transposed ? 16 * 128 : 32;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int row_tile = 0; row_tile < kRowTiles; ++row_tile) {
        Wgmma<config.block_n>::template shared_shared<config.dtype, config.b_transposed, config.a_transposed>(
            sums[row_tile], of_a.at(row_tile * kAtomBytes + k * kStepA), of_b.at(k * kStepB), !is_first || k > 0);
      }
    }
  }

  // To the producers of all CTAs that write to this stage.
  __forceinline__ void release(int stage) const {
    const unsigned empty = shared + kAt.empty + stage * kMbarrierBytes;
    if constexpr (config.cluster > 1) {
      if (lane < config.cluster) mbarrier_arrive_at(empty, lane);
    } else {
      if (lane == 0) mbarrier_arrive(empty);
    }
  }

  // Ping-pong: a consumer waits for the stages of its tile only after the other one has seen all of its own. An mbarrier
  // tells one phase from the next by parity alone, so a consumer that ran ahead would take a stage's last phase for the
  // next one.
  __forceinline__ void wait_for_turn() const {
    if constexpr (config.ping_pong) named_barrier_sync(kTurn + consumer, 256);
  }
  __forceinline__ void pass_turn() const {
    if constexpr (config.ping_pong) named_barrier_arrive(kTurn + 1 - consumer, 256);
  }

  // Ragged sums: terms from `first` on are of the next group. They are cleared in both operands, since an infinity times
  // zero would not be zero.
  __forceinline__ void clear_terms(int stage, int first) const {
    constexpr int kAtoms = config.block_m / 64 + gemm_sm90::b_atoms(config);
    constexpr int kThreads = config.ping_pong ? 128 : 256;
    const int thread = (config.ping_pong ? 0 : consumer * 128) + warp * 32 + lane;
    const int chunks = (64 - first) * 8;  // of 16 bytes, in an atom
#pragma unroll 1
    for (int i = thread; i < chunks * kAtoms; i += kThreads) {
      const int atom = i / chunks;
      const unsigned from =
          atom < config.block_m / 64
              ? shared + kAt.a + stage * gemm_sm90::a_bytes(config) + atom * kAtomBytes
              : shared + kAt.b + stage * gemm_sm90::b_bytes(config) + (atom - config.block_m / 64) * kAtomBytes;
      store_shared_16(from + first * 128 + (i - atom * chunks) * 16, Words4{});
    }
    fence_proxy_async();
    named_barrier_sync(config.ping_pong ? kStaged + consumer : kCleared, kThreads);
  }

  // The first `shift` terms of the consumer's rows of A are the last ones of the rows before them. B is zero there, but an
  // infinity times zero would not be.
  __forceinline__ void clear_head(int stage, int shift) const {
#pragma unroll
    for (int row = warp * 32 + lane; row < gemm_sm90::consumer_rows(config); row += 128) {
      const unsigned at =
          shared + kAt.a + stage * gemm_sm90::a_bytes(config) + (first_row() + row) * 128 + (row & 7) * 16;
      Words4 words = load_shared_16(at);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        words.word[i] = shift >= 2 * i + 2 ? 0 : shift == 2 * i + 1 ? words.word[i] & 0xffff0000u : words.word[i];
      }
      store_shared_16(at, words);
    }
    fence_proxy_async();
    named_barrier_sync(kStaged + consumer, 128);
  }

  // One product is always in flight while the next is issued.
  __forceinline__ void accumulate(const GemmDenseSm90Work& work) {
    const int steps = work.end_step - work.first_step;
    wait_for_turn();
    int previous = 0;
    for (int step = 0; step < steps; ++step) {
      mbarrier_wait_parity(shared + kAt.full + pipe.index * kMbarrierBytes, pipe.parity);
      if constexpr (config.grouping == kRaggedSums) {
        const int terms = work.end_k - work.first_k - step * gemm_sm90::kBlockK;
        if (terms < gemm_sm90::kBlockK) clear_terms(pipe.index, terms);
      }
      if constexpr (config.strided == kStridedM) {
        const int shift = p.a_shift[work.residue];
        if (work.first_step + step == 0 && shift > 0) clear_head(pipe.index, shift);
      }
      wgmma_fence();
      multiply(pipe.index, step == 0);
      wgmma_commit_group();
      if (step > 0) {
        wgmma_wait_group<1>();
        release(previous);
      }
      previous = pipe.index;
      pipe.advance();
    }
    pass_turn();
    wgmma_wait_group<0>();
#pragma unroll
    for (int row_tile = 0; row_tile < kRowTiles; ++row_tile) wgmma_fence_operand(sums[row_tile]);
    release(previous);
  }

  // Row of out of a row of the tile.
  __forceinline__ int out_row(const GemmDenseSm90Work& work, int row) const {
    return config.strided == kStridedM ? (work.row + row) * gemm_sm90::kRowGroups + work.residue : work.row + row;
  }

  __forceinline__ bool issues() const { return warp == 0 && lane == 0; }  // the TMA loads and stores of boxes
  __forceinline__ unsigned buffer_address(int index) const {
    return shared + kAt.staging + (consumer * kBuffers + index) * gemm_sm90::buffer_bytes(config);
  }
  __forceinline__ unsigned loaded_barrier(int index) const {
    return shared + kAt.loaded + (consumer * kBuffers + index) * kMbarrierBytes;
  }

  // The first column, in tiles of 8, of a box. If boxes do not divide the tile, the last one overlaps the one before it:
  // stored twice, its columns have the same values both times. A tile narrower than a box is the only one of its rows.
  static constexpr int first_tile_of(int box) {
    const int regular = box % kBoxes * (kBoxColumns / 8);
    const int last = (kOutColumns - kBoxColumns) / 8;
    return kOutColumns < kBoxColumns || regular < last ? regular : last;
  }

  // Of a box: 64 rows of 128 bytes of the tile, swizzled. Columns are of 16 bits.
  __forceinline__ int box_row(const GemmDenseSm90Work& work, int box) const {
    return work.row + first_row() + box / kBoxes * 64;
  }
  __forceinline__ int box_column(const GemmDenseSm90Work& work, int box) const {
    return (work.column + first_tile_of(box) * 8) * kWords;
  }
  static __forceinline__ int map_of(const GemmDenseSm90Work& work) {
    return config.strided == kStridedM ? work.residue : 0;
  }
  __forceinline__ void store_box(const GemmDenseSm90Work& work, int box, unsigned address,
                                 const TensorMap* maps) const {
    int column = box_column(work, box);
    if constexpr (config.edges) {
      if (column < 0) return;  // store_edges stores it: the map begins with the first whole chunk of a row
      const int shift = p.out_shift[work.residue];
      column += shift > 0 ? shift - 8 : 0;
    }
    tma_store(maps[map_of(work)], address, column, box_row(work, box), work.layer, 0);
  }
  // Of the box that will use buffer `index`, which is the next one or the one after it.
  __forceinline__ void load_staged(const GemmDenseSm90Work& work, int box, int index) const {
    if (!issues()) return;
    tma_store_wait_group_read<kBuffers - 2>();
    const unsigned barrier = loaded_barrier(index), to = buffer_address(index);
    mbarrier_arrive_expect_tx(barrier, gemm_sm90::loaded_boxes(config) * gemm_sm90::kStagingBytes);
    const int column = box_column(work, box), row = box_row(work, box);
    tma_load(to, p.staged[map_of(work)], barrier, column, row, work.layer, 0);
    if constexpr (config.gated_gradient) {
      tma_load(to + gemm_sm90::kStagingBytes, p.staged_gate, barrier, column, row, work.layer, 0);
    }
  }

  // Addresses in a box of a lane's part of two tiles of 8 columns (stmatrix, ldmatrix), and of one of fp32.
  __forceinline__ unsigned pair_address(unsigned box, int tile) const {
    const int row = lane % 16;
    return box + (warp * 16 + row) * 128 + ((tile + lane / 16) ^ (row & 7)) * 16;
  }
  __forceinline__ unsigned float_address(unsigned box, int tile, int half) const {
    const int row = warp * 16 + half * 8 + lane / 4;
    return box + row * 128 + ((tile * 2 + lane % 4 / 2) ^ (row & 7)) * 16 + lane % 2 * 8;
  }
  template <DType dtype>
  __forceinline__ void write_pair(unsigned box, int tile, const float (&left)[4], const float (&right)[4]) const {
    const unsigned words[4] = {pack<dtype>(left[0], left[1]), pack<dtype>(left[2], left[3]),
                               pack<dtype>(right[0], right[1]), pack<dtype>(right[2], right[3])};
    stmatrix_x4(pair_address(box, tile), words);
  }
  __forceinline__ void write_floats(unsigned box, int tile, const float (&x)[4]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      store_shared_floats(float_address(box, tile, half), x[half * 2], x[half * 2 + 1]);
    }
  }
  // The staged matrix's values, in the places that `write` will write to.
  __forceinline__ void read_staged(unsigned box, int tile, float (&left)[4], float (&right)[4]) const {
    if constexpr (kIsFloat) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        load_shared_floats(reinterpret_cast<float(&)[2]>(left[half * 2]), float_address(box, tile, half));
        load_shared_floats(reinterpret_cast<float(&)[2]>(right[half * 2]), float_address(box, tile + 1, half));
      }
    } else {
      unsigned words[4];
      ldmatrix_x4(words, pair_address(box, tile));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        left[half * 2] = low_to_float<config.dtype>(words[half]);
        left[half * 2 + 1] = high_to_float<config.dtype>(words[half]);
        right[half * 2] = low_to_float<config.dtype>(words[2 + half]);
        right[half * 2 + 1] = high_to_float<config.dtype>(words[2 + half]);
      }
    }
  }

  // Address of a 16-bit element in a row of a box.
  static __forceinline__ unsigned element_address(unsigned box, int row, int element) {
    return box + row * 128 + ((element / 8) ^ (row & 7)) * 16 + element % 8 * 2;
  }

  // As 16-bit elements.
  static __forceinline__ Bits16* row_of(const GemmMatrix& matrix, const GemmDenseSm90Work& work, int row) {
    const Index at = row * matrix.row_stride + (out_has_layers(config.grouping) ? work.group * matrix.group_stride : 0);
    return static_cast<Bits16*>(matrix.data) + at * (kIsFloat ? 2 : 1);
  }

  // The warp's rows of a box, of which the group has only the first `rows`, to rows at multiples of 16 bytes.
  __forceinline__ void store_some_rows(const GemmDenseSm90Work& work, int box, unsigned address,
                                       const GemmMatrix& matrix, int rows) const {
    const int first = box_column(work, box);
    const int column = lane % 8 * 8;
#pragma unroll 1
    for (int i = 0; i < 4; ++i) {
      const int in_box = warp * 16 + i * 4 + lane / 8;
      Bits16* to = row_of(matrix, work, work.row + first_row() + box / kBoxes * 64 + in_box) + first + column;
      const bool exists = in_box < rows && first + column < p.n * kWords;
      if (exists) store_16(to, load_shared_16(element_address(address, in_box, column)));
    }
  }

  // What rows of out have before and behind their whole chunks of 16 bytes, and the chunks of a box that begins before them.
  // Two lanes share a row of the warp's 16.
  __forceinline__ void store_edges(const GemmDenseSm90Work& work, int box, unsigned address) const {
    const int first = box_column(work, box), end = p.n * kWords - first;  // elements of 16 bits
    const int shift = p.out_shift[work.residue];
    const int partial = (p.n * kWords + shift) / 8 * 8 - shift - first;  // the first element behind the whole chunks
    const bool has_head = first < 0, has_tail = partial < end && partial < 64;
    if (!has_head && !has_tail) return;
    const int in_box = warp * 16 + lane % 16, half = lane / 16;
    const int row = out_row(work, first_row() + box / kBoxes * 64 + in_box);
    if (row >= work.end_row) return;
    Bits16* to = row_of(p.epilogue.out, work, row) + first;
    if (has_head) {
#pragma unroll 1
      for (int chunk = 1 + half; chunk < min(kOutColumns * kWords, 64) / 8 && chunk * 8 < partial; chunk += 2) {
        store_16(to + chunk * 8, load_shared_16(element_address(address, in_box, chunk * 8)));
      }
    }
    const int begin = half == 0 ? max(-first, 0) : max(partial, 0);
    const int stop = half == 0 ? (has_head ? 8 : 0) : min(end, 64);
#pragma unroll 1
    for (int e = begin; e < stop; ++e) to[e] = load_shared_2(element_address(address, in_box, e));
  }

  // Copies the warp's 16 rows of a box to rows of a matrix that start anywhere, in 16-byte stores. Eight lanes share a row.
  // Its 64 elements (of 16 bits) lie across nine aligned chunks: seven whole ones, and two parts that have eight elements
  // together, one for each lane.
  __forceinline__ void store_rows(const GemmDenseSm90Work& work, int box, unsigned address,
                                  const GemmMatrix& matrix) const {
    const int chunk = lane % 8;
    const int first = box_column(work, box);
    const int end = min(p.n, work.column + kOutColumns) * kWords - first;  // elements of the box that exist
    Bits16* to[4];
    int shift[4];
    Words4 words[4];
    Bits16 part[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int in_box = warp * 16 + i * 4 + lane / 8;
      const int row = out_row(work, first_row() + box / kBoxes * 64 + in_box);
      to[i] = row < work.end_row ? row_of(matrix, work, row) + first : nullptr;
      shift[i] = static_cast<int>(reinterpret_cast<unsigned long long>(to[i]) / 2 % 8);
      // The lane's aligned chunk begins before its own in the box.
      const Words4 own = load_shared_16(element_address(address, in_box, chunk * 8));
      const Words4 before = load_shared_16(element_address(address, in_box, max(chunk - 1, 0) * 8));
      words[i] = eight_of_sixteen(before, own, 8 - shift[i]);
      part[i] = load_shared_2(element_address(address, in_box, chunk < 8 - shift[i] ? chunk : 56 + chunk));
    }
    const bool is_edge = end < 64;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = chunk * 8 - shift[i];
      const int element = chunk < 8 - shift[i] ? chunk : 56 + chunk;
      if (to[i] != nullptr && (chunk > 0 || shift[i] == 0) && at + 8 <= end) store_16(to[i] + at, words[i]);
      if (to[i] != nullptr && shift[i] > 0 && element < end) to[i][element] = part[i];
    }
    if (is_edge) {  // the chunk in which the matrix ends
#pragma unroll 1
      for (int i = 0; i < 4; ++i) {
        const int in_box = warp * 16 + i * 4 + lane / 8;
        const int row = out_row(work, first_row() + box / kBoxes * 64 + in_box);
        if (row >= work.end_row) continue;
        Bits16* start = row_of(matrix, work, row) + first;
        const int at = chunk * 8 - static_cast<int>(reinterpret_cast<unsigned long long>(start) / 2 % 8);
        if (at + 8 <= end) continue;
#pragma unroll 1
        for (int e = max(at, 0); e < end; ++e) start[e] = load_shared_2(element_address(address, in_box, e));
      }
    }
  }

  // The reverse: what does not exist is loaded as zeros.
  __forceinline__ void load_rows(const GemmDenseSm90Work& work, int box, unsigned address,
                                 const GemmMatrix& matrix) const {
    const int chunk = lane % 8;
    const int first = box_column(work, box);
    const int end = p.n * kWords - first;
    Words4 own[4], behind[4];
    int shift[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int in_box = warp * 16 + i * 4 + lane / 8;
      const int row = out_row(work, first_row() + box / kBoxes * 64 + in_box);
      const Bits16* from = row_of(matrix, work, row) + first;
      shift[i] = static_cast<int>(reinterpret_cast<unsigned long long>(from) / 2 % 8);
      const int at = chunk * 8 - shift[i];
      const bool from_start = at >= 0 || first > 0 || row > 0;  // what is before a row is of the one before it
      own[i] = load_16(from + at, row < work.end_row && from_start && at + 8 <= end);
      behind[i] = load_16(from + at + 8, row < work.end_row && at + 16 <= end);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int in_box = warp * 16 + i * 4 + lane / 8;
      store_shared_16(element_address(address, in_box, chunk * 8), eight_of_sixteen(own[i], behind[i], shift[i]));
    }
    // Elements of chunks that were not loaded: at the beginning and at the end of the matrix.
    if (end < 64 + 16 || work.row == 0) {
#pragma unroll 1
      for (int i = 0; i < 4; ++i) {
        const int in_box = warp * 16 + i * 4 + lane / 8;
        const int row = out_row(work, first_row() + box / kBoxes * 64 + in_box);
        const Bits16* from = row_of(matrix, work, row) + first;
        const int at = chunk * 8 - static_cast<int>(reinterpret_cast<unsigned long long>(from) / 2 % 8);
        const bool whole = at + 16 <= end && (at >= 0 || first > 0 || row > 0);
        if (whole || row >= work.end_row) continue;
        Words4 words = {};
#pragma unroll 1
        for (int e = 0; e < 8; ++e) {
          const unsigned bits = static_cast<unsigned>(load_read_only(from + chunk * 8 + e, chunk * 8 + e < end))
                                << e % 2 * 16;
#pragma unroll
          for (int w = 0; w < 4; ++w) words.word[w] |= e / 2 == w ? bits : 0u;
        }
        store_shared_16(element_address(address, in_box, chunk * 8), words);
      }
    }
  }
  __forceinline__ const GemmMatrix& staged_matrix() const {
    return config.staged == kStagedResidual ? p.epilogue.residual
           : config.staged == kStagedSaved  ? p.epilogue.saved
                                            : p.epilogue.preactivation;
  }

  // column: of the lane's first value in a tile.
  __forceinline__ void finish(const GemmDenseSm90Work& work, float (&x)[4], float (&extra)[4], int row_tile, int tile,
                              const int (&rows)[2], int column) {
    if constexpr (!config.split) {
      const GemmEpilogue<kEpilogue> epilogue{p.epilogue, work.end_row, p.n, work.group};
      const int gate = config.gated ? tile + kOutColumns / 8 : tile;
      epilogue.template apply<false, config.staged>(x, reinterpret_cast<float(&)[4]>(sums[row_tile][gate * 4]), extra,
                                                    rows, column);
    }
  }

  // A lane's two rows of a box, backward through a gated pair: their weights, and dots of this box's columns.
  struct WeightedRows {
    float weight[2] = {};
    float dot[2] = {};
  };
  __forceinline__ WeightedRows weights_of(const GemmDenseSm90Work& work, const int (&rows)[2]) const {
    WeightedRows own;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (config.weighted && rows[half] < work.end_row) own.weight[half] = p.pair.row_weights[rows[half]];
    }
    return own;
  }
  __forceinline__ void store_dots(const GemmDenseSm90Work& work, int box, const int (&rows)[2],
                                  WeightedRows own) const {
    const int part = work.column / kDotColumns + box % kBoxes;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float dot = own.dot[half];  // four lanes share a row
      dot += __shfl_xor_sync(0xffffffffu, dot, 1);
      dot += __shfl_xor_sync(0xffffffffu, dot, 2);
      const bool exists = rows[half] < work.end_row && part < p.pair.dot_parts;
      if (exists && lane % 4 == 0) p.pair.row_dots[static_cast<Index>(rows[half]) * p.pair.dot_parts + part] = dot;
    }
  }

  // The boxes of a buffer: out, and what is stored with it. rows_left: of the group.
  __forceinline__ void store_boxes(const GemmDenseSm90Work& work, int box, unsigned buffer, int rows_left) const {
    constexpr bool kKeeps = config.staged == kStagedPreactivation;
    constexpr unsigned kNext = gemm_sm90::kStagingBytes;
    // A box that contains rows of the next group is copied by threads.
    const bool whole = config.grouping != kRaggedRows || rows_left >= 64;
    const bool stores_hidden = config.gated_gradient && p.pair.hidden.data != nullptr;
    if (issues()) {
      if (whole) {
        store_box(work, box, buffer, p.out);
        if constexpr (kKeeps) store_box(work, box, buffer + kNext, p.staged);
        if constexpr (kKeeps && config.gated) store_box(work, box, buffer + 2 * kNext, &p.staged_gate);
        if constexpr (config.gated_gradient) store_box(work, box, buffer + kNext, &p.out_gate);
        if (stores_hidden) store_box(work, box, buffer + 2 * kNext, &p.hidden);
      }
      tma_store_commit_group();  // waiting counts groups, so there is one for each box even if it is empty
    }
    if constexpr (config.edges) store_edges(work, box, buffer);
    if (whole) return;
    store_some_rows(work, box, buffer, p.epilogue.out, rows_left);
    if constexpr (kKeeps) store_some_rows(work, box, buffer + kNext, p.epilogue.preactivation, rows_left);
    if constexpr (kKeeps && config.gated) {
      store_some_rows(work, box, buffer + 2 * kNext, p.pair.gate_preactivation, rows_left);
    }
    if constexpr (config.gated_gradient) store_some_rows(work, box, buffer + kNext, p.pair.out_gate, rows_left);
    if (stores_hidden) store_some_rows(work, box, buffer + 2 * kNext, p.pair.hidden, rows_left);
    // With two buffers, this one's next load is issued before the warps meet again.
    if constexpr (kLoadsStaged && kBuffers == 2) named_barrier_sync(kStaged + consumer, 128);
  }

  // The epilogue of a work tile, box by box, row tiles outside.
  __forceinline__ void store(const GemmDenseSm90Work& work) {
    constexpr int kTiles = kBoxColumns / 8;  // of 8 columns, in a box
    constexpr bool kKeeps = config.staged == kStagedPreactivation;
    const int barrier = kStaged + consumer;
#pragma unroll
    for (int box = 0; box < kRowTiles * kBoxes; ++box) {
      const int row_tile = box / kBoxes;
      // Addresses are recomputed for each box: kept for all columns, they would need more registers than there are.
      const int in_tile = recomputed(first_row() + row_tile * 64 + warp * 16 + lane / 4);
      const int rows[2] = {out_row(work, in_tile), out_row(work, in_tile + 8)};
      const int column = recomputed(work.column + first_tile_of(box) * 8 + lane % 4 * 2);
      const unsigned out = buffer_address(staging.index);
      const unsigned second = out + gemm_sm90::kStagingBytes, third = second + gemm_sm90::kStagingBytes;
      WeightedRows own;
      if constexpr (config.gated_gradient) own = weights_of(work, rows);
      if constexpr (!config.tma_store) {  // a warp's rows of a box are its own
        __syncwarp();
        if constexpr (kLoadsStaged) load_rows(work, box, out, staged_matrix());
        __syncwarp();
      } else if constexpr (kLoadsStaged) {
        const int next = staging.index + 1 < kBuffers ? staging.index + 1 : 0;
        if (box + 1 < kRowTiles * kBoxes) load_staged(work, box + 1, next);
        mbarrier_wait_parity(loaded_barrier(staging.index), staging.parity);
      } else if constexpr (kBuffers == 1) {  // free once TMA has read the box before this one
        if (issues()) tma_store_wait_group_read<0>();
        named_barrier_sync(barrier, 128);
      }
#pragma unroll
      for (int i = 0; i < kTiles; i += 2) {
        const int tile = first_tile_of(box) + i;
        const int first_new = box % kBoxes * kTiles;  // the tiles before it belong to the box before this one, too
        if (tile * 8 >= kOutColumns) continue;
        const bool both = (tile + 1) * 8 < kOutColumns;
        float(&left)[4] = reinterpret_cast<float(&)[4]>(sums[row_tile][tile * 4]);
        float(&right)[4] = reinterpret_cast<float(&)[4]>(sums[row_tile][(both ? tile + 1 : tile) * 4]);
        float extras[2][4] = {};
        if constexpr (kLoadsStaged) read_staged(out, i, extras[0], extras[1]);
        if constexpr (config.gated_gradient) {
          float gates[2][4];
          read_staged(second, i, gates[0], gates[1]);
          apply_gated_gradient<kEpilogue>(left, extras[0], gates[0], own.weight, own.dot);
          if (both) apply_gated_gradient<kEpilogue>(right, extras[1], gates[1], own.weight, own.dot);
          write_pair<config.dtype>(second, i, gates[0], gates[1]);
          write_pair<config.dtype>(third, i, extras[0], extras[1]);
        } else {
          if (tile >= first_new) finish(work, left, extras[0], row_tile, tile, rows, column + i * 8);
          if (both && tile + 1 >= first_new) {
            finish(work, right, extras[1], row_tile, tile + 1, rows, column + i * 8 + 8);
          }
        }
        if constexpr (kKeeps) write_pair<config.dtype>(second, i, extras[0], extras[1]);
        if constexpr (kKeeps && config.gated) {
          const int gate = tile + kOutColumns / 8, next = both ? gate + 1 : gate;
          write_pair<config.dtype>(third, i, reinterpret_cast<float(&)[4]>(sums[row_tile][gate * 4]),
                                   reinterpret_cast<float(&)[4]>(sums[row_tile][next * 4]));
        }
        if constexpr (kIsFloat) {
          write_floats(out, i, left);
          if (both) write_floats(out, i + 1, right);
        } else {
          write_pair<config.out_dtype>(out, i, left, right);
        }
      }
      if constexpr (config.weighted) store_dots(work, box, rows, own);
      if constexpr (config.tma_store) {
        // After the barrier the next buffer is free, too: TMA has read what was in it. If it is loaded, load_staged waits.
        if constexpr (!kLoadsStaged && kBuffers > 1) {
          if (issues()) tma_store_wait_group_read<kBuffers - 2>();
        }
        fence_proxy_async();
        named_barrier_sync(barrier, 128);
        store_boxes(work, box, out, work.end_row - work.row - first_row() - row_tile * 64);
        staging.advance();
      } else {
        __syncwarp();
        if constexpr (kKeeps) store_rows(work, box, second, staged_matrix());
        store_rows(work, box, out, p.epilogue.out);
      }
    }
  }

  __forceinline__ void run() {
    // What is read before the first stage has arrived needs a wait of its own: offsets, and the first box of a matrix.
    if constexpr (config.grouping == kRaggedRows || config.grouping == kRaggedSums || kLoadsStaged) {
      pdl_wait_and_launch_dependents();
    }
    GemmDenseSm90Tiles<config, true> tiles{p};
    GemmDenseSm90Work work;
    if (config.ping_pong && consumer == 1) {
      pass_turn();  // consumer 0 is first
      if (tiles.next(work)) skip(work);
    }
    while (tiles.next(work)) {
      if constexpr (kLoadsStaged && config.tma_store) load_staged(work, 0, staging.index);
      accumulate(work);
      store(work);
      if constexpr (config.ping_pong) {
        if (tiles.next(work)) skip(work);
      }
    }
    if constexpr (config.tma_store) {
      if (warp == 0 && lane == 0) tma_store_wait_group_read<0>();
    }
  }

  // The stages of the other consumer's work tile.
  __forceinline__ void skip(const GemmDenseSm90Work& work) {
    const unsigned stages = pipe.index + static_cast<unsigned>(work.end_step - work.first_step);
    pipe.parity ^= stages / config.stages & 1;
    pipe.index = static_cast<int>(stages % config.stages);
  }
};

}  // namespace tessera
