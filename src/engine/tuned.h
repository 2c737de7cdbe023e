// What the tuning table knows of a problem, for plans. Each process reads the table once per device; later lookups are
// in memory.
//
// TESSERA_NO_TUNING=1 turns the table off.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cuda/device.h"
#include "engine/select.h"
#include "tessera/tessera.h"

namespace tessera::engine {

struct TuningKey {
  std::string family;
  std::string source;
  std::string problem_class;

  auto operator<=>(const TuningKey&) const = default;
};

// Hash of the code of these headers and all that they include. All kernels that compete are part of it, because a
// slower one may have become faster.
std::string source_hash(const std::vector<std::string>& headers);

template <class Family>
TuningKey tuning_key(const typename Family::Problem& problem, int multiprocessors) {
  std::vector<std::string> headers;
  for (const Implementation<Family>& one : Family::implementations()) {
    if ((one.ops & Family::op_bit(problem)) == 0) continue;
    headers.insert(headers.end(), one.headers.begin(), one.headers.end());
  }
  return {Family::kName, source_hash(headers), Family::tuning_class(problem, multiprocessors)};
}

// The part of the key that identifies the GPU.
std::string gpu_key(const cuda::DeviceInfo& device);

// Whether there is any entry for this GPU; cheap, since usually there is none.
bool has_tuned(const cuda::DeviceInfo& device);
// Nothing if the table has no entry for this GPU, driver and key, or one that cannot be read.
std::optional<Tuned> find_tuned(const cuda::DeviceInfo& device, const TuningKey& key);

template <class Family>
std::optional<Tuned> find_tuned(const cuda::DeviceInfo& device, const typename Family::Problem& problem) {
  if (!has_tuned(device)) return std::nullopt;
  return find_tuned(device, tuning_key<Family>(problem, device.multiprocessors));
}

// From now on, every problem on a GPU that this Config fits is planned with it; nothing: the table decides again.
// Process-wide, for the tuner itself; not in the C ABI.
void force(const std::optional<Tuned>& tuned);

// True if TESSERA_NO_TUNING is set to anything but 0.
bool tuning_forbidden();

}  // namespace tessera::engine
