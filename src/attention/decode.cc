// Decode on any GPU (kernels/attention/decode.cuh, then kernels/attention/decode_combine.cuh).
#include "attention/decode_config.h"

#include <algorithm>
#include <bit>
#include <climits>

#include "attention/atom_boxes.h"
#include "attention/family.h"
#include "attention/gpu.h"
#include "attention/params.h"
#include "base/format.h"
#include "jit/config_text.h"

namespace tessera::attention {
namespace {

using Config = AttentionDecodeConfig;

// So few that a CTA fits beside those of the main kernel, and can find out what to combine while these run.
constexpr int kCombineThreads = 128;
constexpr int kCombineCtas = 6;  // per SM: the main kernel leaves 80 registers for each thread of one
constexpr int kLargestCluster = 8;
// In batch-invariant mode each result is of this many keys, or of a tile if that has more.
constexpr int kUnitKeys = 256;
// The end of a sequence takes as long as about this many tiles. It counts if CTAs have several sequences.
constexpr int kEndCost = 1;

int rows_of_group(const AttentionProblem& p) {
  return static_cast<int>(std::min<std::int64_t>(p.heads_q / p.heads_kv * p.seq_q, INT_MAX));
}

bool fits(const Config& config, const Device& device) {
  constexpr std::size_t kReserved = 1024;  // of every CTA, by the driver
  const std::size_t bytes = static_cast<std::size_t>(decode_shared_bytes(config)) + kReserved;
  const std::size_t alignment = config.box_rows > 0 ? kTileAlignment : 128;
  const std::size_t of_row = config.key_scales ? 12 : 8;
  const std::size_t rows_of_warps =
      static_cast<std::size_t>(config.row_warps * config.key_warps) * 16 * of_row + alignment;
  return (bytes + rows_of_warps) * static_cast<std::size_t>(config.ctas_per_sm) <=
         device.shared_memory_per_block + kReserved;
}

// 64 rows are four row warps, whose output and scores fill the registers; fewer rows leave warps for more keys.
Config base_config(const AttentionProblem& p) {
  const int rows = rows_of_group(p);
  const int row_warps = rows <= 16 ? 1 : rows <= 32 ? 2 : 4;
  return {.dtype = p.dtype,
          .dim_qk = static_cast<int>(p.dim_qk),
          .dim_v = static_cast<int>(p.dim_v),
          .block_k = 0,
          .row_warps = row_warps,
          .key_warps = 4 / row_warps,
          .stages = 0,
          .cluster = 1,
          .ctas_per_sm = 0,
          .vector = vector_of(p),
          .score_mod = has_score_mod(p),
          .paged = p.paged,
          .append = p.seq_new > 0,
          .e4m3_cache = p.fp8_cache,
          .key_scales = has_key_scales(p),
          .box_rows = 0};
}

// How a CTA is cut: warps that share keys, keys of each, tiles in shared memory, CTAs per SM.
struct Shape {
  int key_warps, keys_per_warp, stages, ctas_per_sm;
};

// The keys of a tile, or of a page if that is less. 0: TMA cannot load the cache.
int box_rows_of(const AttentionProblem& p, const Device& device, int block_k) {
  constexpr std::int64_t kLeast = 8;  // rows that a swizzle repeats after
  const std::int64_t least_dim = p.fp8_cache ? 32 : 16;
  if (hopper_refuses(p, device) || p.seq_k == 0 || p.dim_qk % least_dim != 0 || p.dim_v % least_dim != 0) return 0;
  if (!p.paged) return block_k;
  if (p.num_pages == 0 || p.page_size < kLeast || !std::has_single_bit(static_cast<std::uint64_t>(p.page_size)) ||
      block_k / p.page_size > 32) {  // a lane of the producer warp loads one box
    return 0;
  }
  return static_cast<int>(std::min<std::int64_t>(p.page_size, block_k));
}

Config with_shape(Config config, const Shape& shape) {
  config.key_warps = std::max(1, shape.key_warps / config.row_warps);
  config.block_k = config.key_warps * shape.keys_per_warp;
  config.stages = shape.stages;
  config.ctas_per_sm = shape.ctas_per_sm;
  return config;
}

// The first that fits has enough bytes in flight to cover the memory's latency, about 40 KB per SM on an H200, and
// enough warps to cover that of the products and the softmax. Without cp.async, other CTAs cover both.
Config first_that_fits(const Config& config, const Device& device, std::initializer_list<Shape> shapes) {
  for (const Shape& shape : shapes) {
    if (fits(with_shape(config, shape), device)) return with_shape(config, shape);
  }
  return with_shape(config, *(shapes.end() - 1));
}

// With TMA, if that can load the cache, leaves room for as many CTAs, and saves instructions or bytes: if keys come in
// pages, or their rows are no whole 128-byte lines. Otherwise cp.async is as fast, and starts sooner.
Config with_boxes(Config config, const AttentionProblem& p, const Device& device) {
  const std::int64_t line = p.fp8_cache ? 128 : 64;
  if (!p.paged && p.dim_qk % line == 0 && p.dim_v % line == 0) return config;
  // Whether TMA can load a contiguous cache depends on the number of its sequences.
  if (!p.paged && p.batch_invariant) return config;
  // The producer warp leaves too few registers.
  const bool wide = config.dim_qk > 64 || config.dim_v > 64;
  if (p.fp8_cache && wide && config.ctas_per_sm > 1 && (config.append || config.row_warps > 1)) return config;
  Config boxes = config;
  boxes.box_rows = box_rows_of(p, device, config.block_k);
  // Pages smaller than a tile: two stages leave L1 more room, which has the page numbers.
  const bool small_pages = boxes.box_rows > 0 && boxes.box_rows < config.block_k;
  if (small_pages && wide && config.row_warps == 1 && config.ctas_per_sm > 1) boxes.stages = 2;
  return fits(boxes, device) ? boxes : config;
}

Config default_config(const AttentionProblem& p, const Device& device) {
  Config config = base_config(p);
  const bool async = device.compute >= 80 && config.vector == 8;
  const int dim = std::max(config.dim_qk, config.dim_v);
  // As many bytes of a cache of e4m3 are twice as many keys; wide rows leave no registers for these.
  const int least = p.fp8_cache && dim <= 128 ? 32 : 16, keys = dim <= 64 ? 2 * least : least;
  const int stages = p.fp8_cache && dim > 64 ? 2 : 3;
  if (!async && dim > 128) config.row_warps = 1;  // two rows of warps would spill
  for (;; config.row_warps /= 2) {
    const Config chosen =
        async ? first_that_fits(
                    config, device,
                    {{4, keys, stages, 2}, {4, keys, 2, 2}, {4, least, 3, 1}, {4, least, 2, 1}, {2, 16, 2, 1}})
              : first_that_fits(config, device, {{4, 16, 1, 2}, {4, 16, 1, 1}, {2, 16, 1, 1}});
    if (fits(chosen, device) || config.row_warps == 1) return with_boxes(chosen, p, device);
  }
}

std::int64_t tiles_of(const AttentionProblem& p, const Config& config) {
  return std::max<std::int64_t>(1, ceil_div(p.seq_k, config.block_k));
}
int unit_tiles(const AttentionProblem& p, const Config& config) {
  return p.batch_invariant ? std::max(1, kUnitKeys / config.block_k) : 1;
}
std::int64_t units_of(const AttentionProblem& p, const Config& config) {
  return ceil_div(tiles_of(p, config), unit_tiles(p, config));
}
std::int64_t columns_of(const AttentionProblem& p, const Config& config) {
  return p.heads_kv * ceil_div(rows_of_group(p), config.row_warps * 16);
}

// CTAs of a cluster combine rows in turn. Only powers of two divide a row block; with others, rows behind it must be behind the
// last of all.
bool divides_rows(int cluster, const AttentionProblem& p, const Config& config) {
  return std::has_single_bit(static_cast<unsigned>(cluster)) || rows_of_group(p) <= config.row_warps * 16;
}

// One launch instead of two, if a cluster for each row block of each key head fits the GPU at once. A CTA has an SM to
// itself, because two of a cluster on one SM would share its bandwidth. A cluster is inside a GPC, and GPCs have SMs to
// spare: of an H200's 132, clusters of four reach 120 at once, of six 102, and one cluster more takes twice the time.
// Sizes that are no powers of two are for one sequence: with several, which may differ in length, a balanced schedule is safer.
std::optional<Config> cluster_config(const AttentionProblem& p, const Device& device) {
  Config config = default_config(p, device);
  // The number of sequences decides, so that a result would depend on the rest of the batch.
  if (device.compute < 90 || config.stages == 1 || p.batch_invariant) return std::nullopt;
  const std::int64_t columns = saturating_product(p.batch, columns_of(p, config));
  const auto fit_at_once = [&](int cluster) {
    const bool even = std::has_single_bit(static_cast<unsigned>(cluster));
    return (even || p.batch == 1) && divides_rows(cluster, p, config) &&
           columns * cluster <= std::int64_t{device.multiprocessors} * (even ? 7 : 6) / 8;
  };
  config.cluster = kLargestCluster;
  while (config.cluster > 1 && !fit_at_once(config.cluster)) --config.cluster;
  config.box_rows = 0;
  const int keys = !p.fp8_cache ? 32 : config.dim_qk <= 128 && config.dim_v <= 128 ? 64 : 16;
  const int stages = p.fp8_cache || p.paged ? 2 : 3;
  config = with_boxes(
      first_that_fits(config, device, {{4, keys, stages, 1}, {4, keys, 2, 1}, {4, std::max(16, keys / 2), 2, 1}}), p,
      device);
  if (config.cluster == 1 || columns == 0 || !fits(config, device)) return std::nullopt;
  // A producer warp requests boxes sooner than all warps their rows, which counts if a CTA's tiles are few: as many as there
  // are stages, or one more. Longer rows are two boxes, each with half of their lines, which memory likes less.
  const bool few_tiles = tiles_of(p, config) <= std::int64_t{config.cluster} * (config.stages + 1);
  const bool one_box = config.dim_qk <= 64 && config.dim_v <= 64;
  Config boxes = config;
  if (few_tiles && one_box && config.box_rows == 0 && config.row_warps == 1 && !p.fp8_cache) {
    boxes.box_rows = box_rows_of(p, device, config.block_k);
  }
  return fits(boxes, device) ? boxes : config;
}

// One CTA for each row block of each key head, if that is one for each SM: more warps share its keys.
std::optional<Config> whole_config(const AttentionProblem& p, const Device& device) {
  const Config config = default_config(p, device);
  const int dim = std::max(config.dim_qk, config.dim_v);
  if (device.compute < 90 || p.batch_invariant || config.stages == 1) return std::nullopt;
  if (config.row_warps > 1 || dim < 64 || dim > 128) return std::nullopt;
  if (p.fp8_cache && (dim == 64 || config.box_rows > 0 || p.paged)) return std::nullopt;
  const std::int64_t blocks = saturating_product(p.batch, columns_of(p, config));
  if (blocks > device.multiprocessors || 10 * blocks < 9 * std::int64_t{device.multiprocessors}) return std::nullopt;
  Config whole = with_shape(config, p.fp8_cache ? Shape{8, 32, 2, 1} : Shape{8, 16, 3, 1});
  whole.box_rows = p.paged ? box_rows_of(p, device, whole.block_k) : 0;
  if (p.paged && whole.box_rows == 0) return std::nullopt;
  return fits(whole, device) ? std::optional(whole) : std::nullopt;
}

// A Config of another problem, which differs in numbers that this one may have as well.
bool is_valid(const Config& config, const AttentionProblem& p, const Device& device) {
  Config expected = default_config(p, device);
  if (engine::main_config(config) == engine::main_config(expected)) return true;
  if (p.batch_invariant || expected.stages == 1) return false;
  expected.block_k = config.block_k;
  expected.key_warps = config.key_warps;
  expected.stages = config.stages;
  expected.cluster = config.cluster;
  expected.ctas_per_sm = config.ctas_per_sm;
  expected.box_rows = config.box_rows == 0 ? 0 : box_rows_of(p, device, config.block_k);
  const int warps = config.row_warps * config.key_warps;
  return engine::main_config(config) == engine::main_config(expected) && warps >= 1 && warps <= 8 &&
         warps * config.ctas_per_sm <= 16 && config.block_k > 0 && config.block_k % (16 * config.key_warps) == 0 &&
         std::has_single_bit(static_cast<unsigned>(config.block_k)) && config.stages >= 2 && config.ctas_per_sm >= 1 &&
         config.cluster >= 1 && config.cluster <= kLargestCluster && (config.cluster == 1 || device.compute >= 90) &&
         divides_rows(config.cluster, p, config) && fits(config, device);
}

// What the tuner may try.
std::vector<Config> configs_for(const AttentionProblem& p, const Device& device) {
  std::vector<Config> list = {default_config(p, device)};
  if (const auto clusters = cluster_config(p, device)) list.push_back(*clusters);
  // A choice that depended on the batch would make the results depend on it.
  if (p.batch_invariant || list[0].stages == 1) return list;
  for (const int key_warps : {2, 4, 8}) {
    for (const int keys_per_warp : {16, 32, 64}) {
      if (keys_per_warp > 32 && !p.fp8_cache) continue;
      for (const int stages : {2, 3, 4}) {
        for (const int ctas_per_sm : {1, 2, 3}) {
          for (const int cluster : {1, 4, 8}) {
            Config config = with_shape(list[0], {key_warps, keys_per_warp, stages, ctas_per_sm});
            config.cluster = cluster;
            for (const bool boxes : {false, true}) {
              config.box_rows = boxes ? box_rows_of(p, device, config.block_k) : 0;
              if (boxes == (config.box_rows > 0) && is_valid(config, p, device)) list.push_back(config);
            }
          }
        }
      }
    }
  }
  return list;
}

// A grid that fills the GPU once, or less if even full caches have fewer units. If a few CTAs less let each have whole row
// blocks, or an equal part of one, it is so many: the heads of a sequence are then read in step, which the memory likes.
std::int64_t ctas_of(const AttentionProblem& p, const Config& config, int multiprocessors) {
  const std::int64_t most = std::int64_t{multiprocessors} * config.ctas_per_sm;
  const std::int64_t blocks = std::max<std::int64_t>(1, saturating_product(columns_of(p, config), p.batch));
  const std::int64_t even = blocks <= most ? most / blocks * blocks : ceil_div(blocks, ceil_div(blocks, most));
  return std::clamp<std::int64_t>(saturating_product(units_of(p, config), blocks), 1,
                                  10 * even >= 9 * most ? even : most);
}

int end_cost(const AttentionProblem& p, const Config& config, int multiprocessors) {
  const bool several = saturating_product(p.batch, columns_of(p, config)) >= ctas_of(p, config, multiprocessors);
  return several && !p.batch_invariant ? kEndCost : 0;
}

// No partial result is left: no sequence has more than one unit, or clusters combine theirs.
bool is_whole(const AttentionProblem& p, const Config& config) {
  return units_of(p, config) == 1 || config.cluster > 1;
}

struct Workspace {
  std::int64_t slots;  // partial results
  std::int64_t rows;   // of each

