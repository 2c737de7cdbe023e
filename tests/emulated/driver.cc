// A libcuda.so.1 for machines without a GPU. Memory is the host's, and ends at a page that is not mapped. What the emulated
// NVRTC has compiled (nvrtc.cc) runs as it is, thread by thread (emulated.h), in order and on one stream, but each launch as late
// as possible, so that the next one may start early (PDL). Of other kernels a few are computed by plain loops (plain_kernels.h),
// the rest compute nothing. The clock advances by what a launch is said to cost: less if it takes less
// shared memory. So times show that the tuner's processes, checks and times go together; they say nothing about kernels.
//
// FAKE_CUDA_ARCH: 80 (the default), 75, 90 or a newer one. FAKE_CUDA_SMS: its multiprocessors. EMULATED_SEED: of the first
// launch that is emulated; the next has the next. FAKE_CUDA_BAD: wrong, fault or hang, for launches with FAKE_CUDA_BAD_SMEM
// bytes of shared memory. FAKE_CUDA_L2: bytes of an L2 cache; a launch takes 50 us less if not as many were filled since
// the last one.
#include <dlfcn.h>
#include <elf.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/arch.h"
#include "cuda/driver.h"
#include "emulated.h"
#include "plain_kernels.h"
#include "tile/tensor_map.h"

namespace {

using namespace tessera;  // NOLINT(google-build-using-namespace)
using cuda::CUdeviceptr;
using cuda::CUresult;

constexpr CUresult kInvalidValue = 1, kNoMemory = 2, kInvalidImage = 200, kFault = 700, kEmulationFault = 719;

double clock_ms = 0;
bool faulted = false;
std::string fault = "a fault that was asked for";

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "";
}
int number(const char* name, int otherwise) {
  const std::string text = environment(name);
  return text.empty() ? otherwise : std::atoi(text.c_str());
}
int arch() { return number("FAKE_CUDA_ARCH", 80); }
int shared_limit() { return limits_of(portable_arch(arch(), {})).shared_memory_per_block; }

double cost_ms(unsigned smem) { return 0.1 + smem / 1024 * 1e-3; }

int l2_bytes() { return number("FAKE_CUDA_L2", 0); }
bool cold = true;
double warm_ms() { return l2_bytes() > 0 && !std::exchange(cold, false) ? 0.05 : 0; }

// Of what is larger than any tensor here only the time is asked: how long it takes to move.
bool is_moved(std::size_t bytes) {
  clock_ms += static_cast<double>(bytes) * 1e-9;  // a TB a second
  cold = cold || bytes >= static_cast<std::size_t>(l2_bytes());
  return bytes < std::size_t{1} << 28;
}

constexpr std::size_t kMemory = std::size_t{1} << 33;

// Allocations end where nothing is mapped, but for up to 15 bytes, so that an access behind one is a fault.
class Memory {
 public:
  CUresult allocate(CUdeviceptr* at, std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    if (bytes > kMemory - taken_) return kNoMemory;
    const std::size_t used = (bytes + kPage - 1) / kPage * kPage, all = used + kPage;
    void* const mapped = mmap(nullptr, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) return kNoMemory;
    const auto begin = reinterpret_cast<CUdeviceptr>(mapped);
    mprotect(reinterpret_cast<void*>(begin + used), kPage, PROT_NONE);
    if (bytes <= kMostPoisoned) std::memset(mapped, 0xff, used);  // NaN
    *at = begin + used - (bytes + 15) / 16 * 16;
    allocated_[*at] = {mapped, all, bytes};
    taken_ += bytes;
    return cuda::kCudaSuccess;
  }
  CUresult free(CUdeviceptr at) {
    const std::lock_guard lock(mutex_);
    const auto found = allocated_.find(at);
    if (found == allocated_.end()) return kInvalidValue;
    munmap(found->second.mapped, found->second.all);
    taken_ -= found->second.bytes;
    allocated_.erase(found);
    return cuda::kCudaSuccess;
  }

 private:
  struct Allocation {
    void* mapped;
    std::size_t all, bytes;
  };
  static constexpr std::size_t kPage = 4096, kMostPoisoned = std::size_t{1} << 26;
  std::mutex mutex_;
  std::map<CUdeviceptr, Allocation> allocated_;
  std::size_t taken_ = 0;
};
Memory& memory() {
  static auto* const all = new Memory;  // outlives what is freed at exit
  return *all;
}

// A kernel in an image of the emulated NVRTC.
struct Emulated {
  void (*kernel)(const void* params);
  int cluster;
  unsigned params_bytes;
};

