#include "engine/tuned.h"

#include <cstdlib>
#include <map>
#include <mutex>

#include "base/format.h"
#include "cuda/code_arch.h"
#include "engine/tuning_table.h"
#include "jit/hash.h"
#include "jit/sources.h"

namespace tessera::engine {
namespace {

using ByKey = std::map<TuningKey, Tuned>;

struct Known {
  std::mutex mutex;
  std::optional<Tuned> forced;
  std::map<int, ByKey> devices;
  std::map<std::string, std::string> hashes;  // of headers
};

// Never destroyed: a thread may still plan while the process ends.
Known& known() {
  static Known* instance = new Known;
  return *instance;
}

ByKey read_table(const cuda::DeviceInfo& device) {
  ByKey found;
  if (tuning_forbidden()) return found;
  const auto table = TuningTable::open(tuning_table_file(), TuningTable::Access::kRead);
  if (!table.ok()) return found;
  const auto entries = table->entries();
  if (!entries.ok()) return found;
  for (const TuningEntry& e : *entries) {
    if (e.gpu != gpu_key(device) || e.driver != device.driver_version) continue;
    auto config = config_from_text(e.config);
    if (!config) continue;
    found.emplace(TuningKey{e.family, e.source, e.problem_class},
                  Tuned{e.kernel, *std::move(config), e.microseconds, e.default_microseconds});
  }
  return found;
}

// The caller holds the lock.
const ByKey& entries_of(Known& all, const cuda::DeviceInfo& device) {
  const auto known = all.devices.find(device.index);
  return known != all.devices.end() ? known->second
                                    : all.devices.emplace(device.index, read_table(device)).first->second;
}

}  // namespace

std::string source_hash(const std::vector<std::string>& headers) {
  std::string all;
  const std::lock_guard lock(known().mutex);
  for (const std::string& header : headers) {
    std::string& hash = known().hashes[header];
    if (hash.empty()) hash = jit::code_hash(header);
    all += hash;
  }
  return jit::hash_of(all).hex();
}

std::string gpu_key(const cuda::DeviceInfo& device) {
  const auto code = cuda::code_arch_of(device);
  return format("{}, {}", device.name, code.ok() ? code->target.arch : "no code");
}

bool has_tuned(const cuda::DeviceInfo& device) {
  Known& all = known();
  const std::lock_guard lock(all.mutex);
  return all.forced || !entries_of(all, device).empty();
}

std::optional<Tuned> find_tuned(const cuda::DeviceInfo& device, const TuningKey& key) {
  Known& all = known();
  const std::lock_guard lock(all.mutex);
  if (all.forced) return all.forced;
  const ByKey& entries = entries_of(all, device);
  const auto found = entries.find(key);
  if (found == entries.end()) return std::nullopt;
  return found->second;
}

void force(const std::optional<Tuned>& tuned) {
  const std::lock_guard lock(known().mutex);
  known().forced = tuned;
}

bool tuning_forbidden() {
  const char* value = std::getenv("TESSERA_NO_TUNING");
  return value != nullptr && *value != '\0' && std::string(value) != "0";
}

}  // namespace tessera::engine
