#include "cuda/device.h"

#include <array>
#include <atomic>
#include <mutex>

#include "base/format.h"

namespace tessera::cuda {
namespace {

// CUdevice_attribute of cuda.h.
enum Attribute {
  kSharedMemoryPerBlock = 8,
  kClockRate = 13,
  kMultiprocessorCount = 16,
  kMemoryClockRate = 36,
  kMemoryBusWidth = 37,
  kL2CacheSize = 38,
  kThreadsPerMultiprocessor = 39,
  kComputeCapabilityMajor = 75,
  kComputeCapabilityMinor = 76,
  kSharedMemoryPerMultiprocessor = 81,
  kSharedMemoryPerBlockOptin = 97,
};

struct Registry {
  std::mutex mutex;
  bool listed = false;
  std::vector<DeviceInfo> devices;
  // Read without the lock, since every launch needs it. Devices beyond these are looked up each time.
  std::array<std::atomic<CUcontext>, 64> contexts = {};
};

// Never destroyed: the driver may be unloaded before static destructors run.
Registry& registry() {
  static Registry* instance = new Registry;
  return *instance;
}

Result<std::vector<DeviceInfo>> ask() {
  const auto loaded = driver();
  if (!loaded.ok()) return loaded.status();
  const Driver& d = **loaded;
  int version = 0, count = 0;
  d.driver_version(&version);
  if (Status s = status_of(d, d.device_count(&count), "cuDeviceGetCount"); !s.ok()) {
    return Status(TESSERA_NO_DEVICE, s.message());
  }
  if (count == 0) return Status(TESSERA_NO_DEVICE, "the CUDA driver finds no GPU");
  std::vector<DeviceInfo> list;
  for (int index = 0; index < count; ++index) {
    CUdevice handle = 0;
    char name[256] = "";
    std::size_t bytes = 0;
    if (Status s = status_of(d, d.device_get(&handle, index), "cuDeviceGet"); !s.ok()) return s;
    d.device_name(name, sizeof name - 1, handle);
    d.device_memory(&bytes, handle);
    const auto attribute = [&](Attribute which) {
      int value = 0;
      return d.device_attribute(&value, which, handle) == kCudaSuccess ? value : 0;
    };
    DeviceInfo info;
    info.index = index;
    info.name = name;
    info.major = attribute(kComputeCapabilityMajor);
    info.minor = attribute(kComputeCapabilityMinor);
    info.multiprocessors = attribute(kMultiprocessorCount);
    info.threads_per_multiprocessor = attribute(kThreadsPerMultiprocessor);
    info.shared_memory_per_block = attribute(kSharedMemoryPerBlock);
    info.shared_memory_per_block_optin = attribute(kSharedMemoryPerBlockOptin);
    info.shared_memory_per_multiprocessor = attribute(kSharedMemoryPerMultiprocessor);
    info.memory_bytes = static_cast<std::int64_t>(bytes);
    info.l2_bytes = attribute(kL2CacheSize);
    info.clock_khz = attribute(kClockRate);
    info.memory_clock_khz = attribute(kMemoryClockRate);
    info.memory_bus_bits = attribute(kMemoryBusWidth);
    info.driver_version = version;
    list.push_back(std::move(info));
  }
  return list;
}

}  // namespace

Result<std::vector<DeviceInfo>> devices() {
  Registry& r = registry();
  const std::lock_guard lock(r.mutex);
  if (!r.listed) {
    auto list = ask();
    if (!list.ok()) return list.status();
    r.devices = std::move(*list);
    r.listed = true;
  }
  return r.devices;
}

Result<DeviceInfo> device(int index) {
  const auto list = devices();
  if (!list.ok()) return list.status();
  if (index < 0 || index >= static_cast<int>(list->size())) {
    return Status(TESSERA_NO_DEVICE, format("there is no device {}; this machine has {}", index, list->size()));
  }
  return (*list)[static_cast<std::size_t>(index)];
}

std::string arch_of(const DeviceInfo& device) {
  // Only sm_90a has wgmma and setmaxnreg.
  return format("sm_{}{}{}", device.major, device.minor, device.major == 9 && device.minor == 0 ? "a" : "");
}

Result<CUcontext> primary_context(int index) {
  Registry& r = registry();
  const bool kept = index >= 0 && index < static_cast<int>(r.contexts.size());
  if (kept) {
    if (const CUcontext known = r.contexts[index].load(std::memory_order_acquire); known != nullptr) return known;
  }
  const auto info = device(index);
  if (!info.ok()) return info.status();
  const Driver& d = **driver();  // the device exists, so the driver does
  const std::lock_guard lock(r.mutex);
  if (kept) {
    if (const CUcontext known = r.contexts[index].load(std::memory_order_relaxed); known != nullptr) return known;
  }
  CUdevice handle = 0;
  CUcontext context = nullptr;
  if (Status s = status_of(d, d.device_get(&handle, index), "cuDeviceGet"); !s.ok()) return s;
  if (Status s = status_of(d, d.primary_retain(&context, handle), "cuDevicePrimaryCtxRetain"); !s.ok()) return s;
  if (kept) r.contexts[index].store(context, std::memory_order_release);
  return context;
}

Result<ContextScope> ContextScope::enter(int index) {
  const auto context = primary_context(index);
  if (!context.ok()) return context.status();
  const Driver* d = *driver();
  CUcontext current = nullptr;
  if (d->context_current(&current) == kCudaSuccess && current == *context) return ContextScope(nullptr);
  if (Status s = status_of(*d, d->context_push(*context), "cuCtxPushCurrent"); !s.ok()) return s;
  return ContextScope(d);
}

ContextScope::~ContextScope() {
  CUcontext popped = nullptr;
  if (driver_ != nullptr) driver_->context_pop(&popped);
}

}  // namespace tessera::cuda
