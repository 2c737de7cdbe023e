// Attention forward on Hopper (kernels/attention/forward_sm90.cuh).
#include "attention/forward_sm90.h"

#include <algorithm>
#include <climits>
#include <cmath>
#include <numeric>
#include <optional>
#include <utility>

#include "attention/cache_append.h"
#include "attention/family.h"
#include "attention/gpu.h"
#include "attention/params.h"
#include "base/format.h"
#include "cuda/tensor_map.h"
#include "jit/config_text.h"

namespace tessera::attention {
namespace {

using Config = AttentionForwardSm90Config;

// Fields of the Config by the same names. consumers 0: there is no such tile.
struct ForwardSm90Tile {
  int consumers;
  int block_k;
  int stages;
  int q_stages;
  int ctas_per_sm;
  int min_atom;
  bool ping_pong;
};

// Scores (block_k / 2 registers a thread), probabilities (half of that) and the output (dim_v / 2) live at once, in 232
// registers with two consumers and in 160 with three. Three are faster if they fit.
constexpr ForwardSm90Tile forward_sm90_tile(int dim_qk, int dim_v, bool score_mod) {
  const int dim = dim_qk > dim_v ? dim_qk : dim_v;
  if (score_mod) return {2, dim <= 128 ? 112 : dim <= 192 ? 80 : 64, 2, 1, 1, 64, true};
  if (dim <= 64) return {3, 128, 4, 2, 1, 64, true};
  if (dim <= 80) return {3, 112, 3, 2, 1, 16, true};
  if (dim <= 96) return {3, 96, 3, 2, 1, 16, true};
  if (dim <= 128) return {3, 80, 3, 2, 1, 64, true};
  if (dim <= 192) return {2, dim_v <= 128 ? 128 : 96, 2, 1, 1, 64, true};
  return {2, 64, 2, 1, 1, 64, true};
}

// For hundreds of keys: small key tiles compute fewer scores that are not needed.
constexpr std::int64_t kShortTile = 768;  // up to which it is offered with the dynamic scheduler
constexpr ForwardSm90Tile short_forward_sm90_tile(int dim_qk, int dim_v, bool score_mod) {
  const int dim = dim_qk > dim_v ? dim_qk : dim_v;
  if (score_mod || dim > 128) return {};
  return {3, 64, dim <= 64 ? 6 : 4, 2, 1, dim <= 64 || dim > 96 ? 64 : 16, false};
}

// Two CTAs per SM, for some hundred tiles of queries: all start at once, and one loads while the other computes. Timed
// at head dim 64, as is the next one.
constexpr ForwardSm90Tile paired_forward_sm90_tile(int dim_qk, int dim_v, bool score_mod) {
  const int dim = dim_qk > dim_v ? dim_qk : dim_v;
  if (score_mod || dim > 64 || dim <= 48) return {};
  return {2, 48, 3, 1, 2, 64, false};
}

// For few queries, which would leave rows of a larger tile empty. Above head dim 64 it is offered to short sequences only.
constexpr std::int64_t kShort = 64;
constexpr ForwardSm90Tile small_forward_sm90_tile(int dim_qk, int dim_v, bool score_mod) {
  const int dim = dim_qk > dim_v ? dim_qk : dim_v;
  if (score_mod || dim > 128 || dim <= 48) return {};
  if (dim <= 64) return {1, 64, 3, 2, 3, 64, false};
  return {1, 64, 2, 2, dim <= 96 ? 3 : 2, dim <= 96 ? 16 : 64, false};
}

// For sequences that fit a tile of 32 keys.
constexpr std::int64_t kTiny = 32;
constexpr ForwardSm90Tile tiny_forward_sm90_tile(int dim_qk, int dim_v, bool score_mod) {
  const int dim = dim_qk > dim_v ? dim_qk : dim_v;
  if (score_mod || dim > 128) return {};
  return {1, 32, 2, 2, dim <= 96 ? 4 : 2, dim <= 64 || dim > 96 ? 64 : 16, false};
}

// For keys that are one tile. Little overlaps within a CTA, so that four share an SM: 96 registers a thread suffice, because
// O is computed when S is no longer needed.
constexpr std::int64_t kFewKeys = 64, kFewKeysDim = 64;
ForwardSm90Tile few_keys_forward_sm90_tile(std::int64_t seq_k) {
  return {1, static_cast<int>(ceil_div(seq_k, 16) * 16), 2, 2, 4, 64, false};
}

// For fewer tiles of queries than SMs: consumers share a tile (intra-CTA split), with two stages each.
constexpr ForwardSm90Tile split_forward_sm90_tile(int dim_qk, int dim_v, bool score_mod) {
  const int dim = dim_qk > dim_v ? dim_qk : dim_v;
  if (dim <= 64) return {2, score_mod ? 64 : 128, 4, 2, 1, 64, false};
  if (dim <= 96 && !score_mod) return {3, 64, 6, 1, 1, 16, false};
  if (dim <= 128) return {2, score_mod ? 64 : 80, 4, 1, 1, 64, false};
  return {};
}

Config with_tile(Config config, const ForwardSm90Tile& tile) {
  config.consumers = tile.consumers;
  config.block_k = tile.block_k;
  config.stages = tile.stages;
  config.q_stages = tile.q_stages;
  config.ctas_per_sm = tile.ctas_per_sm;
  config.min_atom = tile.min_atom;
  config.ping_pong = tile.ping_pong;
  return config;
}
}  // namespace

std::vector<AttentionForwardSm90Config> forward_sm90_configs(DType dtype, int dim_qk, int dim_v, bool masked,
                                                             bool score_mod, std::int64_t longest) {
  Config of_problem = {};
  of_problem.dtype = dtype;
  of_problem.dim_qk = dim_qk;
  of_problem.dim_v = dim_v;
  of_problem.masked = masked;
  of_problem.score_mod = score_mod;
  std::vector<AttentionForwardSm90Config> configs;
  const auto add = [&](const ForwardSm90Tile& tile, bool dynamic_scheduler, bool intra_cta_split) {
    if (tile.consumers == 0) return;
    Config& config = configs.emplace_back(with_tile(of_problem, tile));
    config.dynamic_scheduler = dynamic_scheduler;
    config.intra_cta_split = intra_cta_split;
  };
  add(forward_sm90_tile(dim_qk, dim_v, score_mod), false, false);
  if (masked || std::max(dim_qk, dim_v) > 128) add(forward_sm90_tile(dim_qk, dim_v, score_mod), true, false);
  add(short_forward_sm90_tile(dim_qk, dim_v, score_mod), false, false);
  if (longest <= kShortTile && std::max(dim_qk, dim_v) > 96)
    add(short_forward_sm90_tile(dim_qk, dim_v, score_mod), true, false);
  add(paired_forward_sm90_tile(dim_qk, dim_v, score_mod), false, false);
  if (longest <= kShort || std::max(dim_qk, dim_v) <= 64) {
    add(small_forward_sm90_tile(dim_qk, dim_v, score_mod), false, false);
  }
  if (longest <= kTiny) add(tiny_forward_sm90_tile(dim_qk, dim_v, score_mod), false, false);
  add(split_forward_sm90_tile(dim_qk, dim_v, score_mod), false, true);
  return configs;
}

Result<ForwardSm90Boxes> forward_sm90_boxes(const AttentionArgs& args, const AttentionForwardSm90Config& config) {
  const AttentionProblem& p = args.problem;
  const std::int64_t pack_gqa = config.pack_gqa ? p.heads_q / p.heads_kv : 0;
  Result<ForwardSm90Boxes> boxes(std::in_place);
  Status s = atom_boxes(args.q, query_extents(p, p.dim_qk), block_q_of(config), config.min_atom, boxes->q, pack_gqa);
  const int rows = config.page_box > 0 ? config.page_box : config.block_k;
  const auto extents = [&](const TensorView& view, std::int64_t dim) {
    return config.cache ? cache_extents(p, view, dim) : key_extents(p, dim);
  };
  if (s.ok()) s = atom_boxes(args.k, extents(args.k, p.dim_qk), rows, config.min_atom, boxes->k);
  if (s.ok()) s = atom_boxes(args.v, extents(args.v, p.dim_v), rows, config.min_atom, boxes->v);
  if (config.page_box > 0) {
    if (s.ok()) s = atom_boxes(args.k, extents(args.k, p.dim_qk), 1, config.min_atom, boxes->k_rows);
    if (s.ok()) s = atom_boxes(args.v, extents(args.v, p.dim_v), 1, config.min_atom, boxes->v_rows);
  }
  if (!s.ok()) boxes = std::move(s);
  return boxes;
}

namespace {

// If a mask makes long and short tiles, those that are worked on together should be several times as many as CTAs: the
// longest tiles of the last columns start late otherwise, and the other CTAs wait for them. For that, K and V may exceed
// the L2 cache by half. Timed above head dim 128, where K and V of few heads fit the cache; 512 keys lose 12 % by it.
//
// Without a mask they should be as few as occupy the CTAs. Each column is first read from memory when its first tile
// starts, so that those that fit the cache, 32 MB, would all arrive in the first of their rounds, which at 512 keys takes
// 8 us, and nothing but Q in the next ones.
unsigned forward_columns_together(const AttentionProblem& p, std::int64_t columns, std::int64_t bytes,
                                  std::int64_t group, std::int64_t q_tiles, std::int64_t ctas) {
  constexpr std::int64_t kTilesPerCta = 3;
  constexpr std::int64_t kLongKeys = 2048;
  constexpr std::int64_t kMostBytes = std::int64_t{72} << 20;
  const unsigned by_cache = columns_together(columns, bytes, group);
  const std::int64_t tiles = std::max<std::int64_t>(q_tiles, 1);
  if (!is_masked(p)) {
    const std::int64_t few = ceil_div(ceil_div(ctas, tiles), group) * group;
    return p.seq_k > kLongKeys ? by_cache : static_cast<unsigned>(std::min<std::int64_t>(by_cache, few));
  }
  if (std::max(p.dim_qk, p.dim_v) <= 128 || p.seq_k < kLongKeys) return by_cache;
  const std::int64_t wanted = ceil_div(kTilesPerCta * ctas, tiles);
  const std::int64_t most = std::max<std::int64_t>(1, kMostBytes / std::max<std::int64_t>(bytes, 1)) * group;
  const std::int64_t least = std::min(wanted, most);
  if (least <= by_cache) return by_cache;
  const std::int64_t rounds = std::max<std::int64_t>(1, columns / least);
  return static_cast<unsigned>(std::min(columns, ceil_div(ceil_div(columns, rounds), group) * group));
}

}  // namespace

Result<cuda::Work<AttentionForwardSm90Params>> forward_sm90_work(const AttentionArgs& args,
                                                                 const AttentionForwardSm90Config& config,
                                                                 int multiprocessors) {
  Result<cuda::Work<AttentionForwardSm90Params>> work(std::in_place);
  const AttentionProblem& p = args.problem;
  const std::int64_t heads_a_key = p.heads_q / p.heads_kv;
  const std::int64_t heads = config.pack_gqa ? p.heads_kv : p.heads_q;
  const std::int64_t group = config.pack_gqa ? 1 : heads_a_key;  // columns that share keys
  const std::int64_t q_tiles = ceil_div(p.seq_q * (config.pack_gqa ? heads_a_key : 1), block_q_of(config));
  const std::int64_t columns = p.batch * heads;
  const std::int64_t tiles = saturating_product(q_tiles, p.batch, heads);
  if (tiles > INT_MAX) {
    work = Status(TESSERA_UNSUPPORTED, "attention_forward_sm90: more rows than one grid can cover");
    return work;
  }
  const std::int64_t head_bytes = saturating_product(p.seq_k, p.dim_qk + p.dim_v, 2);
  AttentionForwardSm90Params& params = work->params;
  fill_problem(params, args);
  fill_outputs(params, args);
  params.q_tiles = static_cast<unsigned>(q_tiles);
  params.columns = static_cast<unsigned>(columns);
  const std::int64_t ctas = std::int64_t{multiprocessors} * config.ctas_per_sm;
  params.together = divisor(forward_columns_together(p, columns, head_bytes, group, q_tiles, ctas));
  params.by_heads = divisor(static_cast<unsigned>(heads));
  params.by_group = divisor(params.group);
  if (config.cache) params.cache = kv_cache_of(args);
  if (config.cache && config.page_box == 0) {
    params.k_pitch = static_cast<int>(cache_pitch(p, args.k));
    params.v_pitch = static_cast<int>(cache_pitch(p, args.v));
  }
  work->grid = {static_cast<unsigned>(std::min(tiles, ctas)), 1, 1};
  return work;
}

bool can_pack_gqa(const AttentionProblem& problem, const AttentionForwardSm90Config& config) {
  const std::int64_t group = problem.heads_q / problem.heads_kv;
  return group > 1 && block_q_of(config) % group == 0 && !config.score_mod &&
         saturating_product(problem.seq_q, group, 1) <= INT_MAX - block_q_of(config);
}

namespace {

jit::KernelInstance main_kernel(const Config& config) {
  return {
      .name = format("attention_forward_sm90_{}_d{}x{}_{}x{}{}{}{}{}{}{}{}{}{}", name_of(config.dtype), config.dim_qk,
                     config.dim_v, block_q_of(config), config.block_k, config.intra_cta_split ? "_split" : "",
                     config.few_keys ? "_few_keys" : "", config.pack_gqa ? "_pack_gqa" : "",
                     config.masked ? "_masked" : "", config.score_mod ? "_score_mod" : "",
                     config.dynamic_scheduler ? "_dynamic" : "", config.chunked ? "_chunked" : "",
                     config.cache ? "_cache" : "", config.page_box > 0 ? format("_page{}", config.page_box) : ""),
      .header = "attention/forward_sm90.cuh",
      .entry = "attention_forward_sm90",
      .params = "AttentionForwardSm90Params",
      .config = jit::config_text("AttentionForwardSm90Config", config),
      .threads = threads_of(config),
      .min_blocks = config.ctas_per_sm,
      .dynamic_smem_bytes = forward_sm90_layout(config).bytes,
      .pdl = true};
}

constexpr std::size_t kCounterBytes = 256;  // so that what follows is aligned

std::size_t workspace_of(const AttentionProblem& p, const Config& config) {
  const std::size_t appended = append_workspace(p);
  return config.dynamic_scheduler ? appended > 0 ? kCounterBytes + appended : sizeof(unsigned) : appended;
}

Status enqueue(const Config& config, const AttentionArgs& given, const engine::Launch& launch) {
  const bool appends = given.problem.seq_new > 0;
  const cuda::Kernel& kernel = *launch.kernels[appends ? 1 : 0];
  if (given.problem.batch == 0 || given.problem.seq_q == 0) return {};
  if (config.dynamic_scheduler) {
    if (Status s = cuda::zero(kernel.device, launch.workspace, sizeof(unsigned), launch.stream); !s.ok()) return s;
  }
  std::optional<AttentionArgs> appended;
  if (appends) {
    char* const rest = static_cast<char*>(launch.workspace) + (config.dynamic_scheduler ? kCounterBytes : 0);
    Status s = enqueue_append(*launch.kernels[0], appended.emplace(given), rest, launch.stream);
    if (!s.ok()) return s;
  }
  const AttentionArgs& args = appended ? *appended : given;
  auto work = forward_sm90_work(args, config, kernel.multiprocessors);
  if (!work.ok()) return work.status();
  const auto boxes = forward_sm90_boxes(args, config);
  if (!boxes.ok()) return boxes.status();
  // The driver makes tensor maps only if a context is current.
  const auto scope = cuda::ContextScope::enter(kernel.device);
  if (!scope.ok()) return scope.status();
  if (Status s = encode_all(boxes->q, work->params.q); !s.ok()) return s;
  if (Status s = encode_all(boxes->k, work->params.k); !s.ok()) return s;
  if (Status s = encode_all(boxes->v, work->params.v); !s.ok()) return s;
  if (Status s = encode_all(boxes->k_rows, work->params.k_rows); !s.ok()) return s;
  if (Status s = encode_all(boxes->v_rows, work->params.v_rows); !s.ok()) return s;
  if (config.dynamic_scheduler) work->params.tile_counter = static_cast<unsigned*>(launch.workspace);
  return cuda::launch(kernel, *work, launch.stream);
}

std::optional<std::string> refuses(const AttentionProblem& p, const Device& device) {
  if (auto reason = gpu_refuses(p, device)) return reason;
  if (auto reason = cache_refuses(p)) return reason;
  if (auto reason = hopper_refuses(p, device)) return reason;
  const bool packed_keys = p.varlen && p.op != AttentionOp::kDecode;
  if (p.seq_k == 0 || (packed_keys && p.total_k == 0)) return "there are no keys to load";
  // Key 0 must be the first row of a page, so that boxes lie within pages.
  if (p.paged && p.leftpad) return "takes left padding of a contiguous cache, not of pages";
  if (p.paged && p.page_size % 8 != 0) return format("pages have a multiple of 8 keys, not {}", p.page_size);
  return std::nullopt;
}

// Rows of a column of tiles: queries, or with packed GQA all heads of each.
std::int64_t rows_of(const AttentionProblem& p, const Config& config) {
  return config.pack_gqa ? p.seq_q * (p.heads_q / p.heads_kv) : p.seq_q;
}

ComputedScores scores_of(const AttentionProblem& p, const Config& config) {
  if (!config.pack_gqa) return computed_scores(p, block_q_of(config), config.block_k);
  const auto group = static_cast<int>(p.heads_q / p.heads_kv);
  const ComputedScores one = computed_scores(p, block_q_of(config) / group, config.block_k);
  return {one.all * group, one.of_longest * group};
}

// Microseconds, roughly: measured on an H200 and scaled by the head dim.
double predicted_time(const AttentionProblem& p, const Config& config, const Device& device,
                      const ComputedScores& computed) {
  constexpr double kMerge = 0.3;  // of the results of consumers that share rows
  // With one key tile there is little else than the start and the end of a work tile, which many CTAs overlap.
  const double overlap = p.seq_k <= config.block_k && config.ctas_per_sm > 2 ? 0.6 : 1.0;
  const double each_tile = 2.0 * overlap + (config.intra_cta_split ? kMerge : 0.0);  // us, without its scores
  // Scores per microsecond of the whole GPU, at head dim 64.
  const int best_step = forward_sm90_tile(config.dim_qk, config.dim_v, config.score_mod).block_k;
  const double alone = config.block_k < best_step ? 2.1e6 : 2.2e6;
  const double several = config.consumers > 1 ? 1.55e6 : 1.4e6;
  const double rate = config.ctas_per_sm > 1 ? several : alone;
  const double columns = static_cast<double>(p.batch) * static_cast<double>(config.pack_gqa ? p.heads_kv : p.heads_q);
  const double tiles = columns * static_cast<double>(ceil_div(rows_of(p, config), block_q_of(config)));
  // A CTA that has an SM to itself is not slowed by others.
  const double ctas =
      std::clamp(std::ceil(tiles / device.multiprocessors), 1.0, static_cast<double>(config.ctas_per_sm));
  const double slots = device.multiprocessors * ctas;
  const double rounds = std::ceil(tiles / slots);
  const double slot_rate = rate / slots * 64.0 / static_cast<double>(std::max(p.dim_qk, p.dim_v));
  // The end of a tile and the start of the next overlap in part.
  const double by_work = rounds * computed.all * columns / std::max(tiles, 1.0) / slot_rate +
                         each_tile * (1.0 + 0.6 * std::max(0.0, rounds - 1.0));
  const double by_longest = computed.of_longest / slot_rate + each_tile;
  // A mask makes long and short tiles. The dynamic scheduler balances them, but its counter must be zeroed first.
  // Several CTAs per SM balance them too, and short tiles need no balancing. The fewer rounds there are, the longer the
  // tiles must be for the balance to be worth it.
  const std::int64_t tile_work = p.seq_k * std::max(p.dim_qk, p.dim_v);
  const bool dynamic_pays = rounds > 4 ? tile_work > 96 * 1024 : rounds > 1 && tile_work > 768 * 1024;
  // Without a mask, it gained 4 to 7 % at head dim 256 and 512 keys. The tile for short sequences gained 1 % by it at head
  // dim 128, and 3 % with a mask.
  const std::int64_t dim = std::max(p.dim_qk, p.dim_v);
  const bool is_short = dim > 96 && dim <= 128 && std::max(p.seq_q, p.seq_k) <= kShortTile && config.consumers == 3 &&
                        !config.ping_pong && !config.intra_cta_split;
  const bool dynamic_wanted =
      config.masked ? dynamic_pays || (is_short && rounds > 4) : rounds > 4 && tile_work <= 256 * 1024;
  const bool even = config.ctas_per_sm > 1 || config.dynamic_scheduler == dynamic_wanted;
  const double imbalance = even || (!config.masked && dim <= 128 && !is_short) ? 1.0 : 1.05;
  // With an intra-CTA split, all consumers wait during a tile's start and end. If there are enough tiles, each consumer
  // should have its own.
  const double shared_rows = config.intra_cta_split && rounds > 1 ? 1.5 : 1.0;
  // With so few rows a tile of 64 is nearly empty: the portable kernel is faster and more accurate.
  constexpr std::int64_t kFewRows = 16;
  const double few_rows = !config.pack_gqa && p.seq_q <= kFewRows ? 10.0 : 1.0;
  return std::max(by_work, by_longest) * imbalance * shared_rows * few_rows;
}

bool fits_shared_memory(const Config& config, const Device& device) {
  return static_cast<std::size_t>(forward_sm90_layout(config).bytes) <= device.shared_memory_per_block;
}

// What the mask and the cache add to a tile's Config.
Config with_problem(Config config, const AttentionProblem& p) {
  config.chunked = p.chunk > 0;
  config.cache = p.op == AttentionOp::kDecode;
  config.page_box = p.paged ? static_cast<int>(std::gcd<std::int64_t>(p.page_size, config.block_k)) : 0;
  // TMA writes single rows to multiples of 128 bytes, so atoms have 64 columns, for which there is room with fewer stages.
  if (p.paged && config.min_atom < kWidestAtom) {
    config.min_atom = kWidestAtom;
    config.stages = config.intra_cta_split ? config.consumers : 2;
    config.q_stages = 1;
  }
  return config;
}

// Of a cache, only the device knows the lengths; modified scores need more registers.
bool can_keep_keys(const AttentionProblem& p) {
  return p.op == AttentionOp::kForward && p.seq_k <= kFewKeys && std::max(p.dim_qk, p.dim_v) <= kFewKeysDim &&
         !has_score_mod(p);
}

std::vector<Config> default_configs(const AttentionProblem& p) {
  std::vector<Config> configs = forward_sm90_configs(p.dtype, static_cast<int>(p.dim_qk), static_cast<int>(p.dim_v),
                                                     is_masked(p), has_score_mod(p), std::max(p.seq_q, p.seq_k));
  // One or two tiles of queries would hardly use keys again that stay in shared memory.
  if (can_keep_keys(p) && p.seq_q > 2 * kConsumerRows) {
    configs.push_back(with_tile(configs.front(), few_keys_forward_sm90_tile(p.seq_k)));
    configs.back().few_keys = true;
  }
  for (Config& config : configs) config = with_problem(config, p);
  return configs;
}

std::vector<engine::Offer> offers(const AttentionProblem& p, const Device& device) {
  std::vector<engine::Offer> offers;
  const auto offer = [&](const Config& config) {
    if (!fits_shared_memory(config, device)) return;
    const ComputedScores computed = scores_of(p, config);
    offers.push_back({engine::main_config(config), workspace_of(p, config), predicted_time(p, config, device, computed),
                      format("computes {:.3g} scores per {}head", computed.all, config.pack_gqa ? "key " : "")});
  };
  for (Config config : default_configs(p)) {
    offer(config);
    // If queries do not fill a tile.
    config.pack_gqa = true;
    if (p.seq_q < block_q_of(config) && can_pack_gqa(p, config)) offer(config);
  }
  return offers;
}

constexpr int kMinBlockK = 48;  // fewer keys per tile leave the tensor cores idle
constexpr int kMaxBlockK = 256;
constexpr int kMaxRegisters = 255;
constexpr int kMaxConsumersPerSm = 4;

bool fits_few_keys(const Config& c, const AttentionProblem& p) {
  return can_keep_keys(p) && p.seq_k <= c.block_k && c.block_k <= kFewKeys && c.consumers == 1 && !c.intra_cta_split &&
         !c.dynamic_scheduler && !c.ping_pong && !c.pack_gqa;
}

// What the kernel's static_asserts and TMA's boxes allow, for this problem.
bool fits(const Config& c, const AttentionProblem& p, const Device& device) {
  const bool of_problem = c.dtype == p.dtype && c.dim_qk == p.dim_qk && c.dim_v == p.dim_v &&
                          c.masked == is_masked(p) && c.score_mod == has_score_mod(p) &&
                          engine::main_config(c) == engine::main_config(with_problem(c, p));
  return of_problem && c.consumers >= 1 && c.consumers <= 3 && c.block_k >= 16 && c.block_k % 16 == 0 &&
         c.block_k <= kMaxBlockK && c.stages >= 2 && c.stages <= 8 && (c.q_stages == 1 || c.q_stages == 2) &&
         (!c.few_keys || fits_few_keys(c, p)) && (!c.pack_gqa || can_pack_gqa(p, c)) &&
         (!c.intra_cta_split ||
          (c.consumers > 1 && c.stages % c.consumers == 0 && !c.ping_pong && !c.dynamic_scheduler)) &&
         (c.ctas_per_sm == 1 ||
          (c.ctas_per_sm >= 2 && c.ctas_per_sm * c.consumers <= kMaxConsumersPerSm && !c.intra_cta_split)) &&
         (c.min_atom == 64 || c.min_atom == 16) && fits_shared_memory(c, device);
}

std::optional<Recipe> recipe(const AttentionProblem& p, const Device& device, const engine::Config& named) {
  const auto config = engine::from_main<Config>(named);
  if (!config || !fits(*config, p, device)) return std::nullopt;
  Recipe recipe;
  recipe.problem = p;
  if (p.seq_new > 0) recipe.steps.push_back({"append", instance_of(append_config(p.dtype, vector_of(p)))});
  recipe.steps.push_back({"main", main_kernel(*config)});
  recipe.workspace = workspace_of(p, *config);
  recipe.enqueue = [config = *config](const AttentionArgs& args, const engine::Launch& launch) {
    return enqueue(config, args, launch);
  };
  return recipe;
}

// Registers of a consumer's thread, roughly: scores, probabilities and output live at once.
constexpr int estimated_registers(const Config& config) {
  constexpr int kRest = 32;  // addresses, the rows' maxima and sums
  return config.block_k / 2 + config.block_k / 4 + config.dim_v / 2 + kRest;
}

// False if it would spill by the estimate, if its CTAs would not fit on an SM together, or if a key tile is larger than
// the number of keys.
bool is_worth_a_try(const Config& c, const AttentionProblem& p, const Device& device) {
  constexpr std::size_t kReserved = 1024;  // of a CTA's shared memory by the system
  const int registers = c.consumers * c.ctas_per_sm > 1 ? register_split(c).consumer : kMaxRegisters;
  if (estimated_registers(c) > registers) return false;
  if (c.block_k > kMinBlockK && c.block_k - 16 >= p.seq_k) return false;
  const auto ctas = static_cast<std::size_t>(c.ctas_per_sm);
  const auto bytes = static_cast<std::size_t>(forward_sm90_layout(c).bytes);
  return ctas * (bytes + kReserved) <= device.shared_memory_per_block + kReserved;
}

// Every Config that is worth trying, built field by field.
class Space {
 public:
  Space(const AttentionProblem& p, const Device& device) : p_(p), device_(device) {
    c_.dtype = p.dtype;
    c_.dim_qk = static_cast<int>(p.dim_qk);
    c_.dim_v = static_cast<int>(p.dim_v);
    c_.masked = is_masked(p);
    c_.score_mod = has_score_mod(p);
  }

