#include "cuda/kernel.h"

#include <chrono>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <tuple>

#include "base/format.h"
#include "cuda/code_arch.h"

namespace tessera::cuda {
namespace {

// CUfunction_attribute and CUjit_option of cuda.h.
enum FunctionAttribute {
  kSharedSize = 1,
  kLocalSize = 3,
  kRegisters = 4,
  kMaxDynamicSharedSize = 8,
  kNonPortableClusterSize = 14
};
enum JitOption { kErrorLogBuffer = 5, kErrorLogBufferSize = 6 };

constexpr int kOldestArch = 75;
constexpr int kPortableCluster = 8;         // CTAs; more need the kernel's consent
constexpr int kOldestDriverForPdl = 12030;  // older drivers cannot capture such a launch into a graph

using LoadedKey = std::tuple<int, std::string, int, std::string, bool>;  // device, program, dynamic smem, arch, ptx

struct Loaded {
  std::mutex mutex;
  std::map<LoadedKey, std::unique_ptr<const Kernel>> kernels;
};

// Never destroyed, and its modules never unloaded: the driver may be unloaded before static destructors run.
Loaded& loaded_kernels() {
  static Loaded* instance = new Loaded;
  return *instance;
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Code for sm_90 and newer waits for the preceding grids itself (ptx/griddepcontrol.cuh). target: "sm_90a", or "compute_90" for
// PTX.
bool supports_pdl(const Driver& d, const std::string& target) {
  int version = 0;
  return std::atoi(target.c_str() + target.find('_') + 1) >= 90 && d.driver_version(&version) == kCudaSuccess &&
         version >= kOldestDriverForPdl;
}

Result<std::unique_ptr<const Kernel>> load_module(const Driver& d, int device, const jit::KernelInstance& instance,
                                                  const jit::Image& image) {
  const auto start = std::chrono::steady_clock::now();
  char log[4096] = "";
  int options[] = {kErrorLogBuffer, kErrorLogBufferSize};
  void* values[] = {log, reinterpret_cast<void*>(sizeof log - 1)};
  CUmodule module = nullptr;
  if (Status s = status_of(d, d.module_load(&module, image.bytes.data(), 2, options, values),
                           format("loading {} for {}", instance.name, image.target));
      !s.ok()) {
    return Status(s.code(), log[0] != '\0' ? s.message() + "\n" + log : s.message());
  }
  auto kernel = std::make_unique<Kernel>();
  kernel->instance = instance;
  kernel->device = device;
  Status s = status_of(d, d.module_function(&kernel->function, module, jit::entry_point(instance).c_str()),
                       "finding " + instance.name);
  if (s.ok() && instance.dynamic_smem_bytes > 0) {
    s = status_of(d, d.function_set_attribute(kernel->function, kMaxDynamicSharedSize, instance.dynamic_smem_bytes),
                  format("giving {} {} bytes of dynamic shared memory", instance.name, instance.dynamic_smem_bytes));
  }
  if (s.ok() && instance.cluster > kPortableCluster) {
    s = status_of(d, d.function_set_attribute(kernel->function, kNonPortableClusterSize, 1),
                  format("allowing {} clusters of {} CTAs", instance.name, instance.cluster));
  }
  if (!s.ok()) {
    d.module_unload(module);
    return s;
  }
  kernel->pdl = instance.pdl && supports_pdl(d, image.target);
  d.function_attribute(&kernel->registers, kRegisters, kernel->function);
  d.function_attribute(&kernel->local_bytes, kLocalSize, kernel->function);
  d.function_attribute(&kernel->static_smem_bytes, kSharedSize, kernel->function);
  kernel->load_seconds = seconds_since(start);
  return std::unique_ptr<const Kernel>(std::move(kernel));
}

}  // namespace

Result<const Kernel*> load_kernel(int device_index, const jit::KernelInstance& instance,
                                  const jit::Target& target) try {
  const LoadedKey key(device_index, jit::program_text(instance), instance.dynamic_smem_bytes, target.arch, target.ptx);
  Loaded& loaded = loaded_kernels();
  {
    const std::lock_guard lock(loaded.mutex);
    const auto known = loaded.kernels.find(key);
    if (known != loaded.kernels.end()) return known->second.get();
  }

  const auto scope = ContextScope::enter(device_index);
  if (!scope.ok()) return scope.status();
  const auto start = std::chrono::steady_clock::now();
  const auto found = jit::get(instance, target);
  if (!found.ok()) return found.status();
  const double image_seconds = seconds_since(start);

  // Without the lock, since the driver may have to compile PTX. If another thread was faster, its kernel is used, and
  // this thread's module stays loaded, unused.
  auto module = load_module(**driver(), device_index, instance, *found->image);
  if (!module.ok()) return module.status();
  auto kernel = std::make_unique<Kernel>(**module);
  kernel->origin = found->origin;
  kernel->image_seconds = image_seconds;
  const auto info = device(device_index);
  if (!info.ok()) return info.status();
  kernel->multiprocessors = info->multiprocessors;
  const std::lock_guard lock(loaded.mutex);
  return loaded.kernels.emplace(key, std::move(kernel)).first->second.get();
} catch (const std::bad_alloc&) {
  return Status(TESSERA_OUT_OF_MEMORY, "out of host memory while loading a kernel");
}

Result<const Kernel*> load_kernel(int device_index, const jit::KernelInstance& instance) {
  const auto info = device(device_index);
  if (!info.ok()) return info.status();
  if (info->major * 10 + info->minor < kOldestArch) {
    return Status(TESSERA_UNSUPPORTED, format("device {} ({}) has compute capability {}.{}; 7.5 or newer is needed",
                                              device_index, info->name, info->major, info->minor));
  }
  const auto code = code_arch_of(*info);
  return code.ok() ? load_kernel(device_index, instance, code->target) : code.status();
}

Status launch(const Kernel& kernel, Grid grid, const void* params, CUstream stream) {
  const auto scope = ContextScope::enter(kernel.device);
  if (!scope.ok()) return scope.status();
  const Driver& d = **driver();
  LaunchAttribute early = {.id = LaunchAttribute::kProgrammaticStreamSerialization, .unused = 0, .pdl = 1};
  const LaunchConfig config = {grid.x,
                               grid.y,
                               grid.z,
                               static_cast<unsigned>(kernel.instance.threads),
                               1,
                               1,
                               static_cast<unsigned>(kernel.instance.dynamic_smem_bytes),
                               stream,
                               kernel.pdl ? &early : nullptr,
                               kernel.pdl ? 1U : 0U};
  void* arguments[] = {const_cast<void*>(params)};
  const CUresult result = d.launch(&config, kernel.function, arguments, nullptr);
  if (result == kCudaSuccess) return {};
  return status_of(d, result,
                   format("launching {} with a grid of {} x {} x {}", kernel.instance.name, grid.x, grid.y, grid.z));
}

Status fill(int device, void* data, unsigned word, std::int64_t bytes, CUstream stream) {
  if (bytes == 0) return {};
  const auto scope = ContextScope::enter(device);
  if (!scope.ok()) return scope.status();
  const Driver& d = **driver();
  const CUresult result =
      d.set_words32(reinterpret_cast<CUdeviceptr>(data), word, static_cast<std::size_t>(bytes) / 4, stream);
  return result == kCudaSuccess ? Status() : status_of(d, result, "filling memory");
}

}  // namespace tessera::cuda
