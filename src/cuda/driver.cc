#include "cuda/driver.h"

#include <dlfcn.h>

#include <atomic>
#include <mutex>
#include <vector>

#include "base/format.h"
#include "jit/nvrtc.h"

namespace tessera::cuda {
namespace {

// The names are the versioned ones that the library exports; in cuda.h, macros map the plain names to them.
std::vector<std::string> resolve(void* library, Driver& d) {
  std::vector<std::string> missing;
  const auto find = [&](const char* name, auto& function) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    if (function == nullptr) missing.emplace_back(name);
  };
  find("cuInit", d.init);
  find("cuDriverGetVersion", d.driver_version);
  find("cuGetErrorName", d.error_name);
  find("cuGetErrorString", d.error_string);
  find("cuDeviceGetCount", d.device_count);
  find("cuDeviceGet", d.device_get);
  find("cuDeviceGetName", d.device_name);
  find("cuDeviceGetAttribute", d.device_attribute);
  find("cuDeviceTotalMem_v2", d.device_memory);
  find("cuDevicePrimaryCtxRetain", d.primary_retain);
  find("cuCtxPushCurrent_v2", d.context_push);
  find("cuCtxPopCurrent_v2", d.context_pop);
  find("cuCtxGetCurrent", d.context_current);
  find("cuModuleLoadDataEx", d.module_load);
  find("cuModuleUnload", d.module_unload);
  find("cuModuleGetFunction", d.module_function);
  find("cuFuncGetAttribute", d.function_attribute);
  find("cuFuncSetAttribute", d.function_set_attribute);
  find("cuLaunchKernelEx", d.launch);
  find("cuMemGetInfo_v2", d.memory_info);
  find("cuMemAlloc_v2", d.allocate);
  find("cuMemFree_v2", d.free);
  find("cuMemAllocAsync", d.allocate_on_stream);
  find("cuMemFreeAsync", d.free_on_stream);
  find("cuMemcpyHtoDAsync_v2", d.copy_to_device);
  find("cuMemcpyDtoHAsync_v2", d.copy_to_host);
  find("cuMemcpyDtoDAsync_v2", d.copy_on_device);
  find("cuMemsetD8Async", d.set_bytes);
  find("cuMemsetD16Async", d.set_words16);
  find("cuMemsetD32Async", d.set_words32);
  find("cuStreamCreate", d.stream_create);
  find("cuStreamDestroy_v2", d.stream_destroy);
  find("cuStreamSynchronize", d.stream_synchronize);
  find("cuEventCreate", d.event_create);
  find("cuEventDestroy_v2", d.event_destroy);
  find("cuEventRecord", d.event_record);
  find("cuEventSynchronize", d.event_synchronize);
  find("cuEventElapsedTime", d.event_elapsed);
  find("cuStreamBeginCapture_v2", d.capture_begin);
  find("cuStreamEndCapture", d.capture_end);
  find("cuGraphInstantiateWithFlags", d.graph_instantiate);
  find("cuGraphLaunch", d.graph_launch);
  find("cuGraphDestroy", d.graph_destroy);
  find("cuGraphExecDestroy", d.graph_exec_destroy);
  d.tensor_map_encode = reinterpret_cast<decltype(d.tensor_map_encode)>(dlsym(library, "cuTensorMapEncodeTiled"));
  return missing;
}

// If the driver refused an image and the NVRTC that compiled it does not fit the driver: a line that says so.
std::string refused_image(CUresult result) {
  // CUresult of cuda.h.
  constexpr CUresult kInvalidImage = 200, kNoBinaryForGpu = 209, kInvalidPtx = 218, kUnsupportedPtxVersion = 222,
                     kInvalidSource = 300;
  const bool ptx = result == kInvalidPtx || result == kUnsupportedPtxVersion;
  if (!ptx && result != kInvalidImage && result != kNoBinaryForGpu && result != kInvalidSource) return "";
  const auto nvrtc = jit::nvrtc_info(ptx);
  return nvrtc.ok() && !nvrtc->fits ? "\n" + nvrtc->note : "";
}

}  // namespace

Result<const Driver*> driver() {
  static std::mutex mutex;
  static std::atomic<const Driver*> loaded{nullptr};  // never closed: kernels may run until the process exits
  if (const Driver* known = loaded.load(std::memory_order_acquire); known != nullptr) return known;
  const std::lock_guard lock(mutex);
  if (const Driver* known = loaded.load(std::memory_order_relaxed); known != nullptr) return known;

  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    return Status(TESSERA_NO_DEVICE, format("no CUDA driver: {}", dlerror()));
  }
  Driver found = {};
  const std::vector<std::string> missing = resolve(library, found);
  if (!missing.empty()) {
    dlclose(library);
    return Status(TESSERA_NO_DEVICE,
                  format("the CUDA driver is too old, 11.8 or newer is needed: it has no {}", join(missing, ", ")));
  }
  if (const CUresult result = found.init(0); result != kCudaSuccess) {
    const Status failure = status_of(found, result, "cuInit");
    dlclose(library);
    return Status(TESSERA_NO_DEVICE, failure.message());
  }
  const Driver* const kept = new Driver(found);
  loaded.store(kept, std::memory_order_release);
  return kept;
}

Status status_of(const Driver& driver, CUresult result, const std::string& what) {
  if (result == kCudaSuccess) return {};
  const char* name = nullptr;
  const char* text = nullptr;
  driver.error_name(result, &name);
  driver.error_string(result, &text);
  return Status(result == kCudaOutOfMemory ? TESSERA_OUT_OF_MEMORY : TESSERA_CUDA_FAILED,
                format("{}: {} ({}){}", what, name != nullptr ? name : format("CUDA error {}", result),
                       text != nullptr ? text : "no description", refused_image(result)));
}

}  // namespace tessera::cuda