struct Function {
  std::string name;
  const Emulated* emulated = nullptr;
  emulated::Compute plain = nullptr;
};

struct alignas(64) Params {
  char bytes[64];
};

struct Launch {
  const Function* function;
  cuda::LaunchConfig config;
  bool early;  // may start before the preceding one has ended
  std::vector<Params> params;

  Launch(const Function& launched, const cuda::LaunchConfig& c, const void* from) : function(&launched), config(c) {
    const auto* const set = c.attributes;
    early =
        c.attribute_count > 0 && set->id == cuda::LaunchAttribute::kProgrammaticStreamSerialization && set->pdl != 0;
    const std::size_t bytes = launched.emulated == nullptr ? 0 : launched.emulated->params_bytes;
    params.resize(bytes / sizeof(Params) + 1);
    std::memcpy(params.data(), from, bytes);
  }
};

// The last launch of a kernel that is emulated, until something needs its results.
class Last {
 public:
  CUresult launch(const Launch& next) {
    static auto seed = static_cast<unsigned>(number("EMULATED_SEED", 0));
    const cuda::LaunchConfig& c = next.config;
    const emulated::Launch shape = {.grid = {c.grid_x, c.grid_y, c.grid_z},
                                    .threads = static_cast<int>(c.block_x),
                                    .cluster = next.function->emulated->cluster,
                                    .shared_bytes = c.dynamic_smem_bytes,
                                    .seed = seed++};
    auto params = next.params;
    const auto kernel = next.function->emulated->kernel;
    auto grid = std::make_unique<emulated::Grid>(shape, [kernel, of = params.data()] { kernel(of); });
    if (next.early && grid_ != nullptr) grid->start_early();
    if (const CUresult result = finish(); result != cuda::kCudaSuccess) return result;
    grid_ = std::move(grid);
    params_ = std::move(params);
    name_ = next.function->name;
    return cuda::kCudaSuccess;
  }
  CUresult finish() {
    if (grid_ == nullptr) return cuda::kCudaSuccess;
    const char* const wrong = std::exchange(grid_, nullptr)->run();
    if (wrong == nullptr) return cuda::kCudaSuccess;
    fault = name_ + ": " + wrong;
    faulted = wrong == emulated::kOutsideOfMemory;  // a GPU loses its context, too
    return faulted ? kFault : kEmulationFault;
  }

 private:
  std::unique_ptr<emulated::Grid> grid_;
  std::vector<Params> params_;  // that the grid reads
  std::string name_;
};

std::recursive_mutex one_at_a_time;
Last& last() {
  static auto* const launch = new Last;  // not destroyed at exit, when the kernels' libraries may be gone
  return *launch;
}
CUresult settled() {
  const std::lock_guard lock(one_at_a_time);
  const CUresult result = last().finish();
  return faulted ? kFault : result;
}

CUresult run(const Launch& launch) {
  return launch.function->emulated != nullptr ? last().launch(launch) : last().finish();
}

struct Captured {
  double cost;
  Launch launch;
};
std::vector<Captured>* capturing = nullptr;

void* open_library(const void* image, std::size_t bytes) {
  char path[] = "/tmp/emulated_kernel_XXXXXX";
  const int file = mkstemp(path);
  if (file < 0) return nullptr;
  const bool written = write(file, image, bytes) == static_cast<ssize_t>(bytes);
  close(file);
  void* const library = written ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : nullptr;
  unlink(path);
  return library;
}

// null: it cannot be loaded.
const Emulated* load_emulated(const void* image, const Elf64_Ehdr& header) {
  void* const library = open_library(image, header.e_shoff + std::size_t{header.e_shentsize} * header.e_shnum);
  if (library == nullptr) return nullptr;
  return new Emulated{reinterpret_cast<void (*)(const void*)>(dlsym(library, "emulated_kernel")),
                      *static_cast<const int*>(dlsym(library, "emulated_cluster")),
                      *static_cast<const unsigned*>(dlsym(library, "emulated_params_bytes"))};
}

template <class T>
CUresult give(T* to, T value) {
  *to = value;
  return cuda::kCudaSuccess;
}

CUresult fill(CUdeviceptr at, const void* word, std::size_t size, std::size_t count) {
  if (const CUresult result = settled(); result != cuda::kCudaSuccess) return result;
  for (std::size_t n = 0; n < count; ++n) std::memcpy(reinterpret_cast<char*>(at) + n * size, word, size);
  return cuda::kCudaSuccess;
}

