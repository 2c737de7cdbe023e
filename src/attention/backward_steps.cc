#include "attention/backward_steps.h"

#include <algorithm>
#include <climits>
#include <cmath>
#include <limits>

#include "attention/backward_convert.h"
#include "attention/backward_preprocess.h"
#include "attention/gpu.h"
#include "attention/params.h"
#include "base/format.h"

namespace tessera::attention {
namespace {

// A step that does not depend on sequences' ends sees packed sequences as one batch.
std::int64_t batches(const AttentionProblem& p) { return p.varlen ? 1 : p.batch; }
std::int64_t rows_per_head(const AttentionProblem& p) { return p.varlen ? p.total_q : p.seq_q; }

// Rows of a gradient's sums, per head. If packed, every sequence starts at a multiple of `block`.
std::int64_t sum_rows(const AttentionProblem& p, std::int64_t seq, std::int64_t total, int block) {
  if (block == 0) return 0;
  if (!p.varlen) return ceil_div(seq, block) * block;
  return padded_start(total, p.batch, block);
}
std::int64_t query_sum_rows(const AttentionProblem& p, int block_q) { return sum_rows(p, p.seq_q, p.total_q, block_q); }
std::int64_t key_sum_rows(const AttentionProblem& p, int block_k) { return sum_rows(p, p.seq_k, p.total_k, block_k); }

// Offsets in the workspace, in bytes.
struct Workspace {
  std::int64_t delta;     // float [B, Hq, Sq]
  std::int64_t lse_log2;  // likewise
  std::int64_t sums;
  std::int64_t dk_sums;
  std::int64_t dv_sums;
  std::int64_t turns;     // unsigned [rows of the sums / block_q * turns], if they are added to in a fixed order
  std::int64_t dk_turns;  // unsigned [rows of dK's sums / 16], likewise
  std::int64_t dv_turns;
  std::int64_t progress;  // unsigned
  std::int64_t slice_sums;
  std::int64_t slices_added;
  std::int64_t zeroed;
  std::int64_t zeroed_bytes;
  std::int64_t bytes;  // LLONG_MAX if the sizes overflow
};

Workspace workspace_of(const AttentionProblem& p, const BackwardSums& of) {
  constexpr std::int64_t kAlignment = 256;
  constexpr auto kFloat = static_cast<std::int64_t>(sizeof(float));
  const auto aligned = [](std::int64_t bytes) { return ceil_div(bytes, kAlignment) * kAlignment; };
  const std::int64_t rows = saturating_product(batches(p), p.heads_q, rows_per_head(p));
  const std::int64_t sums =
      saturating_product(saturating_product(batches(p), p.heads_q, query_sum_rows(p, of.block_q)), p.dim_qk, 1);
  const std::int64_t key_rows = saturating_product(batches(p), p.heads_kv, key_sum_rows(p, of.block_k));
  if (saturating_product(rows, 4 * kFloat, 1) > LLONG_MAX / 8 || saturating_product(sums, kFloat, 1) > LLONG_MAX / 8 ||
      saturating_product(key_rows, p.dim_qk + p.dim_v, kFloat) > LLONG_MAX / 8) {
    Workspace none = {};
    none.bytes = LLONG_MAX;
    return none;
  }
  Workspace at = {};
  at.lse_log2 = at.delta + aligned(rows * kFloat);
  at.sums = at.lse_log2 + aligned(rows * kFloat);
  at.dk_sums = at.sums + sums * kFloat;
  at.dv_sums = at.dk_sums + key_rows * p.dim_qk * kFloat;
  at.turns = at.dv_sums + key_rows * p.dim_v * kFloat;
  constexpr auto kCounter = static_cast<std::int64_t>(sizeof(unsigned));
  // Only sums are added to in an order: then block_q is not 0.
  at.dk_turns = at.turns + (of.turns > 0 ? aligned(sums / p.dim_qk / of.block_q * of.turns * kCounter) : 0);
  const std::int64_t key_turns = of.turns > 0 ? key_rows / 16 * kCounter : 0;
  at.dv_turns = at.dk_turns + key_turns;
  at.zeroed = of.turns > 0 ? at.dk_sums : at.sums;
  at.progress = aligned(at.dv_turns + key_turns);
  at.slice_sums = at.progress + (of.counts_steps ? kAlignment : 0);
  at.slices_added = at.slice_sums + of.sliced_keys * (p.dim_qk + p.dim_v) * kFloat;
  at.zeroed_bytes = (of.sliced_keys > 0 ? at.slices_added + of.sliced_keys / 16 * kCounter : at.slice_sums) - at.zeroed;
  at.bytes = at.sums + aligned(at.zeroed - at.sums + at.zeroed_bytes);
  return at;
}

}  // namespace

std::int64_t backward_bytes(const AttentionProblem& problem, const BackwardSums& sums) {
  return workspace_of(problem, sums).bytes;
}

BackwardBuffers backward_buffers(const AttentionProblem& p, const BackwardSums& sums, void* workspace) {
  const Workspace at = workspace_of(p, sums);
  const auto place = [&](std::int64_t offset) {
    return reinterpret_cast<float*>(static_cast<char*>(workspace) + offset);
  };
  const auto counters = [&](std::int64_t offset) { return reinterpret_cast<unsigned*>(place(offset)); };
  const std::int64_t rows = rows_per_head(p);
  const std::int64_t batch_stride = p.varlen ? 0 : p.heads_q * rows;
  return {{place(at.delta), batch_stride, rows},
          {place(at.lse_log2), batch_stride, rows},
          {place(at.sums), query_sum_rows(p, sums.block_q)},
          {sums.block_k > 0 ? place(at.dk_sums) : nullptr, key_sum_rows(p, sums.block_k)},
          {sums.block_k > 0 ? place(at.dv_sums) : nullptr, key_sum_rows(p, sums.block_k)},
          sums.turns > 0 ? counters(at.turns) : nullptr,
          sums.turns > 0 && sums.block_k > 0 ? counters(at.dk_turns) : nullptr,
          sums.turns > 0 && sums.block_k > 0 ? counters(at.dv_turns) : nullptr,
          sums.counts_steps ? counters(at.progress) : nullptr,
          sums.sliced_keys > 0 ? place(at.slice_sums) : nullptr,
          sums.sliced_keys > 0 ? counters(at.slices_added) : nullptr,
          place(at.zeroed),
          at.zeroed_bytes};
}

std::optional<std::string> hopper_backward_refuses(const AttentionProblem& p, const engine::Device& device) {
  if (auto reason = gpu_refuses(p, device)) return reason;
  if (auto reason = hopper_refuses(p, device)) return reason;
  if (p.batch == 0 || p.seq_q == 0 || p.seq_k == 0 || (p.varlen && (p.total_q == 0 || p.total_k == 0))) {
    return "there is nothing to load";
  }
  return std::nullopt;
}

Result<std::size_t> hopper_backward_workspace(const AttentionProblem& problem, const char* kernel, int block_k,
                                              const BackwardSums& sums) {
  const bool splits_group = sums.block_k > 0;
  if (!fits_a_grid(ceil_div(problem.seq_k, block_k), problem, splits_group ? problem.heads_q : problem.heads_kv) ||
      !fits_a_grid(convert_tiles(problem), problem, problem.heads_q) ||
      (splits_group && !fits_a_grid(convert_key_tiles(problem), problem, problem.heads_kv))) {
    return Status(TESSERA_UNSUPPORTED, format("{}: more rows than one grid can cover", kernel));
  }
  const std::int64_t bytes = backward_bytes(problem, sums);
  if (bytes == LLONG_MAX) return Status(TESSERA_UNSUPPORTED, format("{}: its workspace cannot be addressed", kernel));
  return static_cast<std::size_t>(bytes);
}

bool fits_a_grid(std::int64_t tiles, const AttentionProblem& problem, std::int64_t heads) {
  return saturating_product(tiles, problem.batch, heads) <= INT_MAX;
}

Status enqueue_preprocess(const cuda::Kernel& kernel, const AttentionArgs& args, const BackwardBuffers& buffers,
                          cuda::CUstream stream) {
  const AttentionProblem& p = args.problem;
  PreprocessArgs preprocess;
  preprocess.dtype = p.dtype;
  preprocess.batch = batches(p);
  preprocess.seq = rows_per_head(p);
  preprocess.heads = p.heads_q;
  preprocess.head_dim = p.dim_v;
  preprocess.o = args.o;
  preprocess.d_o = args.d_o;
  preprocess.lse = args.lse;
  preprocess.d_lse = args.d_lse;
  preprocess.delta = buffers.delta;
  preprocess.lse_log2 = buffers.lse_log2;
  preprocess.zeroed = buffers.zeroed;
  preprocess.zeroed_bytes = buffers.zeroed_bytes;
  const auto work = preprocess_work(preprocess, preprocess_config(p.dtype, vector_of(p)));
  if (!work.ok()) return work.status();
  return cuda::launch(kernel, *work, stream);
}

double predicted_backward_time(const AttentionProblem& p, const engine::Device& device, double rows, double relative) {
  constexpr double kSteps = 6.0;           // the launches other than the main one
  constexpr double kOfForwardRate = 0.38;  // five products instead of two, and dQ's sums
  const double masked = p.causal && p.seq_q == p.seq_k ? 0.5 : 1.0;
  const auto at_least_one = [](std::int64_t size) { return static_cast<double>(std::max<std::int64_t>(size, 1)); };
  const double scores =
      std::max(rows, 1.0) * at_least_one(p.seq_k) * masked * at_least_one(p.batch) * at_least_one(p.heads_q);
  const double rate = portable_rate(device) * kOfForwardRate * 64.0 /
                      static_cast<double>(std::max<std::int64_t>({p.dim_qk, p.dim_v, 1}));
  return kSteps + scores / (rate * relative);
}

double relative_time_of_turns(const AttentionProblem& p, const engine::Device& device, int block_q, int block_k,
                              const TurnCost& cost, int cluster) {
  // The sums are zeroed and converted at 4 TB/s in the time that the main kernel takes for so many keys at 500 TFLOP/s: 10
  // bytes per element of dQ, and 10 flop per element and key.
  constexpr double kSparedKeys = 125;
  // Where turns were not seen to pay, they come after all that adds in any order, whatever slices of queries would gain: 2 x 32
  // query heads that share 8 key heads, S = 4096, D = 96, causal, take 949 us in any order and 1280 in turns with slices.
  constexpr double kNotWorthIt = 2;
  const std::int64_t tiles = ceil_div(p.seq_k, block_k * cluster);
  const bool fills = saturating_product(tiles * cluster, p.batch, p.heads_kv) >= 2 * device.multiprocessors;
  const double keys = computed_scores(p, block_q, block_k * cluster).all / static_cast<double>(p.seq_q);
  if (!fills || p.heads_q != p.heads_kv || keys == 0) return kNotWorthIt;
  const double added = !is_masked(p) ? cost.unmasked : p.window_left >= 0 ? cost.window : cost.causal;
  return (1 + added) / (1 + kSparedKeys / keys);
}

std::string split_text(const GroupSplit& split) {
  if (split.part_heads == 0) return "";
  return format("; query heads per key head and CTA: {}, dK and dV summed likewise", split.part_heads);
}

std::string split_text(const QuerySplit& split) {
  if (split.tiles == 0) return "";
  return format("; the queries of the last {} key tiles divided among {} CTAs each", split.tiles, split.slices);
}

QuerySplit split_queries(const AttentionProblem& p, const engine::Device& device, int block_q, int block_k,
                         bool in_turns) {
  // In steps of one SM: a CTA starts and ends in about two, and adds dK and dV in about three.
  constexpr double kPerCta = 2, kPerSlice = 5;
  constexpr int kMostSlices = 32, kLeastSteps = 8;
  constexpr double kWorthIt = 0.99;
  // The lengths of packed sequences are not known here. If keys beyond a query's position are masked, the longest key tiles
  // come first, or last in turns.
  if (p.varlen || p.seq_q == 0 || p.seq_k == 0) return {};
  if (is_masked(p) && !(in_turns && p.causal && p.window_left < 0)) return {};
  const std::int64_t sms = std::max(device.multiprocessors, 1);
  const std::int64_t heads = p.heads_q / p.heads_kv;
  const std::int64_t tiles = saturating_product(ceil_div(p.seq_k, block_k), p.batch, p.heads_kv);
  if (tiles > INT_MAX / kMostSlices) return {};
  const std::int64_t longest_steps = ceil_div(p.seq_q, block_q) * heads;
  const auto longest = static_cast<double>(longest_steps);
  const std::int64_t most =
      std::min<std::int64_t>({kMostSlices, ceil_div(p.seq_q, block_q), longest_steps / kLeastSteps});
  QuerySplit best;
  if (!is_masked(p)) {
    // All CTAs take the same time.
    const std::int64_t full_waves = tiles / sms, rest = tiles % sms;
    const double whole = static_cast<double>(full_waves) * (longest + kPerCta);
    const double all = whole + (rest > 0 ? longest + kPerCta : 0);
    for (int slices = 2; slices <= most; ++slices) {
      const double waves = static_cast<double>(ceil_div(rest * slices, sms));
      const double time = (whole + waves * (longest / slices + kPerSlice)) / all;
      if (time < std::min(best.relative_time, kWorthIt)) best = {rest, slices, time};
    }
  } else if (tiles >= 2 * sms) {
    // SMs end at times that are spread over the longest CTA's.
    const double mean = computed_scores(p, block_q, block_k).all / (block_q * block_k) *
                        static_cast<double>(p.batch * p.heads_q) / static_cast<double>(sms);
    for (int slices = 2; slices <= most; ++slices) {
      const double time = (mean + longest / slices / 2 + kPerSlice * slices) / (mean + longest / 2 + kPerCta);
      if (time < std::min(best.relative_time, kWorthIt)) best = {sms, slices, time};
    }
  }
  return best;
}

GroupSplit split_group(const AttentionProblem& p, const engine::Device& device, int block_q, int block_k,
                       double missing, bool in_turns) {
  // In steps of one SM. A CTA starts and ends in about two steps; if it adds dK and dV to sums, these are two times
  // block_k / block_q the bytes that a step adds to dQ's. Zeroing and converting the sums moves 10 bytes per element, at 4 TB/s, in two more
  // launches.
  constexpr double kPerCta = 2;
  const double per_sum = 1.5 * block_k / block_q;
  const double keys_per_step = 3640.0 * (block_q * block_k) / (64 * 128);
  constexpr double kLaunches = 275;
  const auto number = [](std::int64_t x) { return static_cast<double>(std::max<std::int64_t>(x, 1)); };
  const double sms = std::max(device.multiprocessors, 1);
  const double columns = number(p.batch) * number(p.heads_kv);
  const double k_tiles = number(ceil_div(p.seq_k, block_k));
  const ComputedScores of_head = computed_scores(p, block_q, block_k);
  const double steps = std::max(of_head.all / (block_q * block_k), 1.0);  // of a query head
  // A key tile meets about as many queries as a query tile meets keys.
  const double longest =
      std::min(std::max(of_head.of_longest / (block_q * block_q), 1.0), number(ceil_div(p.seq_q, block_q)));
  const auto head_bytes = static_cast<double>(streamed_bytes(p));
  const int group = static_cast<int>(p.heads_q / p.heads_kv);
  const auto time_of = [&](int part_heads) {
    const int parts = (group + part_heads - 1) / part_heads;
    const double ctas = columns * parts * k_tiles;
    const double mean = columns * group * steps / sms;
    // Without a mask, all CTAs take the same time; with one, the longest come first, or last in turns: H200, 56:8 heads,
    // causal, S = 8192, D = 128, took the mean and 0.9 of the longest.
    const double waves = part_heads * longest * (is_masked(p) ? 1.0 : std::ceil(ctas / sms));
    const double busy = is_masked(p) && in_turns ? mean + 0.9 * waves : std::max(mean, waves);
    // With a mask, the CTAs of a key head are not at the same query head.
    const int heads = is_masked(p) ? std::min(part_heads, 2) : 1;
    const double in_flight = std::min(columns * parts, std::ceil(sms / k_tiles)) * heads * head_bytes;
    const double beyond = std::clamp(in_flight / static_cast<double>(kCacheBytes) - 1, 0.0, 1.0);
    double time = busy * (1 + missing * beyond) + ctas / sms * kPerCta;
    if (parts > 1)
      time += ctas / sms * per_sum + columns * number(p.seq_k) / keys_per_step + kLaunches / number(p.dim_qk);
    return time;
  };
  const double whole = time_of(group);
  GroupSplit best = {1, std::numeric_limits<double>::infinity()};
  for (int parts = 2; parts <= group; ++parts) {
    const int part_heads = (group + parts - 1) / parts;
    if (const double time = time_of(part_heads) / whole; time < best.relative_time) best = {part_heads, time};
  }
  return best;
}

}  // namespace tessera::attention
