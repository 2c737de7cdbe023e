// Attention forward of e4m3 on Hopper (kernels/attention/forward_fp8_sm90.cuh).
#include <algorithm>
#include <climits>
#include <cmath>
#include <utility>

#include "attention/atom_boxes.h"
#include "attention/family.h"
#include "attention/forward_fp8_sm90_config.h"
#include "attention/fp8_params.h"
#include "attention/gpu.h"
#include "attention/params.h"
#include "attention/quantize_fp8.h"
#include "attention/value_transpose.h"
#include "base/format.h"
#include "jit/config_text.h"

namespace tessera::attention {
namespace {

using Config = AttentionForwardFp8Sm90Config;

// Fields of the Config by the same names.
struct Tile {
  int consumers;
  int block_k;
  int stages;
  int q_stages;
};

// Sums that are not to be truncated are promoted after so many keys, or sooner.
constexpr int kMostPromotedKeys = 512;

// Scores (block_k / 2 registers a thread), probabilities (an eighth) and the output (dim_v / 2) live at once, in 240
// registers with two consumers and in 160 with three. A tile has whole blocks of K's scales, and V's have whole tiles.
constexpr Tile tile_of(int dim_qk, int dim_v, bool score_mod, bool k_blocks, std::int64_t v_block) {
  const int dim = dim_qk > dim_v ? dim_qk : dim_v;
  if (v_block == 64) return {2, 64, dim <= 128 ? 4 : 2, 1};
  if (dim > 192) return {2, score_mod || k_blocks || v_block > 0 ? 64 : 96, 2, 1};
  if (score_mod || k_blocks || v_block > 0) return {2, dim <= 128 ? 128 : 64, dim <= 128 ? 3 : 2, 1};
  if (dim <= 96) return {3, 128, 3, 2};
  if (dim_v <= 128 && dim_qk <= 160) return {3, 96, 3, 2};
  return {2, 96, 2, 1};
}

// The forward rounds q itself, and k and v come with scales of its key tiles, so that no CTA of the quantiser waits for
// another. Residuals and rotations are of whole heads' keys and of q alike.
bool rounds_tiles(const AttentionProblem& p) { return p.rounds_to_fp8 && !p.rotates && !p.residuals; }

// given: before as_e4m3, as in all functions below.
std::vector<Config> default_configs(const AttentionProblem& given) {
  const AttentionProblem p = as_e4m3(given);
  const bool rounds = rounds_tiles(given);
  std::vector<Config> configs;
  const auto qk = static_cast<int>(p.dim_qk), v = static_cast<int>(p.dim_v);
  const bool masked = is_masked(p), score_mod = has_score_mod(p), k_blocks = p.k_scale_block > 0;
  // Of a causal work tile, consumers have different numbers of key tiles. Without barriers between them, and with stages to
  // run ahead in, one stores its rows while another computes.
  const bool promotes = needs_fp32_sums(p);
  const int dim = std::max(qk, v);
  // Above it, Q as it is given has no room beside the sums of long sequences.
  constexpr int kLargestDimWithRoom = 192;
  const bool run_ahead = rounds && masked && !score_mod && dim <= 128 && (promotes || dim % 64 == 0);
  const int stages_ahead = promotes && dim > 64 ? 4 : 5;
  const auto add = [&](const Tile& tile, bool dynamic_scheduler) {
    configs.push_back({.dtype = p.dtype,
                       .dim_qk = qk,
                       .dim_v = v,
                       .consumers = tile.consumers,
                       .block_k = tile.block_k,
                       .stages = run_ahead ? stages_ahead : tile.stages,
                       .q_stages = rounds ? 1 : tile.q_stages,  // Q as it is given is needed once
                       .ping_pong = !run_ahead,
                       .dynamic_scheduler = dynamic_scheduler,
                       .masked = masked,
                       .score_mod = score_mod,
                       .k_blocks = k_blocks,
                       .v_blocks = p.v_scale_block > 0,
                       .tile_scales = rounds,
                       .rounds_q = rounds,
                       .promoted_tiles = promotes ? kMostPromotedKeys / tile.block_k : 0,
                       .q_in_sums = rounds && promotes && dim > kLargestDimWithRoom});
  };
  Tile tile = tile_of(qk, v, score_mod, k_blocks, p.v_scale_block);
  if (run_ahead && promotes && dim > 80 && dim <= 96) tile.block_k = 96;  // 128 keys would spill a register
  add(tile, false);
  if (masked) add(tile, true);
  return configs;
}

bool fits_shared_memory(const Config& config, const Device& device) {
  return static_cast<std::size_t>(forward_fp8_sm90_layout(config).bytes) <= device.shared_memory_per_block;
}

// What the kernel's static_asserts and TMA's boxes allow, for this problem.
bool fits(const Config& c, const AttentionProblem& given, const Device& device) {
  const AttentionProblem p = as_e4m3(given);
  const bool of_problem = c.dtype == p.dtype && c.dim_qk == p.dim_qk && c.dim_v == p.dim_v &&
                          c.masked == is_masked(p) && c.score_mod == has_score_mod(p) &&
                          c.k_blocks == (p.k_scale_block > 0) && c.v_blocks == (p.v_scale_block > 0) &&
                          c.tile_scales == rounds_tiles(given) && c.rounds_q == rounds_tiles(given);
  const bool promotes_sums = c.promoted_tiles > 0;
  const bool promotes =
      needs_fp32_sums(p) ? promotes_sums && c.promoted_tiles * c.block_k <= kMostPromotedKeys : c.promoted_tiles == 0;
  return of_problem && promotes && c.consumers >= 2 && c.consumers <= 3 && c.block_k >= 32 && c.block_k % 32 == 0 &&
         c.block_k <= 256 && c.stages >= 2 && c.stages <= 8 && (c.q_stages == 1 || c.q_stages == 2) &&
         (!c.k_blocks || c.block_k % kScaleKeys == 0) && (!c.v_blocks || p.v_scale_block % c.block_k == 0) &&
         (!c.v_blocks || c.block_k >= 64) && (!c.q_in_sums || (c.rounds_q && promotes_sums && c.q_stages == 1)) &&
         fits_shared_memory(c, device);
}

jit::KernelInstance main_kernel(const Config& config) {
  return {.name = format("attention_forward_fp8_sm90_{}_d{}x{}_{}x{}{}{}{}{}{}{}{}{}", name_of(config.dtype),
                         config.dim_qk, config.dim_v, block_q_of(config), config.block_k,
                         config.masked ? "_masked" : "", config.score_mod ? "_score_mod" : "",
                         config.dynamic_scheduler ? "_dynamic" : "", config.k_blocks ? "_k_blocks" : "",
                         config.v_blocks ? "_v_blocks" : "", config.rounds_q ? "_rounds_q" : "",
                         config.promoted_tiles > 0 ? "_promotes" : "", config.q_in_sums ? "_q_in_sums" : ""),
          .header = "attention/forward_fp8_sm90.cuh",
          .entry = "attention_forward_fp8_sm90",
          .params = "AttentionForwardFp8Sm90Params",
          .config = jit::config_text("AttentionForwardFp8Sm90Config", config),
          .threads = threads_of(config),
          .min_blocks = 1,
          .dynamic_smem_bytes = forward_fp8_sm90_layout(config).bytes,
          .pdl = true};
}

// Boxes of Dv rows and block_k keys of V transposed. Packed, columns end with each sequence, as rows of q and k do
// (RowOrigin), and the last axis moves by groups of keys.
Status value_boxes(const AttentionProblem& p, const void* transposed, int block_k, AtomBoxes& boxes) {
  const auto pitch = static_cast<std::uint64_t>(transposed_pitch(p));
  const auto longest = static_cast<std::uint64_t>(value_length(p.seq_k));
  const auto dim = static_cast<std::uint64_t>(p.dim_v), heads = static_cast<std::uint64_t>(p.heads_kv);
  cuda::TensorBox box;
  box.address = reinterpret_cast<std::uintptr_t>(transposed);
  box.rows = static_cast<std::uint32_t>(p.dim_v);
  box.extents = {longest / 2, dim, heads, static_cast<std::uint64_t>(p.batch)};
  box.strides = {pitch, dim * pitch, heads * dim * pitch};
  if (p.varlen) {
    if (longest > box.address) return Status(TESSERA_UNSUPPORTED, "sequences are too long for TMA");
    box.address -= longest;
    box.extents[3] = pitch / kValueGroup + 1;
    box.strides[2] = kValueGroup;
  }
  const int columns = fp8_columns(block_k);
  for (int column = 0; column < padded_dim(columns, kFp8MinAtom);) {
    const SwizzleAtom atom = atom_at(columns, kFp8MinAtom, column);
    box.columns = static_cast<std::uint32_t>(atom.width);
    if (boxes.count == 0 || boxes.box[boxes.count - 1].columns != box.columns) boxes.box[boxes.count++] = box;
    column += atom.width;
  }
  return {};
}

constexpr std::size_t kCounterBytes = 256;  // so that what follows is aligned

int rounding_rows(const Config& config) { return config.tile_scales ? config.block_k : 0; }

// Of the counter of the dynamic scheduler, what a rounding needs, and V transposed, which is the rounding's own if there
// is one.
std::size_t workspace_of(const AttentionProblem& given, const Config& config) {
  return kCounterBytes +
         (given.rounds_to_fp8 ? rounding_of(given, true, rounding_rows(config)).bytes : transposed_bytes(given));
}

Status enqueue(const Config& config, const AttentionArgs& given, const engine::Launch& launch) {
  const cuda::Kernel& kernel = *launch.kernels[1];
  if (given.problem.batch == 0 || given.problem.seq_q == 0) return {};
  const std::int64_t q_tiles = ceil_div(given.problem.seq_q, block_q_of(config));
  const std::int64_t tiles = saturating_product(q_tiles, given.problem.batch, given.problem.heads_q);
  if (tiles > INT_MAX) {
    return Status(TESSERA_UNSUPPORTED, "attention_forward_fp8_sm90: more rows than one grid can cover");
  }
  char* const behind_counter = static_cast<char*>(launch.workspace) + kCounterBytes;
  const void* transposed = behind_counter;
  AttentionArgs args = given;
  if (given.problem.rounds_to_fp8) {
    const Rounding rounding = rounding_of(given.problem, true, rounding_rows(config));
    if (rounding.scales > rounding.found) {
      Status s =
          cuda::zero(kernel.device, behind_counter + rounding.found, rounding.scales - rounding.found, launch.stream);
      if (!s.ok()) return s;
    }
    auto rounded = enqueue_rounding(given, rounding, *launch.kernels[0], behind_counter,
                                    static_cast<unsigned*>(launch.workspace), launch.stream);
    if (!rounded.ok()) return rounded.status();
    args = *rounded;
    transposed = args.v.data;
  } else {
    if (config.dynamic_scheduler) {
      if (Status s = cuda::zero(kernel.device, launch.workspace, sizeof(unsigned), launch.stream); !s.ok()) return s;
    }
    if (Status s = enqueue_transpose(*launch.kernels[0], args, behind_counter, launch.stream); !s.ok()) return s;
  }
  const AttentionProblem& p = args.problem;

  cuda::Work<AttentionForwardFp8Sm90Params> work = {};
  AttentionForwardFp8Sm90Params& params = work.params;
  fill_problem(params, args);
  fill_outputs(params, args);
  params.q_scale = scales_of(args.q_scale, p.q_scale_block);
  params.k_scale = scales_of(args.k_scale, p.k_scale_block);
  params.v_scale = scales_of(args.v_scale, p.v_scale_block);
  params.tile_counter = static_cast<unsigned*>(launch.workspace);
  params.q_tiles = static_cast<unsigned>(q_tiles);
  params.columns = static_cast<unsigned>(p.batch * p.heads_q);
  params.together = divisor(
      columns_together(p.batch * p.heads_q, saturating_product(p.seq_k, p.dim_qk + p.dim_v), p.heads_q / p.heads_kv));
  params.by_heads = divisor(params.heads_q);
  params.by_group = divisor(params.group);
  work.grid = {static_cast<unsigned>(std::min<std::int64_t>(tiles, kernel.multiprocessors)), 1, 1};

  // The driver makes tensor maps only if a context is current.
  const auto scope = cuda::ContextScope::enter(kernel.device);
  if (!scope.ok()) return scope.status();
  AtomBoxes q, k, v;
  const std::int64_t columns = fp8_columns(static_cast<int>(p.dim_qk));
  Status s =
      config.rounds_q
          ? atom_boxes(args.q, query_extents(p, p.dim_qk), block_q_of(config) / q_boxes_of(config), kFp8MinAtom, q)
          : atom_boxes(halved(args.q), query_extents(p, columns), block_q_of(config), kFp8MinAtom, q);
  if (s.ok()) s = atom_boxes(halved(args.k), key_extents(p, columns), config.block_k, kFp8MinAtom, k);
  if (s.ok()) s = value_boxes(p, transposed, config.block_k, v);
  if (s.ok()) s = encode_all(q, params.q);
  if (s.ok()) s = encode_all(k, params.k);
  if (s.ok()) s = encode_all(v, params.v);
  return s.ok() ? cuda::launch(kernel, work, launch.stream) : s;
}

// Microseconds, roughly: measured on an H200 and scaled by the head dim.
double predicted_time(const AttentionProblem& p, const Config& config, const Device& device) {
  constexpr double kScores = 4.0e6;  // per microsecond of the whole GPU, at head dim 64
  constexpr double kEachTile = 2.0;  // us, without its scores
  const ComputedScores computed = computed_scores(p, block_q_of(config), config.block_k);
  const auto columns = static_cast<double>(p.batch * p.heads_q);
  const double tiles = columns * static_cast<double>(ceil_div(p.seq_q, block_q_of(config)));
  const double rounds = std::ceil(tiles / device.multiprocessors);
  const double rate = kScores / device.multiprocessors * 64.0 / static_cast<double>(std::max(p.dim_qk, p.dim_v));
  const double by_work = rounds * computed.all * columns / std::max(tiles, 1.0) / rate + kEachTile * rounds;
  const double by_longest = computed.of_longest / rate + kEachTile;
  // A mask makes long and short tiles. The dynamic scheduler balances them, but its counter must be zeroed first.
  const bool dynamic_pays = config.masked && rounds > 2 && p.seq_k * std::max(p.dim_qk, p.dim_v) > 96 * 1024;
  return std::max(by_work, by_longest) * (config.dynamic_scheduler == dynamic_pays ? 1.0 : 1.05);
}

std::vector<engine::Offer> offers(const AttentionProblem& given, const Device& device) {
  const AttentionProblem p = as_e4m3(given);
  std::vector<engine::Offer> offers;
  for (const Config& config : default_configs(given)) {
    if (!fits(config, given, device)) continue;
    offers.push_back({engine::main_config(config), workspace_of(given, config), predicted_time(p, config, device),
                      fp8_remark(given, computed_scores(p, block_q_of(config), config.block_k).all)});
  }
  return offers;
}

std::optional<Recipe> recipe(const AttentionProblem& p, const Device& device, const engine::Config& named) {
  const auto config = engine::from_main<Config>(named);
  if (!config || !fits(*config, p, device)) return std::nullopt;
  Recipe recipe;
  recipe.problem = p;
  recipe.steps = {p.rounds_to_fp8
                      ? engine::Step{"quantize", instance_of(rounding_config(p, true, rounding_rows(*config)))}
                      : engine::Step{"transpose_v", instance_of(kValueTranspose)},
                  {"main", main_kernel(*config)}};
  recipe.workspace = workspace_of(p, *config);
  recipe.enqueue = [config = *config](const AttentionArgs& args, const engine::Launch& launch) {
    return enqueue(config, args, launch);
  };
  return recipe;
}

// Registers of a consumer's thread, roughly.
constexpr int estimated_registers(const Config& c) {
  constexpr int kRest = 32;  // addresses, the rows' references and sums
  return c.block_k / 2 + c.block_k / 8 + c.dim_v / 2 + kRest;
}

std::vector<engine::Config> searches(const AttentionProblem& given, const Device& device) {
  std::vector<engine::Config> list;
  for (Config c : default_configs(given)) {
    for (c.consumers = 2; c.consumers <= 3; ++c.consumers) {
      for (c.block_k = 64; c.block_k <= 224; c.block_k += 32) {
        if (c.promoted_tiles > 0) c.promoted_tiles = kMostPromotedKeys / c.block_k;
        if (estimated_registers(c) > register_split(c).consumer) continue;
        for (c.stages = 2; c.stages <= 4; ++c.stages) {
          for (c.q_stages = 1; c.q_stages <= 2; ++c.q_stages) {
            for (const bool ping_pong : {false, true}) {
              c.ping_pong = ping_pong;
              if (fits(c, given, device)) list.push_back(engine::main_config(c));
            }
          }
        }
      }
    }
  }
  return list;
}

std::vector<AttentionProblem> representatives(const Device& device) {
  std::vector<AttentionProblem> list;
  if (device.compute != 90 || !device.specific) return list;
  const auto add = [&](int dim_qk, int dim_v, const Variant& variant, std::int64_t k_block, std::int64_t v_block) {
    list.push_back(with_variant(representative(device, AttentionOp::kForward, dim_qk, dim_v), variant));
    list.back().fp8 = true;
    list.back().k_scale_block = k_block;
    list.back().v_scale_block = v_block;
  };
  for (const int dim : {64, 128, 256}) {
    add(dim, dim, {false, false}, 0, 0);
    add(dim, dim, {true, false}, 0, 0);
  }
  add(80, 80, {false, false}, 0, 0);
  add(192, 128, {false, false}, 0, 0);
  add(128, 128, {true, true}, 0, 0);
  add(256, 256, {true, true}, 0, 0);
  add(128, 128, {true, false}, 128, 0);
  for (const int dim : {64, 128}) {  // sums of blocks of V are not promoted
    add(dim, dim, {true, false}, dim, dim);
    list.back().seq_q = list.back().seq_k = kTruncatedKeys;
  }
  for (const int dim : {80, 128, 256}) {
    list.push_back(representative(device, AttentionOp::kForward, dim, dim));
    list.back().rounds_to_fp8 = true;
    list.push_back(list.back());
    (dim == 128 ? list.back().residuals : list.back().rotates) = true;
  }
  for (const int dim : {96, 128, 256}) {
    list.push_back(with_variant(representative(device, AttentionOp::kForward, dim, dim), {true, false}));
    list.back().rounds_to_fp8 = true;
  }
  for (const int dim : {64, 128}) {  // short sequences
    add(dim, dim, {dim == 64, false}, 0, 0);
    list.back().seq_q = list.back().seq_k = kTruncatedKeys;
    list.push_back(with_variant(representative(device, AttentionOp::kForward, dim, dim), {dim == 128, false}));
    list.back().rounds_to_fp8 = true;
    list.back().seq_q = list.back().seq_k = kTruncatedKeys;
  }
  return list;
}

}  // namespace

Implementation forward_fp8_sm90() {
  return {"attention_forward_fp8_sm90",
          AttentionFamily::bit_of(AttentionOp::kForward),
          {"attention/value_transpose_sm90.cuh", "attention/quantize_fp8.cuh", "attention/forward_fp8_sm90.cuh"},
          fp8_hopper_refuses,
          offers,
          recipe,
          searches,
          representatives};
}

}  // namespace tessera::attention
