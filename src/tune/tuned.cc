#include "tune/tuned.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>

#include "cuda/code_arch.h"
#include "jit/sources.h"
#include "ops/attention_params.h"
#include "ops/extents.h"
#include "ops/format.h"

namespace tessera::tune {
namespace {

using ByClass = std::map<std::string, select::TunedForward>;

struct Known {
  std::mutex mutex;
  std::optional<select::TunedForward> forced;
  std::map<int, std::shared_ptr<const ByClass>> devices;
};

// Never destroyed: a thread may still plan while the process ends.
Known& known() {
  static Known* instance = new Known;
  return *instance;
}

// Of the nearest power of two, by ratio.
int bucket(std::int64_t size) {
  if (size <= 1) return 0;
  const int floor = std::bit_width(static_cast<std::uint64_t>(size)) - 1;
  const double power = static_cast<double>(std::int64_t{1} << floor);
  return floor + (static_cast<double>(size) > power * 1.41421356 ? 1 : 0);
}

std::int64_t most_keys_seen(const AttentionProblem& p) {
  const bool bounded = p.window_left >= 0 && (p.causal || p.window_right >= 0);
  if (!bounded || p.window_left > p.seq_k || p.window_right > p.seq_k) return p.seq_k;
  return std::min(p.seq_k, p.window_left + (p.causal ? 0 : p.window_right) + 1);
}

ByClass read_table(const cuda::DeviceInfo& device) {
  ByClass found;
  if (tuning_forbidden()) return found;
  const auto table = Table::open(table_file(), Table::Access::kRead);
  if (!table.ok()) return found;
  const auto entries = table->entries();
  if (!entries.ok()) return found;
  for (const Entry& e : *entries) {
    if (e.gpu != gpu_key(device) || e.driver != device.driver_version || e.source != source_hash()) continue;
    const auto config = select::forward_config_from_text(e.config);
    if (config) found.emplace(e.problem_class, select::TunedForward{*config, e.microseconds, e.default_microseconds});
  }
  return found;
}

}  // namespace

std::string class_of(const AttentionProblem& p, int multiprocessors) {
  constexpr std::int64_t kRows = 128;
  const std::int64_t tiles = saturating_product(ceil_div(p.seq_q, kRows), p.batch, p.heads_q);
  return format("forward {} d{}x{}{}{}{} q2^{} k2^{} {}", name_of(p.dtype), p.dim_qk, p.dim_v,
                is_banded(p) ? " banded" : "", is_general(p) ? " general" : "",
                p.heads_q > p.heads_kv ? format(" group {}", p.heads_q / p.heads_kv) : "", bucket(p.seq_q),
                bucket(most_keys_seen(p)), tiles >= multiprocessors ? "many" : "few");
}

std::string source_hash() {
  static const std::string hash = jit::code_hash("attention/forward.cuh").substr(0, 16) +
                                  jit::code_hash("attention/forward_sm90.cuh").substr(0, 16);
  return hash;
}

std::string gpu_key(const cuda::DeviceInfo& device) {
  const auto code = cuda::code_arch_of(device);
  return format("{}, {}", device.name, code.ok() ? code->target.arch : "no code");
}

std::optional<select::TunedForward> find_tuned(const cuda::DeviceInfo& device, const AttentionProblem& problem) {
  if (problem.op != AttentionOp::kForward) return std::nullopt;
  std::shared_ptr<const ByClass> by_class;
  {
    Known& all = known();
    const std::lock_guard lock(all.mutex);
    if (all.forced) return all.forced;
    std::shared_ptr<const ByClass>& place = all.devices[device.index];
    if (!place) place = std::make_shared<const ByClass>(read_table(device));
    by_class = place;
  }
  if (by_class->empty()) return std::nullopt;
  const auto found = by_class->find(class_of(problem, device.multiprocessors));
  if (found == by_class->end()) return std::nullopt;
  return found->second;
}

void force(const std::optional<select::TunedForward>& tuned) {
  const std::lock_guard lock(known().mutex);
  known().forced = tuned;
}

bool tuning_forbidden() {
  const char* value = std::getenv("TESSERA_NO_TUNING");
  return value != nullptr && *value != '\0' && std::string(value) != "0";
}

}  // namespace tessera::tune