CUresult copy(void* to, const void* from, std::size_t bytes) {
  if (const CUresult result = settled(); result != cuda::kCudaSuccess) return result;
  std::memcpy(to, from, bytes);
  return cuda::kCudaSuccess;
}

}  // namespace

#define FAKE extern "C" __attribute__((visibility("default"))) CUresult

FAKE cuInit(unsigned) { return 0; }
FAKE cuDriverGetVersion(int* version) { return give(version, 13000); }
FAKE cuGetErrorName(CUresult, const char** name) { return give(name, "CUDA_ERROR_FAKE"); }
FAKE cuGetErrorString(CUresult, const char** text) { return give(text, fault.c_str()); }
FAKE cuDeviceGetCount(int* count) { return give(count, 1); }
FAKE cuDeviceGet(int* device, int) { return give(device, 0); }
FAKE cuDeviceGetName(char* name, int size, int) {
  std::strncpy(name, "Fake GPU", static_cast<std::size_t>(size));
  return 0;
}
FAKE cuDeviceGetAttribute(int* value, int which, int) {
  switch (which) {
    case 16:
      return give(value, number("FAKE_CUDA_SMS", 108));
    case 38:
      return give(value, l2_bytes());
    case 39:
      return give(value, 2048);
    case 75:
      return give(value, arch() / 10);
    case 76:
      return give(value, arch() % 10);
    case 81:
      return give(value, shared_limit() + 1024);
    case 97:
      return give(value, shared_limit());
    default:
      return give(value, 0);
  }
}
FAKE cuDeviceTotalMem_v2(std::size_t* bytes, int) { return give(bytes, kMemory); }
FAKE cuDevicePrimaryCtxRetain(void** context, int) { return give(context, static_cast<void*>(&clock_ms)); }
FAKE cuCtxPushCurrent_v2(void*) { return 0; }
FAKE cuCtxPopCurrent_v2(void**) { return 0; }
FAKE cuCtxGetCurrent(void** context) { return give(context, static_cast<void*>(nullptr)); }
FAKE cuModuleLoadDataEx(const void** module, const void* image, unsigned, int*, void**) {
  Elf64_Ehdr header;
  std::memcpy(&header, image, sizeof header);
  const bool is_emulated = std::memcmp(header.e_ident, ELFMAG, SELFMAG) == 0 && header.e_machine == EM_X86_64;
  *module = is_emulated ? load_emulated(image, header) : nullptr;
  if (!is_emulated || *module != nullptr) return cuda::kCudaSuccess;
  fault = "an image of the emulated NVRTC that is no shared library, or not one for this driver";
  return kInvalidImage;
}
FAKE cuModuleUnload(void*) { return 0; }
FAKE cuModuleGetFunction(const void** function, const void* module, const char* name) {
  const auto* const emulated = static_cast<const Emulated*>(module);
  const auto plain = emulated == nullptr ? emulated::plain_kernel(name) : nullptr;
  return give(function, static_cast<const void*>(new Function{name, emulated, plain}));
}
FAKE cuFuncGetAttribute(int* value, int, void*) { return give(value, 0); }
FAKE cuFuncSetAttribute(void*, int, int) { return 0; }
FAKE cuLaunchKernelEx(const cuda::LaunchConfig* config, const Function* function, void** params, void**) {
  const std::lock_guard lock(one_at_a_time);
  if (faulted) return kFault;
  const bool fits = config->grid_y <= 65535 && config->grid_z <= 65535 && config->block_x <= 1024 &&
                    config->dynamic_smem_bytes <= static_cast<unsigned>(shared_limit());
  if (!fits) return kInvalidValue;
  const double cost = cost_ms(config->dynamic_smem_bytes);
  const Launch launch(*function, *config, params[0]);
  if (capturing != nullptr) {
    capturing->push_back({cost, launch});
    return 0;
  }
  clock_ms += cost - warm_ms();
  const std::string bad = environment("FAKE_CUDA_BAD_SMEM") == std::to_string(config->dynamic_smem_bytes)
                              ? environment("FAKE_CUDA_BAD")
                              : "";
  if (bad == "wrong") return 0;  // O stays as it was
  if (bad == "fault") faulted = true;
  while (bad == "hang") sleep(1);
  if (faulted) return 0;
  const CUresult result = run(launch);
  if (result == cuda::kCudaSuccess && function->plain != nullptr) function->plain(*config, params[0]);
  return result;
}
FAKE cuMemGetInfo_v2(std::size_t* available, std::size_t* total) {
  *available = kMemory;
  return give(total, kMemory);
}
FAKE cuMemAlloc_v2(CUdeviceptr* at, std::size_t bytes) { return faulted ? kFault : memory().allocate(at, bytes); }
FAKE cuMemFree_v2(CUdeviceptr at) {
  const CUresult result = settled(), freed = memory().free(at);
  return result != cuda::kCudaSuccess ? result : freed;
}
FAKE cuMemAllocAsync(CUdeviceptr* at, std::size_t bytes, void*) { return cuMemAlloc_v2(at, bytes); }
FAKE cuMemFreeAsync(CUdeviceptr at, void*) { return cuMemFree_v2(at); }
FAKE cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, std::size_t bytes, void*) {
  return copy(reinterpret_cast<void*>(to), from, bytes);
}
FAKE cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, std::size_t bytes, void*) {
  return copy(to, reinterpret_cast<const void*>(from), bytes);
}
FAKE cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, std::size_t bytes, void*) {
  return is_moved(bytes) ? copy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes) : settled();
}
FAKE cuMemsetD8Async(CUdeviceptr at, unsigned char word, std::size_t count, void*) {
  return is_moved(count) ? fill(at, &word, 1, count) : settled();
}
FAKE cuMemsetD16Async(CUdeviceptr at, unsigned short word, std::size_t count, void*) {
  return fill(at, &word, 2, count);
}
FAKE cuMemsetD32Async(CUdeviceptr at, unsigned word, std::size_t count, void*) { return fill(at, &word, 4, count); }
FAKE cuStreamCreate(void** stream, unsigned) { return give(stream, static_cast<void*>(&clock_ms)); }
FAKE cuStreamDestroy_v2(void*) { return 0; }
FAKE cuStreamSynchronize(void*) { return settled(); }
FAKE cuEventCreate(void** event, unsigned) { return give(event, static_cast<void*>(new double(0))); }
FAKE cuEventDestroy_v2(void* event) {
  delete static_cast<double*>(event);
  return 0;
}
FAKE cuEventRecord(void* event, void*) { return give(static_cast<double*>(event), clock_ms); }
FAKE cuEventSynchronize(void*) { return settled(); }
FAKE cuEventElapsedTime(float* ms, void* begin, void* end) {
  return give(ms, static_cast<float>(*static_cast<double*>(end) - *static_cast<double*>(begin)));
}
FAKE cuStreamBeginCapture_v2(void*, int) {
  capturing = new std::vector<Captured>;
  return 0;
}
FAKE cuStreamEndCapture(void*, void** graph) {
  *graph = capturing;
  capturing = nullptr;
  return 0;
}
FAKE cuGraphInstantiateWithFlags(void** exec, void* graph, unsigned long long) { return give(exec, graph); }
FAKE cuGraphLaunch(void* exec, void*) {
  const std::lock_guard lock(one_at_a_time);
  for (const Captured& one : *static_cast<std::vector<Captured>*>(exec)) {
    clock_ms += one.cost - warm_ms();
    if (const CUresult result = run(one.launch); result != cuda::kCudaSuccess) return result;
  }
  return faulted ? kFault : 0;
}
FAKE cuGraphDestroy(void* graph) {
  delete static_cast<std::vector<Captured>*>(graph);
  return 0;
}
FAKE cuGraphExecDestroy(void*) { return 0; }
// As tensor_of() of ptx/tma.cuh reads it. What the real one refuses, this does, too.
FAKE cuTensorMapEncodeTiled(void* map, int, unsigned, void* address, const std::uint64_t* extents,
                            const std::uint64_t* strides, const std::uint32_t* box, const std::uint32_t*, int, int, int,
                            int) {
  const auto chunks = [](auto bytes) { return bytes % 16 == 0; };
  bool valid = chunks(reinterpret_cast<std::uintptr_t>(address));
  for (int n = 0; n < 3; ++n) valid = valid && chunks(strides[n]) && strides[n] < std::uint64_t{1} << 40;
  for (int n = 0; n < 4; ++n) valid = valid && extents[n] > 0 && extents[n] <= std::uint64_t{1} << 32 && box[n] <= 256;
  if (!valid) return kInvalidValue;
  auto* words = static_cast<TensorMap*>(map)->words;
  words[0] = reinterpret_cast<std::uintptr_t>(address);
  for (int n = 0; n < 3; ++n) words[1 + n] = strides[n];
  for (int n = 0; n < 4; ++n) words[4 + n] = extents[n];
  for (int n = 0; n < 4; ++n) words[8 + n] = box[n];
  return 0;
}
