// Dense GEMM on Hopper (kernels/gemm/dense_sm90.cuh).
#include <algorithm>
#include <climits>
#include <cmath>

#include "base/format.h"
#include "cuda/tensor_map.h"
#include "gemm/dense_sm90_config.h"
#include "gemm/family.h"
#include "gemm/gpu.h"
#include "gemm/pad_rows.h"
#include "gemm/split_reduce.h"
#include "jit/config_text.h"

namespace tessera::gemm {
namespace {

using Config = GemmDenseSm90Config;

// How rows that TMA cannot address directly are dealt with.
struct Access {
  bool pad_a = false;          // copied to the workspace with a padded stride
  bool pad_b = false;          // and the gate
  int shifted = kShiftedNone;  // shifted on its way to shared memory
  bool tma_store = true;
  int staged = kStagedNone;  // the epilogue's matrix that TMA moves too
};

// One matrix of the epilogue can be staged: the one that is read, if there is one. Boxes of all that passes through
// shared memory are alike, so its elements must be as large as out's.
int staged_of(const GemmProblem& p) {
  const bool same_size = p.out_dtype == p.dtype;
  if (p.gradient && same_size) return kStagedSaved;
  if (p.residual && !p.gradient) return kStagedResidual;
  if (p.preactivation && same_size) return kStagedPreactivation;
  return kStagedNone;
}

// Whether an operand could be shifted. If its rows are rows of K, those of the other one are loaded in the same order, which
// needs them to be rows, too.
bool may_shift(const GemmProblem& p) {
  if (p.grouping != kUngrouped) return false;  // a group may begin at any row
  if (!p.a_transposed) return !p.a_aligned && p.m >= gemm_sm90::kRowGroups;
  return p.b_transposed && !p.gated && p.k >= gemm_sm90::kRowGroups && !(p.a_aligned && p.b_aligned);
}

// shifts: one operand is shifted if possible, else both are copied.
Access access_of(const GemmProblem& p, bool split, bool shifts) {
  Access access;
  access.pad_a = !p.a_aligned;
  access.pad_b = !p.b_aligned;
  if (shifts && may_shift(p)) {
    const bool larger_is_a = !p.a_transposed || p.m >= p.n;
    access.shifted = access.pad_a && (larger_is_a || !access.pad_b) ? kShiftedA : kShiftedB;
  }
  if (access.shifted == kShiftedA) access.pad_a = false;
  if (access.shifted == kShiftedB) access.pad_b = false;
  // TMA stores whole chunks of 16 bytes, even if the last one's end is beyond the matrix. Partial sums have room for it.
  const bool whole_chunks = p.out_padded || p.n * static_cast<std::int64_t>(size_of(p.dtype)) % 16 == 0;
  access.tma_store = split || (p.out_aligned && p.epilogue_aligned && whole_chunks);
  if (!split) access.staged = staged_of(p);
  return access;
}

struct Choice {
  Config main;
  int splits;  // 1: not split
  Access access;
};

jit::KernelInstance main_kernel(const Config& config) {
  return {.name = format("gemm_dense_sm90_{}_{}_{}{}_{}x{}s{}{}{}{}{}{}{}{}", name_of(config.dtype),
                         name_of(config.out_dtype), config.a_transposed ? 't' : 'n', config.b_transposed ? 't' : 'n',
                         config.block_m, config.block_n, config.stages, config.ping_pong ? "_ping_pong" : "",
                         config.cluster > 1 ? "_cluster" : "",
                         config.shifted == kShiftedA   ? "_shifted_a"
                         : config.shifted == kShiftedB ? "_shifted_b"
                                                       : "",
                         config.tma_store ? "" : "_rows", grouping_suffix(config.grouping),
                         config.split ? "_split" : "", epilogue_suffix(epilogue_of(config))),
          .header = "gemm/dense_sm90.cuh",
          .entry = "gemm_dense_sm90",
          .params = format("GemmDenseSm90Params<{}, {}>", gemm_sm90::m_groups(config), gemm_sm90::k_groups(config)),
          .config = jit::config_text("GemmDenseSm90Config", config),
          .threads = gemm_sm90::kThreads,
          .min_blocks = 1,
          .dynamic_smem_bytes = gemm_sm90::layout(config).bytes,
          .pdl = true,
          .cluster = config.cluster};
}

struct Tile {
  int block_m, block_n;
  bool ping_pong;
  int cluster;
};

// As many stages as fit beside the rest.
int stages_of(const Config& config, std::size_t shared_memory) {
  Config c = config;
  for (c.stages = 8; c.stages > 2; --c.stages) {
    if (static_cast<std::size_t>(gemm_sm90::layout(c).bytes) <= shared_memory) break;
  }
  return c.stages;
}

Choice choice_of(const GemmProblem& p, const Device& device, const Tile& tile, int splits, bool shifts) {
  Choice choice = {};
  choice.splits = splits;
  choice.access = access_of(p, splits > 1, shifts);
  Config& config = choice.main;
  config.a_transposed = p.a_transposed;
  config.b_transposed = p.b_transposed;
  config.block_m = tile.block_m;
  config.block_n = tile.block_n;
  config.ping_pong = tile.ping_pong;
  config.cluster = tile.cluster;
  config.shifted = choice.access.shifted;
  config.tma_store = choice.access.tma_store;
  config.staged = choice.access.staged;
  config.grouping = p.grouping;
  config.split = splits > 1;
  set_epilogue(p, config);
  if (config.split) {  // the next step's
    config.activation = kIdentity;
    config.bias = config.gradient = config.preactivation = config.residual = false;
    config.out_dtype = DType::kFloat32;
    config.pairs = true;
  }
  config.stages = stages_of(config, device.shared_memory_per_block);
  return choice;
}

// The widest tile of 128 rows for which the sums of a whole tile and the epilogue fit a consumer's registers; 0: none. An
// epilogue that accesses matrices directly needs many.
int widest_ping_pong(const GemmProblem& p, const Access& access) {
  const int matrices = (p.residual ? 1 : 0) + (p.gradient ? 1 : 0) + (p.preactivation ? 1 : 0);
  if (matrices > (access.staged != kStagedNone ? 1 : 0)) return 0;
  // The producer that shifts, and the copies of rows, need registers, too.
  if (access.shifted != kShiftedNone && p.activation == kGeluErf) return 0;
  if (access.shifted != kShiftedNone || !access.tma_store) return 128;
  if (!p.bias && !p.gated && p.activation != kGeluErf) return 192;
  return p.activation == kGeluErf ? 128 : 160;
}

// The width, at most `most`, of the fewest tiles that cover n columns: a multiple of `step`.
int even_width(std::int64_t n, int most, int step) {
  const std::int64_t tiles = std::max<std::int64_t>(ceil_div(n, most), 1);
  return static_cast<int>(std::clamp<std::int64_t>(ceil_div(ceil_div(n, tiles), step) * step, step, most));
}

// Rows of out, of a group on average.
std::int64_t rows_of(const GemmProblem& p) {
  return p.grouping == kRaggedRows ? ceil_div(p.m, std::max<std::int64_t>(p.groups, 1)) : p.m;
}

std::vector<Tile> tiles_for(const GemmProblem& p, bool shifts) {
  const Access access = access_of(p, false, shifts);
  const std::int64_t n = p.gated ? saturating_product(p.n, 2) : p.n;
  std::vector<Tile> tiles;
  const auto add = [&](int block_m, int widest, bool ping_pong) {
    for (const int cluster : {2, 1}) {
      if (cluster == 2 && (rows_of(p) <= block_m || access.shifted == kShiftedB)) continue;
      // Whole atoms of B, whole groups of eight rows in each CTA's half of it, and whole boxes of a preactivation.
      const bool boxes = access.staged == kStagedPreactivation && n > 64;
      const int step = p.gated ? (p.b_transposed ? 128 : 16) : p.b_transposed || boxes ? 64 : cluster == 2 ? 16 : 8;
      const int most = widest / step * step;
      if (most == 0) continue;
      // A tile that is narrower than what is stored at a time must be the only one of its rows.
      const int least = p.gated ? 128 : 64;
      if (n > most && most < least) continue;
      const int width = n > most ? std::max(even_width(n, most, step), least) : even_width(n, most, step);
      const Tile tile{block_m, width, ping_pong, cluster};
      const bool known = std::any_of(tiles.begin(), tiles.end(), [&](const Tile& t) {
        return t.block_m == tile.block_m && t.block_n == tile.block_n && t.ping_pong == tile.ping_pong &&
               t.cluster == tile.cluster;
      });
      if (!known) tiles.push_back(tile);
    }
  };
  add(128, 256, false);
  if (const int widest = widest_ping_pong(p, access); widest > 0) {
    if (widest > 128) add(128, widest, true);
    add(128, 128, true);
  }
  // Gradients of weights have few tiles, and 132 of them may be found one way only.
  if (p.a_transposed && p.b_transposed && p.grouping == kUngrouped && access.shifted == kShiftedNone) {
    add(256, 128, false);
  }
  add(64, 256, true);
  add(64, 128, true);
  if (rows_of(p) <= 64 || p.n <= 64) add(64, 64, true);
  return tiles;
}

std::int64_t column_tiles(const GemmProblem& p, const Tile& tile) {
  return ceil_div(p.n, p.gated ? tile.block_n / 2 : tile.block_n);
}
std::int64_t row_tiles(const GemmProblem& p, const Tile& tile) {
  return ceil_div(p.m, std::int64_t{tile.block_m} * tile.cluster);
}
// Of all groups, row tiles of whole clusters. If rows are ragged, half of a tile per group is expected to be empty.
std::int64_t tiles_of(const GemmProblem& p, const Tile& tile) {
  const std::int64_t ragged = p.grouping == kRaggedRows ? p.groups / 2 : 0;
  return saturating_product(row_tiles(p, tile) + ragged, column_tiles(p, tile),
                            out_has_layers(p.grouping) ? p.groups : 1);
}
Tile tile_of(const Config& c) { return {c.block_m, c.block_n, c.ping_pong, c.cluster}; }

// Into how many parts to divide K so that every multiprocessor has work; 1: not at all.
int splits_of(const GemmProblem& p, const Device& device, const Tile& tile) {
  constexpr std::int64_t kLeastSteps = 8, kMost = 64;
  const std::int64_t clusters = device.multiprocessors / tile.cluster;
  const std::int64_t tiles = saturating_product(row_tiles(p, tile), column_tiles(p, tile));
  const std::int64_t steps = ceil_div(p.k, gemm_sm90::kBlockK);
  if (p.gated || p.grouping != kUngrouped || tiles == 0 || tiles * 2 > clusters) return 1;
  // With ping-pong a CTA needs two work tiles to keep both consumers busy.
  const std::int64_t wanted = clusters / tiles * (tile.ping_pong ? 2 : 1);
  const std::int64_t splits = std::clamp<std::int64_t>(std::min(wanted, steps / kLeastSteps), 1, kMost);
  return static_cast<int>(ceil_div(steps, ceil_div(steps, splits)));  // none is empty
}

// Matrices of a, and of b: one per group, or one.
std::int64_t layers_of_a(const GemmProblem& p) { return p.grouping == kBatched && !p.a_shared ? p.groups : 1; }
std::int64_t layers_of_b(const GemmProblem& p) {
  return p.grouping == kBatched || p.grouping == kRaggedRows ? p.groups : 1;
}

// Microseconds, roughly: measured on an H200.
double predicted_time(const GemmProblem& p, const Device& device, const Choice& choice) {
  constexpr double kClock = 1550;         // cycles per microsecond, under load
  constexpr double kMultiplyAdds = 2048;  // per cycle and multiprocessor
  constexpr double kL2Bytes = 40;         // per cycle and multiprocessor
  const Config& c = choice.main;
  const Tile tile = tile_of(c);
  const std::int64_t terms = ceil_div(p.k, groups_of_terms(p));
  const double steps = static_cast<double>(ceil_div(ceil_div(terms, gemm_sm90::kBlockK), choice.splits));
  const double products =
      static_cast<double>(c.block_m) * c.block_n * gemm_sm90::kBlockK / kMultiplyAdds * (c.block_m == 64 ? 1.25 : 1.05);
  const double loads = (c.block_m + static_cast<double>(c.block_n) / c.cluster) * gemm_sm90::kBlockK * 2 / kL2Bytes;
  // Three warps shift a row in about 24 cycles.
  const double shifted_rows = c.shifted == kShiftedNone ? 0
                              : c.shifted == kShiftedA  ? c.block_m
                                                        : gemm_sm90::b_atoms(c) * 64.0;
  const double main_loop = steps * std::max({products, loads, shifted_rows * 24}) + 200;
  const double elements = static_cast<double>(c.block_m) * c.block_n / (c.gated ? 2 : 1);
  const int extra = (c.residual ? 1 : 0) + (c.gradient ? 1 : 0) + (c.preactivation ? 1 : 0);
  const int staged = c.staged != kStagedNone ? 1 : 0;
  const double epilogue =
      elements * (0.06 + 0.05 * staged + 0.15 * (extra - staged) + (c.activation != kIdentity ? 0.06 : 0.0) +
                  (c.tma_store ? 0.0 : 0.2) + (c.out_dtype == DType::kFloat32 ? 0.06 : 0.0)) +
      500;
  const double work = static_cast<double>(saturating_product(tiles_of(p, tile), choice.splits));
  const double clusters = std::floor(static_cast<double>(device.multiprocessors) / c.cluster);
  const double rounds = std::ceil(work / clusters);
  // With ping-pong the epilogue runs beside the next tile's main loop.
  const double cycles = c.ping_pong ? rounds * std::max(main_loop, (main_loop + epilogue) / 2) + epilogue
                                    : rounds * (main_loop + epilogue);
  double time = 2.0 + cycles / kClock;
  if (choice.splits > 1) time += reduce_time(p, choice.splits);
  const double a_layers = static_cast<double>(layers_of_a(p)), b_layers = static_cast<double>(layers_of_b(p));
  if (choice.access.pad_a) time += a_layers * pad_time(p.a_transposed ? p.k : p.m, p.a_transposed ? p.m : p.k);
  if (choice.access.pad_b) {
    time += (p.gated ? 2 : 1) * b_layers * pad_time(p.b_transposed ? p.k : p.n, p.b_transposed ? p.n : p.k);
  }
  return time;
}

struct Parts {  // byte offsets in the workspace
  std::size_t a = 0, b = 0, gate = 0, partial = 0, bytes = 0;
};
Parts parts_of(const GemmProblem& p, const Choice& choice) {
  Parts parts;
  const auto take = [&](bool wanted, std::size_t bytes) {
    const std::size_t at = parts.bytes;
    if (wanted) parts.bytes += rounded_part(bytes);
    return at;
  };
  const std::size_t a =
      padded_bytes(saturating_product(p.a_transposed ? p.k : p.m, layers_of_a(p)), p.a_transposed ? p.m : p.k);
  const std::size_t b =
      padded_bytes(saturating_product(p.b_transposed ? p.k : p.n, layers_of_b(p)), p.b_transposed ? p.n : p.k);
  parts.a = take(choice.access.pad_a, a);
  parts.b = take(choice.access.pad_b, b);
  parts.gate = take(choice.access.pad_b && p.gated, b);
  parts.partial = take(choice.splits > 1, choice.splits > 1 ? partial_bytes(p, choice.splits) : 0);
  return parts;
}

engine::Config named(const Choice& choice) {
  engine::Config config = {{"main", engine::fields_of(choice.main)}};
  if (choice.splits > 1) config.push_back({"reduce", {{"splits", static_cast<std::int64_t>(choice.splits)}}});
  return config;
}

// Maps of a matrix of `rows` rows, one per group of rows, with boxes of 128 bytes of box_rows rows. words: 16-bit ones
// of an element. shift: elements from a map's beginning to its first row.
struct Matrix {
  std::uintptr_t address;
  std::int64_t row_bytes;  // from row to row
  std::int64_t rows;
  std::int64_t columns;
  int words;
  std::int64_t layers;
  std::int64_t layer_bytes;  // from layer to layer
};
template <int groups>
Status encode_groups(const Matrix& m, int box_rows, TensorMap (&maps)[groups], int (&shift)[groups]) {
  constexpr std::uintptr_t kAlignment = 16;
  // Strides of axes with one element only are not used, but must be valid.
  const auto valid = [](std::int64_t bytes) { return static_cast<std::uint64_t>(std::max<std::int64_t>(bytes, 16)); };
  for (int group = 0; group < groups; ++group) {
    const std::uintptr_t first = m.address + static_cast<std::uintptr_t>(group * m.row_bytes);
    const std::uintptr_t before = first % kAlignment;
    const std::int64_t rows = ceil_div(m.rows - group, groups);
    const std::uint64_t stride = rows <= 1 ? kAlignment : valid(m.row_bytes * groups);
    cuda::TensorBox box;
    box.address = first - before;
    shift[group] = static_cast<int>(before / 2);
    const std::uint64_t layer = m.layers <= 1 ? stride : valid(m.layer_bytes);
    box.extents = {static_cast<std::uint64_t>(m.columns * m.words) + before / 2, static_cast<std::uint64_t>(rows),
                   static_cast<std::uint64_t>(m.layers), 1};
    box.strides = {stride, layer, layer};
    box.columns = 64;
    box.rows = static_cast<std::uint32_t>(box_rows);
    const auto map = cuda::encode(box);
    if (!map.ok()) return map.status();
    maps[group] = *map;
  }
  return {};
}

template <int groups>
Status encode_partial(const GemmProblem& p, void* partial, int splits, int box_rows, TensorMap (&maps)[groups]) {
  const std::int64_t row = partial_stride(p) * 4;
  const auto layer = static_cast<std::uint64_t>(saturating_product(row, p.m));
  for (int group = 0; group < groups; ++group) {
    cuda::TensorBox box;
    box.address = reinterpret_cast<std::uintptr_t>(partial) + static_cast<std::uintptr_t>(group * row);
    box.extents = {static_cast<std::uint64_t>(partial_stride(p)) * 2,
                   static_cast<std::uint64_t>(ceil_div(p.m - group, groups)), static_cast<std::uint64_t>(splits), 1};
    box.strides = {static_cast<std::uint64_t>(row * groups), layer, layer};
    box.columns = 64;
    box.rows = static_cast<std::uint32_t>(box_rows);
    const auto map = cuda::encode(box);
    if (!map.ok()) return map.status();
    maps[group] = *map;
  }
  return {};
}

template <int m_groups, int k_groups>
Status enqueue_main(const Choice& choice, const GemmArgs& args, const GemmView& a, const GemmView& b,
                    const GemmView& gate, void* partial, const cuda::Kernel& kernel, cuda::CUstream stream) {
  const GemmProblem& p = args.problem;
  const Config& config = choice.main;
  const Tile tile = tile_of(config);
  cuda::Work<GemmDenseSm90Params<m_groups, k_groups>> work = {};
  GemmDenseSm90Params<m_groups, k_groups>& params = work.params;
  const auto scope = cuda::ContextScope::enter(kernel.device);  // which the driver needs to encode tensor maps
  if (!scope.ok()) return scope.status();

  const auto matrix = [](const GemmView& v, std::int64_t rows, std::int64_t columns, std::size_t element,
                         std::int64_t layers) {
    const auto bytes = static_cast<std::int64_t>(element);
    return Matrix{reinterpret_cast<std::uintptr_t>(v.data),
                  v.row_stride * bytes,
                  rows,
                  columns,
                  static_cast<int>(element / 2),
                  layers,
                  v.group_stride * bytes};
  };
  const std::int64_t a_layers = layers_of_a(p), b_layers = layers_of_b(p);
  const std::int64_t out_layers = out_has_layers(p.grouping) ? p.groups : 1;
  constexpr int kAtomRows = gemm_sm90::kBlockK;
  const Matrix of_a = p.a_transposed ? matrix(a, p.k, p.m, 2, a_layers) : matrix(a, p.m, p.k, 2, a_layers);
  int aligned[m_groups * k_groups];  // not used: such rows need no shift
  const int a_rows = (p.a_transposed ? kAtomRows : config.block_m) / (m_groups * k_groups);
  if (Status s = encode_groups(of_a, a_rows, params.a, config.shifted == kShiftedA ? params.shift : aligned); !s.ok())
    return s;
  const bool halves = config.gated || config.cluster > 1;
  const int b_rows = (p.b_transposed ? kAtomRows : halves ? config.block_n / 2 : config.block_n) / k_groups;
  const Matrix of_b = p.b_transposed ? matrix(b, p.k, p.n, 2, b_layers) : matrix(b, p.n, p.k, 2, b_layers);
  int shift_b[k_groups];
  if (Status s = encode_groups(of_b, b_rows, params.b, shift_b); !s.ok()) return s;
  if (config.shifted == kShiftedB) std::copy(shift_b, shift_b + k_groups, params.shift);
  if (config.gated) {
    const Matrix of_gate = p.b_transposed ? matrix(gate, p.k, p.n, 2, b_layers) : matrix(gate, p.n, p.k, 2, b_layers);
    TensorMap maps[1];
    int first_column[1];
    if (Status s = encode_groups(of_gate, b_rows, maps, first_column); !s.ok()) return s;
    params.gate = maps[0];
  }
  int none[m_groups];  // whatever TMA stores is aligned
  const std::int64_t chunk = 16 / static_cast<std::int64_t>(size_of(p.out_dtype));
  const std::int64_t written_columns = p.out_padded ? ceil_div(p.n, chunk) * chunk : p.n;
  const int out_rows = m_groups > 1 ? config.block_m / m_groups : 64;
  if (config.split) {
    if (Status s = encode_partial(p, partial, choice.splits, out_rows, params.out); !s.ok()) return s;
  } else if (config.tma_store) {
    const Matrix of_out = matrix(args.out, p.m, written_columns, size_of(p.out_dtype), out_layers);
    if (Status s = encode_groups(of_out, out_rows, params.out, none); !s.ok()) return s;
  }
  if (config.tma_store && config.staged != kStagedNone) {
    const GemmView& view = config.staged == kStagedResidual ? args.residual
                           : config.staged == kStagedSaved  ? args.saved
                                                            : args.preactivation;
    const std::int64_t columns = config.staged == kStagedPreactivation ? written_columns : p.n;
    const Matrix staged =
        matrix(view, p.m, columns, size_of(config.staged == kStagedResidual ? p.out_dtype : p.dtype), out_layers);
    if (Status s = encode_groups(staged, out_rows, params.staged, none); !s.ok()) return s;
  }
  params.epilogue = epilogue_params(args);
  params.m = static_cast<int>(p.m);
  params.n = static_cast<int>(p.n);
  params.k = static_cast<int>(p.k);
  params.offsets = args.offsets;
  params.groups = static_cast<int>(p.groups);
  params.a_layers = a_layers > 1 ? 1 : 0;
  // Rows of A that are in use at a time should fit L2 beside those of B.
  constexpr std::int64_t kTogether = 2048;  // rows
  const std::int64_t rows = row_tiles(p, tile);
  const auto together = static_cast<unsigned>(std::clamp<std::int64_t>(
      kTogether / (std::int64_t{tile.block_m} * tile.cluster), 1, std::max<std::int64_t>(rows, 1)));
  const std::int64_t ragged = p.grouping == kRaggedRows ? p.groups : 0;  // at most one more row tile for each
  const std::int64_t tiles = saturating_product(rows + ragged, column_tiles(p, tile), choice.splits * out_layers);
  if (tiles > INT_MAX) return {TESSERA_UNSUPPORTED, "gemm_dense_sm90: more tiles than one grid can cover"};
  params.order = {static_cast<unsigned>(rows), static_cast<unsigned>(column_tiles(p, tile)), together};
  params.splits = static_cast<unsigned>(choice.splits);
  params.work_tiles = static_cast<unsigned>(tiles);
  params.k_steps = static_cast<int>(ceil_div(p.k, gemm_sm90::kBlockK));
  params.k_steps_per_split = static_cast<int>(ceil_div(params.k_steps, choice.splits));
  const std::int64_t clusters = std::min<std::int64_t>(tiles, kernel.multiprocessors / config.cluster);
  work.grid = {static_cast<unsigned>(clusters * config.cluster), 1, 1};
  return cuda::launch(kernel, work, stream);
}

Status enqueue(const Choice& choice, const GemmArgs& args, const engine::Launch& launch) {
  const GemmProblem& p = args.problem;
  if (p.m == 0 || p.n == 0 || (p.op == GemmOp::kGrouped && p.groups == 0)) return {};
  const Parts parts = parts_of(p, choice);
  auto* workspace = static_cast<std::byte*>(launch.workspace);
  std::size_t kernel = 0;
  GemmView a = args.a, b = args.b, gate = args.gate;
  const bool pads = choice.access.pad_a || choice.access.pad_b;
  const auto pad = [&](GemmView& view, std::size_t at, std::int64_t rows, std::int64_t columns,
                       std::int64_t layers) -> Status {
    const std::int64_t stride = padded_stride(columns);
    // Layers without gaps between them are one matrix.
    const bool adjacent = layers > 1 && view.group_stride == rows * view.row_stride;
    for (std::int64_t layer = 0; layer < (adjacent ? 1 : layers); ++layer) {
      const GemmView from{static_cast<std::byte*>(view.data) + layer * view.group_stride * 2, view.row_stride};
      const auto work =
          pad_work(from, workspace + at + layer * rows * stride * 2, adjacent ? rows * layers : rows, columns);
      if (!work.ok()) return work.status();
      if (Status s = cuda::launch(*launch.kernels[0], *work, launch.stream); !s.ok()) return s;
    }
    view = {workspace + at, stride, rows * stride};
    return {};
  };
  if (choice.access.pad_a) {
    if (Status s = pad(a, parts.a, p.a_transposed ? p.k : p.m, p.a_transposed ? p.m : p.k, layers_of_a(p)); !s.ok())
      return s;
  }
  if (choice.access.pad_b) {
    const std::int64_t rows = p.b_transposed ? p.k : p.n, columns = p.b_transposed ? p.n : p.k;
    if (Status s = pad(b, parts.b, rows, columns, layers_of_b(p)); !s.ok()) return s;
    if (p.gated) {
      if (Status s = pad(gate, parts.gate, rows, columns, layers_of_b(p)); !s.ok()) return s;
    }
  }
  if (pads) ++kernel;
  void* partial = workspace + parts.partial;
  const cuda::Kernel& main = *launch.kernels[kernel++];
  const auto enqueue_with = gemm_sm90::groups_are_of_m(choice.main)   ? enqueue_main<gemm_sm90::kRowGroups, 1>
                            : gemm_sm90::groups_are_of_k(choice.main) ? enqueue_main<1, gemm_sm90::kRowGroups>
                                                                      : enqueue_main<1, 1>;
  const Status s = enqueue_with(choice, args, a, b, gate, partial, main, launch.stream);
  if (!s.ok() || choice.splits == 1) return s;
  const auto reduce = reduce_work(args, static_cast<const float*>(partial), choice.splits);
  if (!reduce.ok()) return reduce.status();
  return cuda::launch(*launch.kernels[kernel], *reduce, launch.stream);
}

std::optional<std::string> refuses(const GemmProblem& p, const Device& device) {
  if (auto reason = gpu_refuses(p, device)) return reason;
  if (device.compute != 90 || !device.specific) return "needs TMA and wgmma (sm_90a)";
  if (!p.tensor_maps) return "needs positive strides below 2^36 elements";
  if (p.k == 0) return "there is nothing to load: K is 0";
  return std::nullopt;
}

bool fits(const Choice& choice, const Device& device) {
  return choice.main.stages >= 2 &&
         static_cast<std::size_t>(gemm_sm90::layout(choice.main).bytes) <= device.shared_memory_per_block;
}

std::vector<Choice> choices_for(const GemmProblem& p, const Device& device) {
  std::vector<Choice> choices;
  for (const bool shifts : {true, false}) {
    if (shifts && !may_shift(p)) continue;
    for (const Tile& tile : tiles_for(p, shifts)) {
      const auto add = [&](int splits) {
        const Choice choice = choice_of(p, device, tile, splits, shifts);
        if (fits(choice, device)) choices.push_back(choice);
      };
      add(1);
      if (const int splits = splits_of(p, device, tile); splits > 1) add(splits);
    }
  }
  return choices;
}

std::string why_of(const GemmProblem& p, const Choice& choice) {
  const Tile tile = tile_of(choice.main);
  std::string why =
      format("{}{} tiles of {} x {}", p.grouping == kRaggedRows ? "about " : "", tiles_of(p, tile) * tile.cluster,
             tile.block_m, choice.main.gated ? tile.block_n / 2 : tile.block_n);
  if (choice.splits > 1) why += format(", K in {} parts", choice.splits);
  if (choice.access.shifted != kShiftedNone) {
    why += format("; rows of {} are not 16-byte aligned: shifted after they are loaded",
                  choice.access.shifted == kShiftedA ? "a" : "b");
  }
  if (choice.access.pad_a || choice.access.pad_b) {
    why += format("; {} copied with padded rows", choice.access.pad_a && choice.access.pad_b ? "a and b are"
                                                  : choice.access.pad_a                      ? "a is"
                                                                                             : "b is");
  }
  if (!choice.access.tma_store) why += "; rows of out do not start and end at multiples of 16 bytes: stored by threads";
  return why;
}

std::vector<engine::Offer> offers(const GemmProblem& p, const Device& device) {
  constexpr std::size_t kMost = 4;  // the others are the tuner's
  std::vector<engine::Offer> offers;
  for (const Choice& choice : choices_for(p, device)) {
    offers.push_back({named(choice), parts_of(p, choice).bytes, predicted_time(p, device, choice), why_of(p, choice)});
  }
  std::stable_sort(offers.begin(), offers.end(),
                   [](const engine::Offer& x, const engine::Offer& y) { return x.microseconds < y.microseconds; });
  if (offers.size() > kMost) offers.resize(kMost);
  return offers;
}

std::vector<engine::Config> searches(const GemmProblem& p, const Device& device) {
  std::vector<engine::Config> list;
  for (const Choice& choice : choices_for(p, device)) list.push_back(named(choice));
  return list;
}

std::optional<Recipe> recipe(const GemmProblem& p, const Device& device, const engine::Config& config) {
  for (const Choice& choice : choices_for(p, device)) {
    if (named(choice) != config) continue;
    const Access& access = choice.access;
    Recipe recipe;
    recipe.problem = p;
    if (access.pad_a || access.shifted == kShiftedA) recipe.problem.a_aligned = false;
    if (access.pad_b || access.shifted == kShiftedB) recipe.problem.b_aligned = false;
    if (access.pad_a || access.pad_b) recipe.steps.push_back({"pad", instance_of(pad_config())});
    recipe.steps.push_back({"main", main_kernel(choice.main)});
    bool pairs = choice.main.pairs, out_pairs = pairs;
    if (choice.splits > 1) {
      const GemmSplitReduceConfig reduce = reduce_config(p);
      out_pairs = pairs = reduce.pairs;
      recipe.steps.push_back({"reduce", instance_of(reduce)});
    }
    const bool out_needed = out_pairs || (choice.splits == 1 && access.tma_store);
    if (!out_needed) recipe.problem.out_aligned = false;
    const bool epilogue_needed = pairs || access.tma_store;
    if (!epilogue_needed) recipe.problem.epilogue_aligned = false;
    recipe.workspace = parts_of(p, choice).bytes;
    recipe.enqueue = [choice](const GemmArgs& args, const engine::Launch& launch) {
      return enqueue(choice, args, launch);
    };
    return recipe;
  }
  return std::nullopt;
}

// Large; the products of an MLP whose hidden width is odd, with the epilogues that need the most registers; gated.
std::vector<GemmProblem> representatives(const Device& device) {
  std::vector<GemmProblem> list;
  list.push_back(representative(device, 8192, 8192, 8192));
  GemmProblem p = representative(device, 36096, 1365, 512);
  p.out_aligned = p.epilogue_aligned = false;
  p.bias = p.preactivation = true;
  p.activation = kGeluErf;
  list.push_back(p);
  p.out_aligned = p.epilogue_aligned = p.out_padded = true;
  list.push_back(p);
  p = representative(device, 36096, 512, 1365);
  p.a_aligned = p.b_aligned = false;
  p.bias = p.residual = true;
  list.push_back(p);
  p = representative(device, 36096, 200, 93);  // short rows: shifted, not copied
  p.a_aligned = p.b_aligned = false;
  p.bias = true;
  p.activation = kSilu;
  list.push_back(p);
  p = representative(device, 1365, 512, 36096);
  p.a_transposed = p.b_transposed = true;
  p.a_aligned = false;
  p.out_dtype = DType::kFloat32;
  list.push_back(p);
  p = representative(device, 8192, 11008, 4096);
  p.gated = p.bias = true;
  p.activation = kSilu;
  list.push_back(p);
  p = representative(device, 65536, 1408, 2048);
  p.op = GemmOp::kGrouped;
  p.grouping = kRaggedRows;
  p.groups = 64;
  list.push_back(p);
  p = representative(device, 1408, 2048, 65536);
  p.op = GemmOp::kGrouped;
  p.grouping = kRaggedSums;
  p.groups = 64;
  p.a_transposed = p.b_transposed = true;
  list.push_back(p);
  return list;
}

}  // namespace

Implementation dense_sm90() {
  return {"gemm_dense_sm90",
          GemmFamily::bit_of(GemmOp::kDense) | GemmFamily::bit_of(GemmOp::kGrouped),
          {"gemm/dense_sm90.cuh", "gemm/split_reduce.cuh", "gemm/pad_rows.cuh"},
          refuses,
          offers,
          recipe,
          searches,
          representatives};
}

}  // namespace tessera::gemm
