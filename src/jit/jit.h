// A kernel instance and a target → a compiled image: from memory, from disk, or from NVRTC.
//
// An instance names a header under kernels/, a function template in it, and a Config as text; program_text combines
// them into the program that NVRTC compiles. Environment: TESSERA_CACHE_DIR (cache.h), TESSERA_NVRTC (nvrtc.h),
// TESSERA_KERNEL_SOURCES (sources.h) and TESSERA_NO_COMPILE=1, with which a kernel that is in no cache is an error
// instead of being compiled.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "jit/cache.h"
#include "jit/image.h"
#include "jit/sources.h"

namespace tessera::jit {

struct KernelInstance {
  std::string name;    // for messages: "backward_preprocess_fp16_v8"
  std::string header;  // "attention/backward_preprocess.cuh"
  std::string entry;   // template <Config> void entry(const Params&)
  std::string params;  // type of Params
  std::string config;  // "BackwardPreprocessConfig{.dtype = DType::kFloat16, ...}": a designated initialiser
  int threads = 0;     // per CTA
  int min_blocks = 0;  // CTAs per SM, for __launch_bounds__; 0: left to ptxas
  int dynamic_smem_bytes = 0;
  // Programmatic dependent launch: from sm_90 on, the kernel itself waits for the preceding grids (ptx/griddepcontrol.cuh).
  bool pdl = false;
  int cluster = 1;  // CTAs per thread block cluster; the grid is a multiple of it

  bool operator==(const KernelInstance&) const = default;
};

struct Target {
  std::string arch;  // "sm_75" ... "sm_90a"
  bool ptx = false;  // PTX, which any newer GPU can run too (except sm_90a's); else a cubin

  bool operator==(const Target&) const = default;
};

// The name of the program's __global__ function, as profilers show it: "tessera_attention_forward".
inline std::string entry_point(const KernelInstance& instance) { return "tessera_" + instance.entry; }

// The program that NVRTC compiles for an instance.
std::string program_text(const KernelInstance& instance);

// The options for a target, without those that tests add.
std::vector<std::string> compile_options(const Target& target);

struct CompileRequest {
  KernelInstance instance;
  Target target;
  std::vector<Source> extra_sources = {};  // found before kernel_sources()
  std::vector<std::string> extra_options = {};
};

// Identifies what would be compiled, and by which build of NVRTC; nothing is compiled.
Result<Key> key_of(const CompileRequest& request);

// Compiles with NVRTC, ignoring every cache and TESSERA_NO_COMPILE.
Result<std::shared_ptr<const Image>> compile(const CompileRequest& request);

enum class Origin { kCompiled, kDisk, kMemory };
constexpr const char* name_of(Origin origin) {
  return origin == Origin::kCompiled ? "compiled" : origin == Origin::kDisk ? "disk" : "memory";
}

struct Found {
  std::shared_ptr<const Image> image;
  Origin origin = Origin::kCompiled;
};

// May be called from any thread; threads that ask for the same image at once wait for one of them to compile it. A
// cache folder that cannot be used costs only time: cache_state() says why.
Result<Found> get(const CompileRequest& request);
inline Result<Found> get(const KernelInstance& instance, const Target& target) {
  return get({instance, target, {}, {}});
}

// The state of the folder that the environment names now.
CacheState cache_state();

// Drops the images held in memory; kernels already loaded on a device stay loaded.
void clear_memory_cache();

// True if TESSERA_NO_COMPILE is set to anything but 0.
bool compiling_forbidden();

// Reads registers, spills and shared memory from the compiler's log.
Resources parse_resources(const std::string& log);

}  // namespace tessera::jit
