// NVRTC, opened with dlopen the first time it is needed.
//
// Where it is looked for, in order; the first that loads is used:
//   1. TESSERA_NVRTC, a file or a folder. Where it is set, nothing else is tried.
//   2. A CUDA toolkit: CUDA_HOME, CUDA_PATH, /usr/local/cuda, /usr/local/cuda-*, the newest first; in each lib64, lib
//      and targets/x86_64-linux/lib.
//   3. The `nvidia` Python wheels (nvidia/cu13/lib, nvidia/cu12/lib, nvidia/cuda_nvrtc/lib): in VIRTUAL_ENV, under the
//      prefix of the running program, in the site-packages that hold this library, and in a `venv` beside the folder of
//      the program or of the library.
//   4. The loader's own path: libnvrtc.so.13, libnvrtc.so.12, libnvrtc.so.
#pragma once

#include <string>
#include <vector>

#include "jit/sources.h"
#include "ops/status.h"

namespace tessera::jit {

struct NvrtcPlace {
  std::string path;     // a file to dlopen
  std::string reason;   // "TESSERA_NVRTC", "toolkit", "wheel in VIRTUAL_ENV", "the loader's path"
  bool exists = false;  // the file is there; always true for the loader's names, which only dlopen can judge
};

// Every place, in order.
std::vector<NvrtcPlace> nvrtc_places();

struct NvrtcInfo {
  std::string path;
  std::string reason;
  int major = 0;
  int minor = 0;
};

// The NVRTC in use, opening it first where needed; or why there is none, with every place that was tried.
Result<NvrtcInfo> nvrtc_info();

struct NvrtcOutput {
  std::string image;
  std::string log;
  double seconds = 0;
};

// image is a cubin for --gpu-architecture=sm_*, PTX for compute_*. The headers are found by their paths.
Result<NvrtcOutput> nvrtc_compile(const std::string& name, const std::string& program,
                                  const std::vector<const Source*>& headers, const std::vector<std::string>& options,
                                  bool ptx);

}  // namespace tessera::jit
