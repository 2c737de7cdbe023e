// Plans that are kept from call to call, by everything that they depend on. The GIL guards them.
#pragma once

#include <cstring>
#include <memory>
#include <unordered_map>
#include <utility>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "plan.h"

namespace tessera::python {

struct WithoutGil {
  PyThreadState* state = PyEval_SaveThread();
  ~WithoutGil() { PyEval_RestoreThread(state); }
};

using SharedPlan = std::shared_ptr<const tessera_plan>;

// create(&plan) makes a plan, without the GIL. Returns null, with an exception set, if it fails.
template <class Create>
SharedPlan make_plan(Create&& create) {
  tessera_plan* made = nullptr;
  tessera_status status;
  {
    const WithoutGil without;
    status = create(&made);
  }
  if (!succeeded(status)) return nullptr;
  return SharedPlan(made, [](const tessera_plan* p) { tessera_plan_destroy(const_cast<tessera_plan*>(p)); });
}

// Key: compared as bytes, so clear it with memset before it is filled.
template <class Key>
class PlanCache {
 public:
  // make_plan, if there is none yet.
  template <class Create>
  SharedPlan find(const Key& key, Create&& create) {
    const auto known = plans_.find(key);
    if (known != plans_.end()) return known->second;
    SharedPlan plan = make_plan(create);
    if (!plan) return nullptr;
    if (plans_.size() >= kMostPlans) plans_.clear();
    plans_.emplace(key, plan);
    return plan;
  }

 private:
  static constexpr std::size_t kMostPlans = 4096;
  struct Hash {
    std::size_t operator()(const Key& key) const { return XXH3_64bits(&key, sizeof key); }
  };
  struct Equal {
    bool operator()(const Key& a, const Key& b) const { return std::memcmp(&a, &b, sizeof a) == 0; }
  };
  std::unordered_map<Key, SharedPlan, Hash, Equal> plans_;
};

// Whether rows start at multiples of 16 bytes: must agree with the families' check.cc.
inline bool has_aligned_rows(const tessera_tensor& t) {
  const std::uint64_t bytes = t.dtype.bits / 8;
  std::uint64_t all = reinterpret_cast<std::uintptr_t>(t.data) + t.byte_offset;
  std::int64_t compact = t.ndim > 0 ? t.shape[t.ndim - 1] : 1;
  for (int dim = t.ndim - 2; dim >= 0; --dim) {
    if (t.shape[dim] > 1) all |= static_cast<std::uint64_t>(t.strides != nullptr ? t.strides[dim] : compact) * bytes;
    compact *= t.shape[dim];
  }
  return all % 16 == 0;
}

// Whether TMA takes the strides: likewise.
inline bool has_mapped_strides(const tessera_tensor& t) {
  bool all = true;
  std::int64_t compact = t.ndim > 0 ? t.shape[t.ndim - 1] : 1;
  for (int dim = t.ndim - 2; dim >= 0; --dim) {
    const std::int64_t stride = t.strides != nullptr ? t.strides[dim] : compact;
    all &= t.shape[dim] <= 1 || (stride > 0 && stride < std::int64_t{1} << 36);
    compact *= t.shape[dim];
  }
  return all;
}

}  // namespace tessera::python