  std::vector<engine::Config> all() {
    for (c_.consumers = 1; c_.consumers <= 3; ++c_.consumers) {
      for (c_.block_k = kMinBlockK; c_.block_k <= kMaxBlockK; c_.block_k += 16) {
        add_own_rows();
        if (c_.consumers > 1) add_shared_rows();
      }
    }
    return std::move(list_);
  }

 private:
  void add_own_rows() {
    constexpr std::pair<int, int> kStages[] = {{2, 1}, {2, 2}, {3, 1}, {3, 2}, {4, 2}, {6, 2}};  // of K and V, of Q
    c_.intra_cta_split = false;
    for (const auto& [stages, q_stages] : kStages) {
      c_.stages = stages;
      c_.q_stages = q_stages;
      for (c_.ctas_per_sm = 1; c_.ctas_per_sm <= kMaxConsumersPerSm / c_.consumers; ++c_.ctas_per_sm) {
        for (const bool ping_pong : {false, true}) {
          if (ping_pong && c_.consumers == 1) continue;
          c_.ping_pong = ping_pong;
          add_rest();
        }
      }
    }
  }

  // Intra-CTA split: stages of each consumer's K and V, and of Q.
  void add_shared_rows() {
    constexpr std::pair<int, int> kStages[] = {{1, 1}, {2, 1}, {2, 2}};
    c_.intra_cta_split = true;
    c_.ping_pong = false;
    c_.ctas_per_sm = 1;
    for (const auto& [stages, q_stages] : kStages) {
      c_.stages = c_.consumers * stages;
      c_.q_stages = q_stages;
      add_rest();
    }
  }

