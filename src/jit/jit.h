// A kernel instance and a target → a compiled image: from memory, from disk, or from NVRTC.
//
// An instance names a header under kernels/, a function template in it, and a Config as text; the program that NVRTC
// gets is those put together (program_text). Environment: TESSERA_CACHE_DIR (cache.h), TESSERA_NVRTC (nvrtc.h),
// TESSERA_KERNEL_SOURCES (sources.h) and TESSERA_NO_COMPILE=1, which makes a kernel that is in no cache an error
// instead of compiling it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "jit/cache.h"
#include "jit/image.h"
#include "jit/sources.h"
#include "ops/status.h"

namespace tessera::jit {

struct KernelInstance {
  std::string name;    // for people: "backward_preprocess_fp16_v8"
  std::string header;  // "attention/backward_preprocess.cuh"
  std::string entry;   // template <Config> void entry(const Params&)
  std::string params;  // type of Params
  std::string config;  // "BackwardPreprocessConfig{.dtype = DType::kFloat16, ...}": a designated initialiser
  int threads = 0;     // per block
  int min_blocks = 0;  // per SM, for __launch_bounds__; 0: left to ptxas
  int dynamic_smem_bytes = 0;
  bool starts_early = false;  // from sm_90 on it waits by itself for the kernels before it (ptx/grid.cuh)

  bool operator==(const KernelInstance&) const = default;
};

struct Target {
  std::string arch;  // "sm_75" ... "sm_90a"
  bool ptx = false;  // PTX for that architecture, which any newer GPU can run (but sm_90a's); else a cubin

  bool operator==(const Target&) const = default;
};

// The __global__ function of every program.
inline constexpr const char* kEntryPoint = "tessera_kernel";

// What NVRTC is given for an instance.
std::string program_text(const KernelInstance& instance);

// The options for a target, but for those that test code adds.
std::vector<std::string> compile_options(const Target& target);

struct CompileRequest {
  KernelInstance instance;
  Target target;
  std::vector<Source> extra_sources = {};  // found before kernel_sources()
  std::vector<std::string> extra_options = {};
};

// Identifies what would be compiled and by which compiler; needs NVRTC only for its version.
Result<Key> key_of(const CompileRequest& request);

// Straight to NVRTC, past every cache and TESSERA_NO_COMPILE.
Result<std::shared_ptr<const Image>> compile(const CompileRequest& request);

enum class Origin { kCompiled, kDisk, kMemory };
constexpr const char* name_of(Origin origin) {
  return origin == Origin::kCompiled ? "compiled" : origin == Origin::kDisk ? "disk" : "memory";
}

struct Found {
  std::shared_ptr<const Image> image;
  Origin origin = Origin::kCompiled;
};

// Any thread; threads that ask for the same image at once wait for one of them to make it. A cache folder that cannot
// be used costs only time: cache_state() says why.
Result<Found> get(const CompileRequest& request);
inline Result<Found> get(const KernelInstance& instance, const Target& target) {
  return get({instance, target, {}, {}});
}

// Of the folder that the environment names now.
CacheState cache_state();

// Forgets images held in memory; kernels already loaded on a device stay.
void clear_memory_cache();

// True where TESSERA_NO_COMPILE is set to anything but 0.
bool compiling_forbidden();

// Registers, spills and shared memory out of the compiler's log.
Resources parse_resources(const std::string& log);

}  // namespace tessera::jit
