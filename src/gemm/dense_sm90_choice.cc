// Tiles and their predicted times were measured on an H200 (docs/kernels/gemm_dense_sm90.md).
#include "gemm/dense_sm90_choice.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "base/format.h"
#include "gemm/gpu.h"
#include "gemm/pad_rows.h"
#include "gemm/split_reduce.h"
#include "jit/nvrtc.h"

namespace tessera::gemm::sm90 {

using Config = GemmDenseSm90Config;

namespace {
// One matrix of the epilogue can be staged, or a pair: the one that is read, if there is one. Boxes of all that passes through
// shared memory are alike, so its elements must be as large as out's.
int staged_of(const GemmProblem& p) {
  if (p.gated_gradient) return kStagedPair;
  const bool same_size = p.out_dtype == p.dtype;
  if (p.gradient && same_size) return kStagedSaved;
  if (p.residual && !p.gradient) return kStagedResidual;
  if (p.preactivation && same_size) return kStagedPreactivation;
  return kStagedNone;
}

// Whether rows of A and out, or of A and B if both are rows of K, could be strided.
bool may_stride_m(const GemmProblem& p) {
  // Maps for eight remainders make Params larger than 4 KB, which launches take from CUDA 12.1 on.
  static_assert(sizeof(GemmDenseSm90Params<gemm_sm90::kRowGroups, 1>) > 4096);
  constexpr int kFirstDriver = 12010;
  const int driver = jit::driver_version();
  if (driver != 0 && driver < kFirstDriver) return false;
  // A group may begin at any row.
  return p.grouping == kUngrouped && !p.a_transposed && p.m >= gemm_sm90::kRowGroups && !moves_pair(p) && !p.sums_two;
}

bool may_stride_k(const GemmProblem& p) {
  return p.grouping == kUngrouped && p.a_transposed && p.b_transposed && !p.gated && !p.gated_gradient && !p.sums_two &&
         p.k >= gemm_sm90::kRowGroups && !(p.a_aligned && p.b_aligned);
}

// strides: rows that start anywhere are strided if possible, else copied, or stored by threads.
Access access_of(const GemmProblem& p, bool split, bool strides) {
  Access access;
  access.pad_a = !p.a_aligned;
  access.pad_b = !p.b_aligned;
  if (strides && may_stride_k(p)) {
    access.strided = kStridedK;
    access.pad_a = access.pad_b = false;
    return access;
  }
  if (!split) access.staged = staged_of(p);
  const bool matrices = p.residual || p.gradient || p.preactivation || p.gated_gradient;
  const bool stored_by_tma = split || stores_by_tma(p);  // partial sums have room for the last chunk
  const bool wide = p.grouping == kUngrouped && p.n >= 16 && !p.gated_gradient;
  if (!stored_by_tma && wide && p.out_aligned && !p.preactivation && (p.epilogue_aligned || !matrices)) {
    access.edges = true;
  }
  const bool may_shift_out = wide && !matrices && p.out_dtype == p.dtype;
  if (strides && may_stride_m(p)) {
    if (!stored_by_tma && !p.out_aligned && may_shift_out) access.edges = access.out_shifted = true;
    if (access.pad_a || access.out_shifted) access.strided = kStridedM;
    // A shift along the rows of b is one of where they begin.
    access.shift_b = (access.pad_a && !p.b_transposed) || (access.out_shifted && p.b_transposed);
    access.pad_a = false;
    access.pad_b |= access.shift_b;
  }
  access.tma_store = stored_by_tma || access.edges;
  return access;
}

std::int64_t extent_n(const GemmProblem& p, const Access& access) {
  const bool shifted = (access.strided == kStridedK && !p.b_aligned) || access.out_shifted;
  return p.n + (shifted ? gemm_sm90::kRowGroups - 1 : 0);
}

// Both operands are rows of K, so the transposed product is one of the same kind.
bool may_swap(const GemmProblem& p) {
  return p.grouping == kUngrouped && p.a_transposed && p.b_transposed && !p.gated && !p.gated_gradient && !p.sums_two;
}

GemmProblem swapped_problem(const GemmProblem& p) {
  GemmProblem q = p;
  std::swap(q.m, q.n);
  std::swap(q.a_aligned, q.b_aligned);
  return q;
}

// As many stages as fit beside the rest.
int stages_of(const Config& config, std::size_t shared_memory) {
  Config c = config;
  for (c.stages = 8; c.stages > 2; --c.stages) {
    if (static_cast<std::size_t>(gemm_sm90::layout(c).bytes) <= shared_memory) break;
  }
  return c.stages;
}

Choice choice_of(const GemmProblem& p, const Device& device, const Tile& tile, int splits, bool strides) {
  Choice choice = {};
  choice.splits = splits;
  choice.access = access_of(p, splits > 1, strides);
  Config& config = choice.main;
  config.a_transposed = p.a_transposed;
  config.b_transposed = p.b_transposed;
  config.block_m = tile.block_m;
  config.block_n = tile.block_n;
  config.ping_pong = tile.ping_pong;
  config.cluster = tile.cluster;
  config.shares_a = tile.shares_a;
  config.strided = choice.access.strided;
  config.tma_store = choice.access.tma_store;
  config.edges = choice.access.edges;
  config.staged = choice.access.staged;
  config.grouping = p.grouping;
  config.sums_two = p.sums_two;
  config.split = splits > 1 || config.strided == kStridedK;
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
// epilogue that accesses matrices directly needs many, and so does one of ragged rows that computes an activation and stores
// what it took, too.
int widest_ping_pong(const GemmProblem& p, const Access& access) {
  if (p.gated_gradient) return 128;
  if (p.grouping == kRaggedRows && p.preactivation && p.activation > kRelu) return 0;
  const int matrices = (p.residual ? 1 : 0) + (p.gradient ? 1 : 0) + (p.preactivation ? 1 : 0);
  if (matrices > (access.staged != kStagedNone ? 1 : 0)) return 0;
  if (!access.tma_store) return 128;  // copies of rows need registers, too
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

std::vector<Tile> tiles_for(const GemmProblem& p, bool strides) {
  const Access access = access_of(p, false, strides);
  const std::int64_t n = saturating_product(extent_n(p, access), p.gated ? 2 : 1);
  std::vector<Tile> tiles;
  const auto add = [&](int block_m, int widest, bool ping_pong) {
    for (const int cluster : {2, 1}) {
      if (cluster == 2 && rows_of(p) <= block_m * (access.strided == kStridedM ? gemm_sm90::kRowGroups : 1)) continue;
      // Whole atoms of B, whole groups of eight rows in each CTA's half of it, and whole boxes of what is moved beside out.
      const bool beside = access.staged == kStagedPreactivation || access.staged == kStagedPair;
      const bool boxes = beside && n > (p.gated ? 128 : 64);
      const int step = p.gated                   ? (p.b_transposed || boxes ? 128 : 16)
                       : p.b_transposed || boxes ? 64
                       : cluster == 2            ? 16
                                                 : 8;
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
    // As many sums as 128 x 192. If the epilogue loads a matrix, they were no faster than 128 x 128.
    const bool loads = access.staged == kStagedResidual || access.staged == kStagedSaved;
    if (widest == 192 && !loads) add(192, 128, true);
    add(128, 128, true);
  }
  // Gradients of weights have few tiles, and 132 of them may be found one way only. Smaller tiles have fewer partial results.
  if (p.a_transposed && p.b_transposed && p.grouping == kUngrouped) add(128, 128, false);
  // If they are two tiles wide, pairs of columns divide into more parts than pairs of rows.
  if (p.a_transposed && p.b_transposed && p.grouping == kUngrouped && !p.gated && n > 256 && n <= 512) {
    tiles.push_back({128, even_width(n, 256, 64), false, 2, true});
  }
  // Fewer lines of L2 per product. 256 x 192 sums leave no registers for a bias or for other matrices.
  if (widest_ping_pong(p, access) >= 192 && access.staged == kStagedNone && access.strided == kStridedNone) {
    add(256, 192, false);
  }
  // If an eighth of the multiprocessors has a tile each, a part of K is a group of strided terms, and has one partial result
  // instead of two.
  if (access.strided == kStridedK && n > 128) {
    const int width = even_width(n, 192, 16);
    if (rows_of(p) > 256) tiles.push_back({256, width, false, 2});
    tiles.push_back({256, width, false, 1});
  }
  add(64, 256, true);
  add(64, 128, true);
  if (rows_of(p) <= 64 || p.n <= 64) add(64, 64, true);
  return tiles;
}

// Of all groups, row tiles of whole clusters. If rows are ragged, half of a tile per group is expected to be empty.
std::int64_t tiles_of(const GemmProblem& p, const Access& access, const Tile& tile) {
  const std::int64_t ragged = p.grouping == kRaggedRows ? p.groups / 2 : 0;
  return saturating_product(row_tiles(p, access, tile) + ragged, column_tiles(p, access, tile),
                            out_has_layers(p.grouping) ? p.groups : 1);
}

// Into how many parts to divide K so that every multiprocessor has work; 1: not at all.
int splits_of(const GemmProblem& p, const Device& device, const Access& access, const Tile& tile) {
  constexpr std::int64_t kLeastSteps = 8, kMost = 64;
  const std::int64_t clusters = device.multiprocessors / tile.cluster;
  const std::int64_t tiles = saturating_product(row_tiles(p, access, tile), column_tiles(p, access, tile));
  const std::int64_t steps = all_steps(p, access);
  const bool whole = p.gated || p.gated_gradient || p.sums_two || p.grouping != kUngrouped;
  if (whole || tiles == 0 || tiles * 2 > clusters) return 1;
  // With ping-pong a CTA needs two work tiles to keep both consumers busy.
  const std::int64_t wanted = clusters / tiles * (tile.ping_pong ? 2 : 1);
  const std::int64_t splits = std::clamp<std::int64_t>(std::min(wanted, steps / kLeastSteps), 1, kMost);
  return static_cast<int>(ceil_div(steps, ceil_div(steps, splits)));  // none is empty
}

// At most, of one part.
std::int64_t partials_of_part(const GemmProblem& p, const Choice& choice) {
  std::int64_t most = 0, same = 0, last = -1;
  for (const Partial& partial : partial_results(p, choice)) {
    same = partial.part == last ? same + 1 : 1;
    last = partial.part;
    most = std::max(most, same);
  }
  return most;
}

bool fits(const Choice& choice, const Device& device) {
  const int least_stages = choice.main.staged == kStagedPair ? 3 : 2;  // two were not timed beside so much staging
  return choice.main.stages >= least_stages &&
         static_cast<std::size_t>(gemm_sm90::layout(choice.main).bytes) <= device.shared_memory_per_block;
}

GemmProblem with_rows(const GemmProblem& p, std::int64_t rows) {
  GemmProblem part = p;
  part.m = rows;
  return part;
}

double launch_time(const GemmProblem& p, const Device& device, const Choice& choice);

// Of tiles that do not fill their last round, the rows of that round in smaller tiles. Nothing if that is not faster.
std::optional<Choice> with_rest(const GemmProblem& p, const Device& device, const Choice& whole, bool strides) {
  if (p.grouping != kUngrouped || whole.main.split) return std::nullopt;
  const Tile tile = tile_of(whole.main);
  const std::int64_t clusters = device.multiprocessors / tile.cluster;
  const std::int64_t rows = row_tiles(p, whole.access, tile), columns = column_tiles(p, whole.access, tile);
  if (clusters == 0 || columns == 0) return std::nullopt;
  const std::int64_t groups = whole.access.strided == kStridedM ? gemm_sm90::kRowGroups : 1;
  const std::int64_t full = rows * columns / clusters * clusters / columns / groups * groups;  // row tiles
  const std::int64_t first = full * tile.block_m * (tile.shares_a ? 1 : tile.cluster);
  if (full == 0 || full == rows || first >= p.m) return std::nullopt;
  const GemmProblem last = with_rows(p, p.m - first);
  Choice best = whole;
  best.rest_rows = last.m;
  double least = 0;
  for (const Tile& smaller : tiles_for(last, strides)) {
    const Choice rest = choice_of(last, device, smaller, 1, strides);
    const double time = launch_time(last, device, rest);
    if (!fits(rest, device) || !is_offered(rest.main) || rest.access != whole.access || (least > 0 && time >= least))
      continue;
    least = time;
    best.rest = rest.main;
  }
  constexpr double kWorthwhile = 1;  // microseconds
  const double apart = launch_time(with_rows(p, first), device, whole) + least;
  if (least == 0 || apart + kWorthwhile > launch_time(p, device, whole)) return std::nullopt;
  return best;
}

void add_choices(const GemmProblem& p, const Device& device, bool swapped, std::vector<Choice>& choices) {
  for (const bool strides : {true, false}) {
    const Access access = access_of(p, false, strides);
    if (strides && access.strided == kStridedNone) continue;
    for (const Tile& tile : tiles_for(p, strides)) {
      const auto add = [&](int splits) {
        Choice choice = choice_of(p, device, tile, splits, strides);
        choice.swapped = swapped;
        // Partial sums need no stride for the sake of out. Only the step that adds them transposes.
        const bool differs = !strides || choice.access.strided != kStridedNone;
        if (!differs || (swapped && !choice.main.split) || !fits(choice, device)) return;
        choices.push_back(choice);
        if (const auto rest = with_rest(p, device, choice, strides)) choices.push_back(*rest);
      };
      add(1);
      if (const int splits = splits_of(p, device, access, tile); splits > 1) add(splits);
    }
  }
}
}  // namespace

// Whole chunks of 16 bytes, even if the last one's end is beyond the matrix.
bool stores_by_tma(const GemmProblem& p) {
  const bool whole_chunks = p.out_padded || p.n * static_cast<std::int64_t>(size_of(p.dtype)) % 16 == 0;
  return p.out_aligned && p.epilogue_aligned && whole_chunks;
}

std::int64_t extent_m(const GemmProblem& p, const Access& access) {
  return p.m + (access.strided == kStridedK && !p.a_aligned ? gemm_sm90::kRowGroups - 1 : 0);
}

std::int64_t k_steps(const GemmProblem& p, const Access& access) {
  if (access.strided == kStridedK) return ceil_div(ceil_div(p.k, gemm_sm90::kRowGroups), gemm_sm90::kBlockK);
  const bool shifted = access.strided == kStridedM && !p.a_aligned;
  return ceil_div(p.k + (shifted ? gemm_sm90::kRowGroups - 1 : 0), gemm_sm90::kBlockK) * (p.sums_two ? 2 : 1);
}

std::int64_t all_steps(const GemmProblem& p, const Access& access) {
  return k_steps(p, access) * (access.strided == kStridedK ? gemm_sm90::kRowGroups : 1);
}

GemmProblem main_problem(const GemmProblem& p, const Choice& choice) { return choice.swapped ? swapped_problem(p) : p; }
std::int64_t column_tiles(const GemmProblem& p, const Access& access, const Tile& tile) {
  const std::int64_t width = (p.gated ? tile.block_n / 2 : tile.block_n) * (tile.shares_a ? tile.cluster : 1);
  return ceil_div(extent_n(p, access), width);
}

std::int64_t row_tiles(const GemmProblem& p, const Access& access, const Tile& tile) {
  const std::int64_t groups = access.strided == kStridedM ? gemm_sm90::kRowGroups : 1;
  const std::int64_t height = std::int64_t{tile.block_m} * (tile.shares_a ? 1 : tile.cluster);
  return groups * ceil_div(ceil_div(extent_m(p, access), groups), height);
}

Tile tile_of(const Config& c) { return {c.block_m, c.block_n, c.ping_pong, c.cluster, c.shares_a}; }
bool is_offered(const Config& c) { return c.block_m < 256 || c.strided == kStridedK; }
int partials_of(const Choice& choice) {
  return choice.splits + (choice.main.strided == kStridedK ? gemm_sm90::kRowGroups - 1 : 0);
}

std::vector<Partial> partial_results(const GemmProblem& p, const Choice& choice) {
  const std::int64_t of_group = k_steps(p, choice.access), all = all_steps(p, choice.access);
  const std::int64_t of_part = ceil_div(all, choice.splits);
  std::vector<Partial> partials;
  for (std::int64_t at = 0; at < all;) {
    partials.push_back({at / of_group, at / of_part});
    at = std::min((partials.back().group + 1) * of_group, (partials.back().part + 1) * of_part);
  }
  return partials;
}

std::int64_t partial_columns(const GemmProblem& p, const Access& access) {
  const bool shifted = access.strided == kStridedK && !p.b_aligned;
  return ceil_div(p.n + (shifted ? gemm_sm90::kRowGroups : 0), 4) * 4;
}

std::int64_t partial_elements(const GemmProblem& p, const Access& access) {
  return saturating_product(extent_m(p, access), partial_columns(p, access));
}

std::int64_t layers_of_a(const GemmProblem& p) { return p.grouping == kBatched && !p.a_shared ? p.groups : 1; }
std::int64_t layers_of_b(const GemmProblem& p) {
  return p.grouping == kBatched || p.grouping == kRaggedRows ? p.groups : 1;
}

std::int64_t rows_of_b(const GemmProblem& p) { return p.b_transposed ? p.k : p.n; }
std::int64_t columns_of_b(const GemmProblem& p) { return p.b_transposed ? p.n : p.k; }
std::int64_t copied_stride(const GemmProblem& p, const Access& access) {
  return access.shift_b ? ceil_div(columns_of_b(p) + gemm_sm90::kRowGroups - 1, 64) * 64
                        : padded_stride(columns_of_b(p));
}

std::int64_t copies_of_b(const GemmProblem& p, const Access& access) {
  return access.shift_b ? gemm_sm90::kRowGroups : layers_of_b(p);
}

namespace {
// Of main alone. Constants are fitted to every tile of twenty products.
double launch_time(const GemmProblem& p, const Device& device, const Choice& choice) {
  constexpr double kClock = 1690;         // cycles per microsecond, under load
  constexpr double kMultiplyAdds = 2048;  // per cycle and multiprocessor
  constexpr double kL2Lines = 0.38;       // of 128 bytes, per cycle and multiprocessor
  constexpr double kWait = 47;            // cycles of a step in which nothing is multiplied, whatever the tile
  constexpr double kLineDelay = 0.19;     // cycles by which a loaded line delays a step, even if loads keep up
  const Config& c = choice.main;
  const Tile tile = tile_of(c);
  const std::int64_t terms = ceil_div(p.k, groups_of_terms(p));
  const std::int64_t in_all =
      p.grouping == kRaggedSums ? ceil_div(terms, gemm_sm90::kBlockK) : all_steps(p, choice.access);
  const double steps = static_cast<double>(ceil_div(in_all, choice.splits));
  // One operand of 64 rows and one of 256 do not keep up with wgmma: B is read once for each 64 rows. Narrow tiles of 256 rows
  // are limited by shared memory, of as many bytes per cycle as a row has in a step; TMA writes what is read. Tiles of 192 rows
  // are slower, too, as measured. Parts of K take one consumer at a time longer than both.
  const double multiplied = static_cast<double>(c.block_m) * c.block_n * gemm_sm90::kBlockK / kMultiplyAdds;
  const double shared = 2.0 * c.block_m + (c.block_m / 64.0 + 1.0) * c.block_n;
  const double slow = c.block_m == 64          ? (c.a_transposed ? 1.5 : 1.18)
                      : c.block_m == 256       ? std::max(1.05, shared / multiplied)
                      : c.split && c.ping_pong ? 1.28
                      : c.block_m == 192       ? 1.1
                                               : 1.05;
  const double products = multiplied * slow;
  // A row of a step is a line of L2, or lies across two if it starts anywhere. Without a cluster L2
  // seems to be read no more often, as CTAs side by side ask for the same lines, but each of them waits for all of its lines.
  const bool unaligned_a = c.strided != kStridedNone && !p.a_aligned;
  const bool unaligned_b = c.strided == kStridedK && !p.b_aligned;
  const double a_lines = c.block_m * (unaligned_a ? 2.0 : 1.0), b_lines = c.block_n * (unaligned_b ? 2.0 : 1.0);
  const auto lines_of = [&](double sharing) {
    return c.shares_a ? a_lines / sharing + b_lines : a_lines + b_lines / sharing;
  };
  const double loads = lines_of(2) / kL2Lines;
  const double multiplies = products + kWait + kLineDelay * lines_of(c.cluster);
  const double across = c.strided == kStridedK ? 1.15 : unaligned_a ? 1.1 : 1.0;
  const double main_loop = steps * std::max(multiplies, loads) * across + 270;
  const double elements = static_cast<double>(c.block_m) * c.block_n / (c.gated ? 2 : 1);
  const int pairs = c.gated_gradient ? 4 : 0;
  const int extra = pairs + (c.residual ? 1 : 0) + (c.gradient ? 1 : 0) + (c.preactivation ? (c.gated ? 2 : 1) : 0);
  const int staged = pairs > 0 || (c.gated && c.preactivation) ? extra : c.staged != kStagedNone ? 1 : 0;
  // Cycles per element. With ping-pong one warpgroup computes all elements of a tile, else two do. Pairs were fitted apart.
  const double staged_cycles = c.ping_pong && pairs == 0 ? 0.15 : 0.05;
  const double activation_cycles = c.activation == kIdentity ? 0.0 : !c.ping_pong ? 0.06 : c.gradient ? 0.26 : 0.16;
  const double cycles_per_element = 0.06 + staged_cycles * staged + 0.15 * (extra - staged) + activation_cycles +
                                    (c.tma_store ? 0.0 : 0.6) + (c.out_dtype == DType::kFloat32 ? 0.06 : 0.0);
  const double epilogue = elements * cycles_per_element + 130;
  // Rows that start or end within a sector of L2 write it in part, which takes time. If a main loop runs meanwhile, it is
  // delayed by less than that: measured with tiles of 128 and of 192 rows.
  const double edges = c.edges ? 5500.0 : 0.0;
  const double edge_delay = c.edges ? 5.0 * std::max(c.block_m, 128) : 0.0;
  const double work = static_cast<double>(saturating_product(tiles_of(p, choice.access, tile), choice.splits));
  const double clusters = std::floor(static_cast<double>(device.multiprocessors) / c.cluster);
  // How full the last round is with ragged rows is not known.
  const double rounds = p.grouping == kRaggedRows ? std::max(1.0, work / clusters + 0.5) : std::ceil(work / clusters);
  // A part of strided terms has an epilogue for each group of them that it has a share of.
  const double epilogues = epilogue * static_cast<double>(partials_of_part(p, choice));
  // With ping-pong the epilogue runs beside the next tile's main loop. If it is the longer one, both consumers are always
  // busy: a round takes half of what one needs for a tile, with the time that it spends between main loop and epilogue.
  constexpr double kBetween = 2000;
  const double round = std::max(main_loop + edge_delay, (main_loop + epilogues + kBetween) / 2);
  const double cycles =
      c.ping_pong ? main_loop + (rounds - 1) * round + epilogue + edges : rounds * (main_loop + epilogues + edges);
  return 2.0 + cycles / kClock;
}
}  // namespace

double predicted_time(const GemmProblem& p, const Device& device, const Choice& choice) {
  double time = launch_time(with_rows(p, p.m - choice.rest_rows), device, choice);
  if (choice.rest_rows > 0) {
    Choice rest = choice;
    rest.main = choice.rest;
    time += launch_time(with_rows(p, choice.rest_rows), device, rest);
  }
  if (choice.main.split) time += reduce_time(p, static_cast<int>(partial_results(p, choice).size()));
  const auto a_layers = static_cast<double>(layers_of_a(p));
  if (choice.access.pad_a) time += a_layers * pad_time(p.a_transposed ? p.k : p.m, p.a_transposed ? p.m : p.k);
  if (choice.access.pad_b) {
    const std::int64_t rows = saturating_product(rows_of_b(p), layers_of_b(p));
    time += (p.gated ? 2 : 1) * pad_time(rows, columns_of_b(p), choice.access.shift_b ? gemm_sm90::kRowGroups : 1);
  }
  return time;
}

std::vector<Choice> choices_for(const GemmProblem& p, const Device& device) {
  std::vector<Choice> choices;
  add_choices(p, device, false, choices);
  if (may_swap(p)) add_choices(swapped_problem(p), device, true, choices);
  return choices;
}

std::string why_of(const GemmProblem& whole, const Choice& choice) {
  const GemmProblem p = main_problem(whole, choice);
  const Tile tile = tile_of(choice.main);
  std::string why = format("{}{} tiles of {} x {}", p.grouping == kRaggedRows ? "about " : "",
                           tiles_of(p, choice.access, tile) * tile.cluster, tile.block_m,
                           choice.main.gated ? tile.block_n / 2 : tile.block_n);
  if (choice.rest_rows > 0) {
    why = format("{} rows in tiles of {} x {}, the last {} in tiles of {} x {}", p.m - choice.rest_rows, tile.block_m,
                 choice.main.gated ? tile.block_n / 2 : tile.block_n, choice.rest_rows, choice.rest.block_m,
                 choice.rest.gated ? choice.rest.block_n / 2 : choice.rest.block_n);
  }
  if (choice.splits > 1) why += format(", K in {} parts", choice.splits);
  if (choice.swapped) why += "; the transposed product, with a and b exchanged";
  const Access& access = choice.access;
  if (access.strided == kStridedM) {
    why +=
        format("; rows of {} are not 16-byte aligned: a tile has every eighth one", p.a_aligned          ? "out"
                                                                                    : access.out_shifted ? "a and out"
                                                                                                         : "a");
  }
  if (access.strided == kStridedK) {
    why += format("; rows of {} are not 16-byte aligned: a sum has every eighth one", whole.a_aligned   ? "b"
                                                                                      : whole.b_aligned ? "a"
                                                                                                        : "a and b");
  }
  if (access.shift_b) {
    why += "; b is copied for each of eight shifts";
  } else if (access.pad_a || access.pad_b) {
    why += format("; {} copied with padded rows", access.pad_a && access.pad_b ? "a and b are"
                                                  : access.pad_a               ? "a is"
                                                                               : "b is");
  }
  if (!access.tma_store) why += "; rows of out do not start and end at multiples of 16 bytes: stored by threads";
  return why;
}

}  // namespace tessera::gemm::sm90