  void add_rest() {
    const bool atoms_differ = p_.dim_qk % kWidestAtom != 0 || p_.dim_v % kWidestAtom != 0;
    for (const int atom : {64, 16}) {
      if (atom == 16 && !atoms_differ) continue;
      for (const bool dynamic : {false, true}) {
        for (const bool pack_gqa : {false, true}) {
          c_.min_atom = atom;
          c_.dynamic_scheduler = dynamic;
          c_.pack_gqa = pack_gqa;
          c_ = with_problem(c_, p_);
          if (fits(c_, p_, device_) && is_worth_a_try(c_, p_, device_)) list_.push_back(engine::main_config(c_));
        }
      }
    }
  }

  const AttentionProblem& p_;
  const Device& device_;
  Config c_{};
  std::vector<engine::Config> list_;
};

std::vector<engine::Config> searches(const AttentionProblem& p, const Device& device) { return Space(p, device).all(); }

constexpr int kDims[] = {8, 64, 72, 80, 96, 112, 128, 192, 256};

std::vector<AttentionProblem> representatives(const Device& device) {
  std::vector<AttentionProblem> list;
  if (device.compute != 90 || !device.specific) return list;
  for (const Variant& variant : kVariants) {
    for (const int dim : kDims) {
      list.push_back(with_variant(representative(device, AttentionOp::kForward, dim, dim), variant));
      if (variant.score_mod || (dim != 64 && dim != 128)) continue;
      list.push_back(list.back());  // packed GQA
      list.back().heads_kv = list.back().heads_q / 4;
      list.back().seq_q = 1;
      list.back().alignment = Alignment::kBottomRight;
    }
    list.push_back(with_variant(representative(device, AttentionOp::kForward, 192, 128), variant));
    if (variant.score_mod) continue;
    for (const int dim : {64, 96, 128}) {
      for (const std::int64_t longest : {kTiny, kShort}) {
        list.push_back(with_variant(representative(device, AttentionOp::kForward, dim, dim), variant));
        list.back().seq_q = list.back().seq_k = longest;
      }
    }
    for (const auto& [dim, keys] : {std::pair{8, 8}, {40, 33}, {64, 64}}) {
      list.push_back(with_variant(representative(device, AttentionOp::kForward, dim, dim), variant));
      list.back().seq_k = keys;
    }
  }
  for (const int dim : {64, 128, 256}) {
    for (const std::int64_t chunk : {0, 1024}) {
      if (dim != 64 && (chunk > 0) != (dim > 128)) continue;
      AttentionProblem cache = representative(device, AttentionOp::kDecode, dim, dim);
      cache.causal = true;
      cache.alignment = Alignment::kBottomRight;
      cache.chunk = chunk;
      list.push_back(cache);
      if (chunk > 0) continue;
      list.push_back(cache);
      list.back().paged = true;
      list.back().page_size = 16;
    }
  }
  return list;
}

}  // namespace

Implementation forward_sm90() {
  return {"attention_forward_sm90",
          AttentionFamily::bit_of(AttentionOp::kForward) | AttentionFamily::bit_of(AttentionOp::kDecode),
          {"attention/cache_append.cuh", "attention/forward_sm90.cuh"},
          refuses,
          offers,
          recipe,
          searches,
          representatives};
}

}  // namespace tessera::attention