  Workspace(const AttentionProblem& p, const Config& config, int multiprocessors) : rows(config.row_warps * 16) {
    slots = is_whole(p, config) ? 0
            : p.batch_invariant ? saturating_product(p.batch, columns_of(p, config), units_of(p, config))
                                : 2 * ctas_of(p, config, multiprocessors);
  }
  std::int64_t bytes(const AttentionProblem& p) const { return saturating_product(slots, rows, (p.dim_v + 1) * 4); }
};

jit::KernelInstance main_kernel(const Config& config) {
  return {.name = format("attention_decode_{}_d{}x{}_k{}w{}x{}_s{}c{}{}{}{}{}{}{}{}", name_of(config.dtype),
                         config.dim_qk, config.dim_v, config.block_k, config.row_warps, config.key_warps, config.stages,
                         config.ctas_per_sm, config.cluster > 1 ? format("_cluster{}", config.cluster) : "",
                         config.box_rows > 0 ? format("_tma{}", config.box_rows) : "", config.paged ? "_paged" : "",
                         config.append ? "_append" : "",
                         config.key_scales   ? "_e4m3_key_scales"
                         : config.e4m3_cache ? "_e4m3"
                                             : "",
                         config.score_mod ? "_score_mod" : "", config.vector == 1 ? "_v1" : ""),
          .header = "attention/decode.cuh",
          .entry = "attention_decode",
          .params = "AttentionDecodeParams",
          .config = jit::config_text("AttentionDecodeConfig", config),
          .threads = (config.row_warps * config.key_warps + (config.box_rows > 0 ? 1 : 0)) * 32,
          .min_blocks = config.ctas_per_sm,
          .dynamic_smem_bytes = decode_shared_bytes(config),
          .pdl = true,
          .cluster = config.cluster};
}

jit::KernelInstance combine_kernel(const Config& main) {
  const DecodeCombineConfig config = {.dtype = main.dtype, .dim_v = main.dim_v, .threads = kCombineThreads};
  return {.name = format("decode_combine_{}_d{}", name_of(config.dtype), config.dim_v),
          .header = "attention/decode_combine.cuh",
          .entry = "decode_combine",
          .params = "DecodeCombineParams",
          .config = jit::config_text("DecodeCombineConfig", config),
          .threads = config.threads,
          .min_blocks = kCombineCtas,
          .pdl = true};
}

DecodeSchedule schedule_of(const Config& config, const AttentionArgs& args, int multiprocessors) {
  const AttentionProblem& p = args.problem;
  // New keys are refused if the table, in device memory, has no page for them.
  const bool from_host = !args.cache_seqlens && !args.leftpad_k && !args.cache_batch_idx && !args.rotary_seqlens &&
                         !(p.paged && p.seq_new > 0);
  return {.cache_seqlens = args.cache_seqlens,
          .leftpad_k = args.leftpad_k,
          .cache_batch_idx = args.cache_batch_idx,
          .rotary_seqlens = args.rotary_seqlens,
          .page_table = args.page_table,
          .page_table_stride = args.page_table_stride,
          .batch = static_cast<int>(p.batch),
          .columns = static_cast<int>(columns_of(p, config)),
          .seq_q = divisor(static_cast<unsigned>(p.seq_q)),
          .capacity = static_cast<int>(p.seq_k),
          .cache_rows = static_cast<int>(std::min<std::int64_t>(p.cache_rows, INT_MAX)),
          .seq_new = static_cast<int>(p.seq_new),
          .rotary_rows = p.rotary_dim > 0 ? static_cast<int>(std::min<std::int64_t>(p.rotary_rows, kUnbounded)) : 0,
          .page_size = divisor(static_cast<unsigned>(std::max<std::int64_t>(1, p.page_size))),
          .num_pages = static_cast<int>(std::min<std::int64_t>(p.num_pages, INT_MAX)),
          .tile_shift = std::countr_zero(static_cast<unsigned>(config.block_k)),
          .unit_shift = std::countr_zero(static_cast<unsigned>(unit_tiles(p, config))),
          .every_unit = p.batch_invariant ? 1 : 0,
          .most_units = static_cast<int>(units_of(p, config)),
          .end_cost = end_cost(p, config, multiprocessors),
          .equal = from_host || p.batch == 1 ? 1 : 0,
          .from_host = from_host ? 1 : 0,
          .ctas = divisor(static_cast<unsigned>(ctas_of(p, config, multiprocessors))),
          .band = band_of(p)};
}

// In 16-bit columns: a row of e4m3 has two values in each.
TensorView in_columns(TensorView cache, bool e4m3) {
  if (e4m3) {
    cache.batch_stride /= 2;
    cache.seq_stride /= 2;
    cache.head_stride /= 2;
  }
  return cache;
}

AttentionDecodeParams main_params(const Config& config, const AttentionArgs& args, const DecodeSchedule& schedule) {
  const AttentionProblem& p = args.problem;
  AttentionDecodeParams params = {};
  params.schedule = schedule;
  params.q = args.q.data;
  params.k = args.k.data;
  params.v = args.v.data;
  fill_outputs(params, args);
  params.k_new = args.k_new.data;
  params.v_new = args.v_new.data;
  params.rotary_cos = args.rotary_cos;
  params.rotary_sin = args.rotary_sin;
  params.status = args.status;
  params.alibi_slopes = args.alibi_slopes;
  params.q_strides = strides_of(args.q);
  params.k_strides = strides_of(in_columns(args.k, p.fp8_cache));
  params.v_strides = strides_of(in_columns(args.v, p.fp8_cache));
  params.k_scale = args.k_scale.data;
  params.v_scale = args.v_scale.data;
  const std::int64_t of_key = p.cache_scales == CacheScales::kPerToken ? 1 : 0;
  params.k_scale_strides = {args.k_scale.batch_stride, of_key, args.k_scale.head_stride};
  params.v_scale_strides = {args.v_scale.batch_stride, of_key, args.v_scale.head_stride};
  params.k_new_strides = strides_of(args.k_new);
  params.v_new_strides = strides_of(args.v_new);
  params.rotary_cos_stride = args.rotary_cos_stride;
  params.rotary_sin_stride = args.rotary_sin_stride;
  params.alibi_batch_stride = args.alibi_batch_stride;
  params.rotary_dim = static_cast<int>(p.rotary_dim);
  params.rotary_interleaved = p.rotary_interleaved ? 1 : 0;
  params.rotary_advances = is_masked(p) ? 1 : 0;
  params.group = static_cast<int>(p.heads_q / p.heads_kv);
  params.rows = rows_of_group(p);
  params.row_blocks = divisor(static_cast<unsigned>(ceil_div(params.rows, config.row_warps * 16)));
  params.scale = p.scale;
  params.softcap = p.softcap;
  return params;
}

Status encode_boxes(const TensorView& view, const TensorExtents& extents, int rows, AtomMaps& maps) {
  AtomBoxes boxes;
  constexpr int kMinAtom = 16;
  if (Status s = atom_boxes(view, extents, rows, kMinAtom, boxes); !s.ok()) return s;
  for (cuda::TensorBox& box : boxes) box.promotes = false;  // the neighbouring bytes are another key head's
  return encode_all(boxes, maps);
}

Status enqueue(const Config& config, const AttentionArgs& args, const engine::Launch& launch) {
  const AttentionProblem& p = args.problem;
  if (p.batch == 0 || p.seq_q == 0) return {};
  const int multiprocessors = launch.kernels[0]->multiprocessors;
  const Workspace workspace(p, config, multiprocessors);
  AttentionDecodeParams params = main_params(config, args, schedule_of(config, args, multiprocessors));
  params.o_partial = static_cast<float*>(launch.workspace);
  params.lse_partial = params.o_partial + workspace.slots * workspace.rows * p.dim_v;
  const std::int64_t ctas =
      config.cluster > 1 ? p.batch * params.schedule.columns * config.cluster : ctas_of(p, config, multiprocessors);
  if (config.box_rows > 0) {
    // The driver makes tensor maps only if a context is current.
    const auto scope = cuda::ContextScope::enter(launch.kernels[0]->device);
    if (!scope.ok()) return scope.status();
    const std::int64_t rows = p.paged ? p.num_pages : p.cache_rows, keys = p.paged ? p.page_size : p.seq_k;
    const auto encode = [&](const TensorView& cache, int dim, AtomMaps& maps) {
      return encode_boxes(in_columns(cache, p.fp8_cache),
                          {rows, keys, p.heads_kv, decode_columns(config, dim), false, 0}, config.box_rows, maps);
    };
    Status s = encode(args.k, config.dim_qk, params.k_maps);
    if (s.ok()) s = encode(args.v, config.dim_v, params.v_maps);
    if (!s.ok()) return s;
  }
  const cuda::Grid grid{static_cast<unsigned>(ctas), 1, 1};
  Status status = cuda::launch(*launch.kernels[0], cuda::Work<AttentionDecodeParams>{params, grid}, launch.stream);
  // At equal lengths, CTAs that have whole row blocks leave no partial result either.
  const bool whole_blocks =
      params.schedule.from_host == 1 && !p.batch_invariant && p.batch * params.schedule.columns % ctas == 0;
  if (!status.ok() || whole_blocks || is_whole(p, config)) return status;

  DecodeCombineParams combine = {};
  combine.schedule = params.schedule;
  combine.o_partial = params.o_partial;
  combine.lse_partial = params.lse_partial;
  fill_outputs(combine, args);
  combine.rows_per_block = config.row_warps * 16;
  combine.rows = params.rows;
  combine.row_blocks = params.row_blocks;
  combine.group = params.group;
  // All CTAs should fit the GPU at once, so that they wait for the main kernel's end and nothing else. With several rows
  // to a CTA, a row's parts are added up in another order: not if the result must not depend on the batch.
  const int rows = std::min(combine.rows, combine.rows_per_block);
  const std::int64_t columns = p.batch * params.schedule.columns;
  const int groups = kCombineThreads / static_cast<int>(p.dim_v / 4);
  combine.rows_together = 1;
  while (!p.batch_invariant && 2 * combine.rows_together <= std::min(rows, groups) &&
         columns * ceil_div(rows, combine.rows_together) > std::int64_t{kCombineCtas} * multiprocessors) {
    combine.rows_together *= 2;
  }
  const cuda::Grid grid_of_rows{static_cast<unsigned>(columns),
                                static_cast<unsigned>(ceil_div(rows, combine.rows_together)), 1};
  return cuda::launch(*launch.kernels[1], cuda::Work<DecodeCombineParams>{combine, grid_of_rows}, launch.stream);
}

std::optional<std::string> refuses(const AttentionProblem& p, const Device& device) {
  if (auto reason = gpu_refuses(p, device)) return reason;
  if (p.varlen) return "takes queries of one length";
  if (p.fp8_cache && device.compute < 89) return "a cache of e4m3 needs sm_89 or newer";
  if (p.fp8_cache && (p.dim_qk % 16 != 0 || p.dim_v % 16 != 0 || !p.vectors)) {
    return "a cache of e4m3 needs head dims that are multiples of 16, and rows at multiples of 16 bytes";
  }
  const Config config = default_config(p, device);
  if (p.batch > INT_MAX || p.heads_q > INT_MAX ||
      p.heads_q / p.heads_kv > INT_MAX / std::max<std::int64_t>(1, p.seq_q) || p.page_size > INT_MAX ||
      p.seq_new > INT_MAX ||
      saturating_product(p.batch, units_of(p, config) + kEndCost, columns_of(p, config)) > INT_MAX) {
    return "more rows than one grid can cover";
  }
  if (!fits(config, device)) return format("head dims {} and {} need more shared memory", p.dim_qk, p.dim_v);
  return std::nullopt;
}

// Microseconds, roughly, as measured on an H200 with 132 SMs: K and V once, by as many SMs as have work, from the L2
// cache if they fit; and one launch or two.
double predicted_time(const AttentionProblem& p, const Config& config, const Device& device) {
  constexpr double kLaunch = 4.3;
  constexpr double kCombine = 2.7;
  constexpr double kCached = 4.0e7;  // bytes
  constexpr double kMemory = 3.4e4;  // bytes per microsecond, of all SMs' share of the memory
  const double key_bytes = (p.fp8_cache ? 1.0 : 2.0) * static_cast<double>(p.dim_qk + p.dim_v) +
                           (p.cache_scales == CacheScales::kPerToken ? 8.0 : 0.0);
  const double bytes =
      static_cast<double>(p.batch) * static_cast<double>(p.seq_k) * static_cast<double>(p.heads_kv) * key_bytes;
  // Of an SM. Sequences of a batch may differ in length, and clusters would then wait for the longest.
  const double rate = bytes < kCached ? 5.5e4 : p.batch == 1 ? 4.1e4 : kMemory;
  const std::int64_t clusters = saturating_product(p.batch, columns_of(p, config), config.cluster);
  const std::int64_t busy =
      config.cluster > 1 ? std::min<std::int64_t>(clusters, device.multiprocessors) : device.multiprocessors;
  // With many queries the products take longer than the memory: 64 rows at a time, at a third of the portable forward's rate.
  const double scores = computed_scores(p, 64, config.block_k).all * static_cast<double>(p.batch * p.heads_q);
  const double products =
      p.seq_q < 64 ? 0
                   : scores / (0.35 * portable_rate(device) * 64.0 / static_cast<double>(std::max(p.dim_qk, p.dim_v)));
  const double from_memory = bytes < kCached ? 0 : bytes / (kMemory * static_cast<double>(device.multiprocessors));
  return kLaunch + (is_whole(p, config) ? 0 : kCombine) +
         std::max({bytes / (rate * static_cast<double>(busy)), from_memory, products});
}

engine::Offer offer_of(const AttentionProblem& p, const Config& config, const Device& device) {
  const auto bytes = static_cast<std::size_t>(Workspace(p, config, device.multiprocessors).bytes(p));
  const std::string why = config.cluster > 1 ? format("clusters of {} CTAs share a sequence's keys", config.cluster)
                                             : format("{} CTAs share the keys in tiles of {}",
                                                      ctas_of(p, config, device.multiprocessors), config.block_k);
  return {engine::main_config(config), bytes, predicted_time(p, config, device), why};
}

std::vector<engine::Offer> offers(const AttentionProblem& p, const Device& device) {
  std::vector<engine::Offer> offers;
  if (const auto whole = whole_config(p, device)) offers.push_back(offer_of(p, *whole, device));  // as fast or faster
  offers.push_back(offer_of(p, default_config(p, device), device));
  if (const auto clusters = cluster_config(p, device)) offers.push_back(offer_of(p, *clusters, device));
  return offers;
}

std::optional<Recipe> recipe(const AttentionProblem& p, const Device& device, const engine::Config& named) {
  const auto config = engine::from_main<Config>(named);
  if (!config) return std::nullopt;
  if (!is_valid(*config, p, device)) return std::nullopt;
  Recipe recipe;
  recipe.problem = p;
  if (config->box_rows == 0) recipe.problem.tensor_maps = false;
  recipe.steps = {{"main", main_kernel(*config)}};
  if (!is_whole(p, *config)) recipe.steps.push_back({"combine", combine_kernel(*config)});
  recipe.workspace = static_cast<std::size_t>(Workspace(p, *config, device.multiprocessors).bytes(p));
  recipe.enqueue = [config = *config](const AttentionArgs& args, const engine::Launch& launch) {
    return enqueue(config, args, launch);
  };
  return recipe;
}

std::vector<engine::Config> searches(const AttentionProblem& p, const Device& device) {
  std::vector<engine::Config> list;
  for (const Config& config : configs_for(p, device)) list.push_back(engine::main_config(config));
  return list;
}

// Where registers and shared memory are scarce or change: 4 rows; 4 and 64 with pages, new keys and a score_mod.
std::vector<AttentionProblem> representatives(const Device& device) {
  std::vector<AttentionProblem> list;
  const auto add = [&](int dim, int group, bool with_everything, bool fp8_cache = false, bool key_scales = false) {
    AttentionProblem p = representative(device, AttentionOp::kDecode, dim, dim);
    p.seq_q = 1;
    p.heads_kv = 8;
    p.heads_q = group * p.heads_kv;
    p.alignment = Alignment::kBottomRight;
    p.fp8_cache = fp8_cache;
    if (key_scales) p.cache_scales = CacheScales::kPerToken;
    if (with_everything) {
      p.paged = true;
      p.page_size = 16;
      p.num_pages = 256;
      p.softcap = 30.0f;
      p.seq_new = 1;
    }
    list.push_back(p);
  };
  add(128, 4, false);
  if (device.compute >= 89) {
    add(128, 4, true, true);
    add(128, 4, true, true, true);
  }
  if (device.compute == 89) return list;  // the rest is the same code as sm_86's
  if (device.compute == 90) {
    for (const int dim : {64, 80, 128, 256}) add(dim, 4, false, true);
    add(128, 4, false, true);
    list.back().batch = 16;
    add(128, 64, true, true);
    for (const int dim : {64, 128, 256}) add(dim, 4, false, true, true);
    add(128, 4, false, true, true);
    list.back().batch = 16;
    add(128, 64, true, true, true);
    add(128, 4, true);
    list.back().batch = 16;
  }
  for (const int dim : {64, 80, 256}) add(dim, 4, false);
  add(128, 4, false);
  list.back().batch = 16;
  for (const int dim : {128, 256}) {
    for (const int group : {4, 64}) add(dim, group, true);
  }
  add(40, 4, false);
  list.back().vectors = list.back().tensor_maps = false;
  return list;
}

}  // namespace

Implementation decode() {
  return {"attention_decode",
          AttentionFamily::bit_of(AttentionOp::kDecode),
          {"attention/decode.cuh", "attention/decode_combine.cuh"},
          refuses,
          offers,
          recipe,
          searches,
          representatives};
}

}  // namespace tessera::attention
