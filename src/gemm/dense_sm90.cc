// Dense GEMM on Hopper (kernels/gemm/dense_sm90.cuh).
#include <algorithm>
#include <climits>
#include <cmath>
#include <span>

#include "base/format.h"
#include "cuda/tensor_map.h"
#include "gemm/dense_sm90_choice.h"
#include "gemm/dense_sm90_config.h"
#include "gemm/family.h"
#include "gemm/gpu.h"
#include "gemm/pad_rows.h"
#include "gemm/split_reduce.h"
#include "jit/config_text.h"

namespace tessera::gemm {
namespace {

using namespace sm90;
using Config = GemmDenseSm90Config;

// What the main step computes.
GemmArgs main_args(const GemmArgs& args, const Choice& choice) {
  GemmArgs main = args;
  main.problem = main_problem(args.problem, choice);
  if (choice.swapped) std::swap(main.a, main.b);
  return main;
}

jit::KernelInstance main_kernel(const Config& config) {
  return {
      .name = format("gemm_dense_sm90_{}_{}_{}{}_{}x{}s{}{}{}{}{}{}{}{}{}{}", name_of(config.dtype),
                     name_of(config.out_dtype), config.a_transposed ? 't' : 'n', config.b_transposed ? 't' : 'n',
                     config.block_m, config.block_n, config.stages, config.ping_pong ? "_ping_pong" : "",
                     config.shares_a      ? "_cluster_a"
                     : config.cluster > 1 ? "_cluster"
                                          : "",
                     config.strided == kStridedM   ? "_strided_m"
                     : config.strided == kStridedK ? "_strided_k"
                                                   : "",
                     config.tma_store ? "" : "_rows", config.edges ? "_edges" : "", grouping_suffix(config.grouping),
                     config.sums_two ? "_two" : "", config.split ? "_split" : "", epilogue_suffix(epilogue_of(config))),
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
  const auto b = static_cast<std::size_t>(
      saturating_product(rows_of_b(p), copied_stride(p, choice.access), 2 * copies_of_b(p, choice.access)));
  parts.a = take(choice.access.pad_a, a);
  parts.b = take(choice.access.pad_b, b);
  parts.gate = take(choice.access.pad_b && p.gated, b);
  parts.partial =
      take(choice.main.split,
           static_cast<std::size_t>(saturating_product(partial_elements(p, choice.access), 4, partials_of(choice))));
  return parts;
}

engine::Config named(const Choice& choice) {
  engine::Config config = {{"main", engine::fields_of(choice.main)}};
  if (choice.main.split) {
    config.push_back(
        {"reduce", {{"splits", static_cast<std::int64_t>(choice.splits)}, {"transposed", choice.swapped}}});
  }
  if (choice.rest_rows > 0) {
    config.push_back({"rest", engine::fields_of(choice.rest)});
    config.back().fields.push_back({"rows", choice.rest_rows});
  }
  return config;
}

// Maps of a matrix of `rows` rows, one per group of rows, with boxes of 128 bytes of box_rows rows. words: 16-bit ones
// of an element. shift: elements from a map's beginning to its first row. whole_chunks: maps begin with the first whole chunk
// of 16 bytes of their rows and end with the last one; shift: from the chunk before that.
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
Status encode_groups(const Matrix& m, int box_rows, TensorMap (&maps)[groups], int (&shift)[groups],
                     bool whole_chunks = false) {
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
    auto columns = static_cast<std::uint64_t>(m.columns * m.words) + before / 2;
    if (whole_chunks) {
      const std::uint64_t head = before > 0 ? kAlignment / 2 : 0;
      box.address += head * 2;
      columns = (columns - head) / (kAlignment / 2) * (kAlignment / 2);
    }
    const std::uint64_t layer = m.layers <= 1 ? stride : valid(m.layer_bytes);
    box.extents = {columns, static_cast<std::uint64_t>(rows), static_cast<std::uint64_t>(m.layers), 1};
    box.strides = {stride, layer, layer};
    box.columns = 64;
    box.rows = static_cast<std::uint32_t>(box_rows);
    // The 256 bytes around a line are the same row's only if rows begin at multiples of them.
    box.promotes = box.address % 256 == 0 && stride % 256 == 0;
    const auto map = cuda::encode(box);
    if (!map.ok()) return map.status();
    maps[group] = *map;
  }
  return {};
}

template <int groups>
Status encode_partial(const GemmProblem& p, const Choice& choice, void* partial, TensorMap (&maps)[groups]) {
  const std::int64_t row = partial_columns(p, choice.access) * 4;
  const auto layer = static_cast<std::uint64_t>(saturating_product(partial_elements(p, choice.access), 4));
  for (int group = 0; group < groups; ++group) {
    cuda::TensorBox box;
    box.address = reinterpret_cast<std::uintptr_t>(partial) + static_cast<std::uintptr_t>(group * row);
    box.extents = {static_cast<std::uint64_t>(row) / 2,
                   static_cast<std::uint64_t>(ceil_div(extent_m(p, choice.access) - group, groups)),
                   static_cast<std::uint64_t>(partials_of(choice)), 1};
    box.strides = {static_cast<std::uint64_t>(row * groups), layer, layer};
    box.columns = 64;
    box.rows = 64;
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
  const std::int64_t a_layers = layers_of_a(p), b_layers = copies_of_b(p, choice.access);
  const std::int64_t out_layers = out_has_layers(p.grouping) ? p.groups : 1;
  constexpr int kAtomRows = gemm_sm90::kBlockK;
  const Matrix of_a = p.a_transposed ? matrix(a, p.k, p.m, 2, a_layers) : matrix(a, p.m, p.k, 2, a_layers);
  int shift_a[m_groups * k_groups];
  const int a_rows = p.a_transposed ? kAtomRows : config.block_m;
  if (Status s = encode_groups(of_a, a_rows, params.a, shift_a); !s.ok()) return s;
  if constexpr (m_groups > 1) std::copy(shift_a, shift_a + m_groups, params.a_shift);
  const bool halves = config.gated || gemm_sm90::shares_b(config);
  const int b_rows = p.b_transposed ? kAtomRows : halves ? config.block_n / 2 : config.block_n;
  // What a shifted copy has beside b's columns is zero.
  const std::int64_t b_columns = choice.access.shift_b ? copied_stride(p, choice.access) : columns_of_b(p);
  int shift_b[k_groups];
  if (Status s = encode_groups(matrix(b, rows_of_b(p), b_columns, 2, b_layers), b_rows, params.b, shift_b); !s.ok())
    return s;
  params.b_layers = choice.access.shift_b ? 1 : 0;
  if (config.gated) {
    const Matrix of_gate = matrix(gate, rows_of_b(p), b_columns, 2, b_layers);
    TensorMap maps[1];
    int first_column[1];
    if (Status s = encode_groups(of_gate, b_rows, maps, first_column); !s.ok()) return s;
    params.gate = maps[0];
  }
  if (config.sums_two) {
    TensorMap maps[1];
    int unshifted[1];
    const Matrix of_a2 =
        p.a_transposed ? matrix(args.a2, p.k, p.m, 2, a_layers) : matrix(args.a2, p.m, p.k, 2, a_layers);
    if (Status s = encode_groups(of_a2, a_rows, maps, unshifted); !s.ok()) return s;
    params.a2 = maps[0];
    if (Status s = encode_groups(matrix(args.b2, rows_of_b(p), b_columns, 2, b_layers), b_rows, maps, unshifted);
        !s.ok())
      return s;
    params.b2 = maps[0];
  }
  int none[m_groups];  // no shift: such rows are aligned
  const std::int64_t chunk = 16 / static_cast<std::int64_t>(size_of(p.out_dtype));
  const std::int64_t written_columns = p.out_padded ? ceil_div(p.n, chunk) * chunk : p.n;
  constexpr int kBoxRows = 64;
  if (config.split) {
    if (Status s = encode_partial(p, choice, partial, params.out); !s.ok()) return s;
  } else if (config.tma_store) {
    const Matrix of_out = matrix(args.out, p.m, written_columns, size_of(p.out_dtype), out_layers);
    if (Status s = encode_groups(of_out, kBoxRows, params.out, params.out_shift, config.edges); !s.ok()) return s;
  }
  if (config.tma_store && config.staged != kStagedNone) {
    const GemmView& view = config.staged == kStagedResidual        ? args.residual
                           : config.staged == kStagedPreactivation ? args.preactivation
                                                                   : args.saved;
    const std::int64_t columns = config.staged == kStagedPreactivation ? written_columns : p.n;
    const Matrix staged =
        matrix(view, p.m, columns, size_of(config.staged == kStagedResidual ? p.out_dtype : p.dtype), out_layers);
    if (Status s = encode_groups(staged, kBoxRows, params.staged, none); !s.ok()) return s;
  }
  if (moves_pair(p)) {
    const auto encode_one = [&](const GemmView& view, std::int64_t columns, TensorMap& map) -> Status {
      if (view.data == nullptr) return {};
      TensorMap maps[1];
      int unshifted[1];
      const Matrix one = matrix(view, p.m, columns, size_of(p.dtype), out_layers);
      Status s = encode_groups(one, kBoxRows, maps, unshifted);
      map = maps[0];
      return s;
    };
    const GemmView& gate = p.gated_gradient ? args.saved_gate : args.gate_preactivation;
    const std::int64_t gate_columns = p.gated_gradient ? p.n : written_columns;
    if (Status s = encode_one(gate, gate_columns, params.staged_gate); !s.ok()) return s;
    if (Status s = encode_one(args.out_gate, written_columns, params.out_gate); !s.ok()) return s;
    if (Status s = encode_one(args.hidden, written_columns, params.hidden); !s.ok()) return s;
    params.pair = {matrix_of(args.gate_preactivation),
                   matrix_of(args.out_gate),
                   matrix_of(args.hidden),
                   args.row_weights,
                   args.row_dots,
                   static_cast<int>(dot_parts_of(p.n))};
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
  const std::int64_t rows = row_tiles(p, choice.access, tile);
  const auto together = static_cast<unsigned>(std::clamp<std::int64_t>(
      kTogether / (std::int64_t{tile.block_m} * tile.cluster), 1, std::max<std::int64_t>(rows, 1)));
  const std::int64_t ragged = p.grouping == kRaggedRows ? p.groups : 0;  // at most one more row tile for each
  const std::int64_t tiles =
      saturating_product(rows + ragged, column_tiles(p, choice.access, tile), choice.splits * out_layers);
  if (tiles > INT_MAX) return {TESSERA_UNSUPPORTED, "gemm_dense_sm90: more tiles than one grid can cover"};
  params.order = {static_cast<unsigned>(rows), static_cast<unsigned>(column_tiles(p, choice.access, tile)), together};
  params.splits = static_cast<unsigned>(choice.splits);
  params.work_tiles = static_cast<unsigned>(tiles);
  params.k_steps = static_cast<int>(k_steps(p, choice.access));
  params.k_steps_per_split = static_cast<int>(ceil_div(all_steps(p, choice.access), choice.splits));
  const std::int64_t clusters = std::min<std::int64_t>(tiles, kernel.multiprocessors / config.cluster);
  work.grid = {static_cast<unsigned>(clusters * config.cluster), 1, 1};
  return cuda::launch(kernel, work, stream);
}

// 16-bit elements from the last multiple of 16 bytes to a row.
int shift_of(const GemmView& view, std::int64_t row) {
  const auto address =
      reinterpret_cast<std::uintptr_t>(view.data) + static_cast<std::uintptr_t>(row * view.row_stride * 2);
  return static_cast<int>(address % 16 / 2);
}

// The rows from `first` on.
GemmArgs rows_from(const GemmArgs& args, std::int64_t first, std::int64_t rows) {
  GemmArgs part = args;
  const GemmProblem& p = args.problem;
  part.problem.m = rows;
  const auto advance = [&](GemmView& view, DType dtype, std::int64_t elements) {
    if (view.data == nullptr) return;
    view.data = static_cast<std::byte*>(view.data) + elements * static_cast<std::int64_t>(size_of(dtype));
  };
  advance(part.a, p.dtype, first * (p.a_transposed ? 1 : part.a.row_stride));
  advance(part.out, p.out_dtype, first * part.out.row_stride);
  advance(part.residual, p.out_dtype, first * part.residual.row_stride);
  advance(part.saved, p.dtype, first * part.saved.row_stride);
  advance(part.preactivation, p.dtype, first * part.preactivation.row_stride);
  advance(part.gate_preactivation, p.dtype, first * part.gate_preactivation.row_stride);
  advance(part.a2, p.dtype, first * (p.a_transposed ? 1 : part.a2.row_stride));
  advance(part.saved_gate, p.dtype, first * part.saved_gate.row_stride);
  advance(part.out_gate, p.dtype, first * part.out_gate.row_stride);
  advance(part.hidden, p.dtype, first * part.hidden.row_stride);
  if (part.row_weights != nullptr) part.row_weights += first;
  if (part.row_dots != nullptr) part.row_dots += first * dot_parts_of(p.n);
  return part;
}

// Where out begins in each partial result, in the order of their terms (kernels/gemm/dense_sm90_work.cuh).
std::vector<Index> first_elements(const GemmArgs& args, const Choice& choice) {
  const GemmProblem& p = args.problem;
  const std::int64_t elements = partial_elements(p, choice.access), columns = partial_columns(p, choice.access);
  std::vector<Index> first;
  for (const auto& [group, part] : partial_results(p, choice)) {
    const bool strided = choice.main.strided == kStridedK;
    const int row = strided ? shift_of(args.a, group) : 0, column = strided ? shift_of(args.b, group) : 0;
    first.push_back((group + part) * elements + row * columns + column);
  }
  return first;
}

Status enqueue(const Choice& choice, const GemmArgs& whole, const engine::Launch& launch) {
  const GemmArgs args = main_args(whole, choice);
  const GemmProblem& p = args.problem;
  if (p.m == 0 || p.n == 0 || (p.op == GemmOp::kGrouped && p.groups == 0)) return {};
  const Parts parts = parts_of(p, choice);
  auto* workspace = static_cast<std::byte*>(launch.workspace);
  std::size_t kernel = 0;
  GemmView a = args.a, b = args.b, gate = args.gate;
  const bool pads = choice.access.pad_a || choice.access.pad_b;
  const auto pad = [&](GemmView& view, std::size_t at, std::int64_t rows, std::int64_t columns, std::int64_t stride,
                       std::int64_t layers, std::span<const int> shifts) -> Status {
    // Layers without gaps between them are one matrix.
    const bool adjacent = layers > 1 && view.group_stride == rows * view.row_stride;
    for (std::int64_t layer = 0; layer < (adjacent ? 1 : layers); ++layer) {
      const GemmView from{static_cast<std::byte*>(view.data) + layer * view.group_stride * 2, view.row_stride};
      const auto work = pad_work(from, workspace + at + layer * rows * stride * 2, stride,
                                 adjacent ? rows * layers : rows, columns, shifts);
      if (!work.ok()) return work.status();
      if (Status s = cuda::launch(*launch.kernels[0], *work, launch.stream); !s.ok()) return s;
    }
    view = {workspace + at, stride, rows * stride};
    return {};
  };
  constexpr int kUnshifted[1] = {};
  if (choice.access.pad_a) {
    const std::int64_t rows = p.a_transposed ? p.k : p.m, columns = p.a_transposed ? p.m : p.k;
    if (Status s = pad(a, parts.a, rows, columns, padded_stride(columns), layers_of_a(p), kUnshifted); !s.ok())
      return s;
  }
  if (choice.access.pad_b) {
    int shifts[gemm_sm90::kRowGroups];
    for (int i = 0; i < gemm_sm90::kRowGroups; ++i) shifts[i] = shift_of(p.b_transposed ? args.out : args.a, i);
    const auto copy = [&](GemmView& view, std::size_t at) {
      return pad(view, at, rows_of_b(p), columns_of_b(p), copied_stride(p, choice.access), layers_of_b(p),
                 choice.access.shift_b ? std::span<const int>(shifts) : kUnshifted);
    };
    if (Status s = copy(b, parts.b); !s.ok()) return s;
    if (p.gated) {
      if (Status s = copy(gate, parts.gate); !s.ok()) return s;
    }
  }
  if (pads) ++kernel;
  void* partial = workspace + parts.partial;
  const cuda::Kernel& main = *launch.kernels[kernel++];
  const auto enqueue_with = choice.main.strided == kStridedM   ? enqueue_main<gemm_sm90::kRowGroups, 1>
                            : choice.main.strided == kStridedK ? enqueue_main<1, gemm_sm90::kRowGroups>
                                                               : enqueue_main<1, 1>;
  GemmArgs padded = args;
  padded.a = a;
  const auto enqueue_rows = [&](const Choice& part, std::int64_t first, std::int64_t rows, const cuda::Kernel& one) {
    const GemmArgs of_rows = rows_from(padded, first, rows);
    return enqueue_with(part, of_rows, of_rows.a, b, gate, partial, one, launch.stream);
  };
  const std::int64_t main_rows = p.m - choice.rest_rows;
  if (Status s = enqueue_rows(choice, 0, main_rows, main); !s.ok()) return s;
  if (choice.rest_rows > 0) {
    Choice rest = choice;
    rest.main = choice.rest;
    return enqueue_rows(rest, main_rows, choice.rest_rows, *launch.kernels[kernel]);
  }
  if (!choice.main.split) return {};
  const auto reduce = reduce_work(whole, static_cast<const float*>(partial), partial_columns(p, choice.access),
                                  first_elements(args, choice), choice.swapped);
  if (!reduce.ok()) return reduce.status();
  return cuda::launch(*launch.kernels[kernel], *reduce, launch.stream);
}

std::optional<std::string> refuses(const GemmProblem& p, const Device& device) {
  if (auto reason = gpu_refuses(p, device)) return reason;
  if (device.compute != 90 || !device.specific) return "needs TMA and wgmma (sm_90a)";
  if (!p.tensor_maps) return "needs positive strides below 2^36 elements";
  if (p.k == 0) return "there is nothing to load: K is 0";
  if (p.n > INT_MAX / 2 - 1024) return "N is below 2^30 - 1024: a tile counts words of 16 bits, of which fp32 has two";
  const bool other_epilogue = p.bias || p.residual || p.gated || p.gradient || p.preactivation;
  if (p.gated_gradient && other_epilogue) return "the gradient of a gated pair is the whole epilogue";
  if (p.gated && p.preactivation && (p.residual || p.gradient))
    return "a gated product that stores both has no residual";
  if (p.sums_two && (p.gated || p.grouping == kBatched || p.grouping == kRaggedSums)) {
    return "sums two products of whole rows, without a gate";
  }
  if (moves_pair(p) && !stores_by_tma(p)) return "rows of a gated pair do not start and end at multiples of 16 bytes";
  if (moves_pair(p) && p.out_dtype != p.dtype) return "stores pairs of one type";
  if (p.sums_two && !(p.a_aligned && p.b_aligned)) return "rows of two products do not start at multiples of 16 bytes";
  return std::nullopt;
}
std::vector<engine::Offer> offers(const GemmProblem& p, const Device& device) {
  constexpr std::size_t kMost = 4;  // the others are the tuner's
  std::vector<engine::Offer> offers;
  for (const Choice& choice : choices_for(p, device)) {
    if (!is_offered(choice.main)) continue;
    const GemmProblem main = main_problem(p, choice);
    offers.push_back(
        {named(choice), parts_of(main, choice).bytes, predicted_time(main, device, choice), why_of(p, choice)});
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
    if (access.pad_a || access.pad_b) recipe.steps.push_back({"pad", instance_of(pad_config())});
    recipe.steps.push_back({"main", main_kernel(choice.main)});
    if (choice.rest_rows > 0) recipe.steps.push_back({"rest", main_kernel(choice.rest)});
    bool pairs = choice.main.pairs, out_pairs = pairs;
    if (choice.main.split) {
      const bool shifted = access.strided == kStridedK && !main_problem(p, choice).b_aligned;
      const GemmSplitReduceConfig reduce = reduce_config(p, shifted && !choice.swapped, choice.swapped);
      out_pairs = pairs = reduce.pairs;
      recipe.steps.push_back({"reduce", instance_of(reduce)});
    }
    const bool out_needed = out_pairs || (!choice.main.split && access.tma_store);
    if (!out_needed) recipe.problem.out_aligned = false;
    const bool epilogue_needed = pairs || access.tma_store;
    if (!epilogue_needed) recipe.problem.epilogue_aligned = false;
    recipe.workspace = parts_of(main_problem(p, choice), choice).bytes;
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
  p.bias = false;
  p.activation = kSilu;
  list.push_back(p);
  p = representative(device, 36096, 512, 1365);
  p.a_aligned = p.b_aligned = false;
  p.bias = p.residual = true;
  list.push_back(p);
  p = representative(device, 36096, 1365, 93);
  p.a_aligned = p.b_aligned = p.out_aligned = false;
  p.bias = true;
  p.activation = kSilu;
  list.push_back(p);
  p = representative(device, 36096, 1365, 512);
  p.b_transposed = true;
  p.b_aligned = p.out_aligned = false;
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
  p.bias = false;
  p.preactivation = true;
  list.push_back(p);
  p.gated = p.preactivation = false;
  p.gated_gradient = p.b_transposed = true;
  list.push_back(p);
  const auto of_experts = [&](std::int64_t n, std::int64_t k) {
    GemmProblem experts = representative(device, 65536, n, k);
    experts.op = GemmOp::kGrouped;
    experts.grouping = kRaggedRows;
    experts.groups = 64;
    return experts;
  };
  p = of_experts(1408, 2048);
  list.push_back(p);
  p.activation = kSilu;
  p.gated = p.preactivation = true;
  list.push_back(p);
  p.gated = p.preactivation = false;
  p.gated_gradient = p.weighted = p.b_transposed = true;
  list.push_back(p);
  p = of_experts(2048, 1408);
  p.sums_two = p.b_transposed = true;
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
