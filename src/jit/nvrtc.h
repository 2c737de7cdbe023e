// NVRTC, opened with dlopen the first time it is needed.
//
// It is searched for in this order:
//   1. TESSERA_NVRTC, a file or a folder. If it is set, nothing else is tried.
//   2. A CUDA toolkit: CUDA_HOME, CUDA_PATH, /usr/local/cuda, /usr/local/cuda-*, the newest first; in each lib64, lib
//      and targets/x86_64-linux/lib.
//   3. The `nvidia` Python wheels (nvidia/cu13/lib, nvidia/cu12/lib, nvidia/cuda_nvrtc/lib): in VIRTUAL_ENV, under the
//      prefix of the running program, in the site-packages that hold this library, and in a `venv` beside the folder of
//      the program or of the library.
//   4. The loader's own path: libnvrtc.so.13, libnvrtc.so.12, libnvrtc.so.
//
// The first NVRTC whose output the installed driver loads is used. A driver loads cubins of its own CUDA major version
// and of older ones, whatever their minor version, but it loads PTX only of CUDA versions up to its own; NVRTC has no
// option to emit older PTX. Cubins and PTX may therefore come from different NVRTCs. Without a driver, the first that
// opens is used. If none fits the driver, the oldest is used, so that kernels can still be compiled and checked.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "jit/sources.h"

namespace tessera::jit {

struct NvrtcPlace {
  std::string path;     // a file to dlopen
  std::string reason;   // "TESSERA_NVRTC", "toolkit", "wheel in VIRTUAL_ENV", "the loader's path"
  bool exists = false;  // the file exists; always true for the loader's names, which only dlopen can judge

  // Filled in by a search.
  int version = 0;           // 13000 for 13.0; 0: it was not opened
  bool used = false;         // at most one place of a search
  std::string outcome = {};  // "used", or why not: "not found", dlopen's message, "passed over: ...", "not needed"
};

// Every place, in order.
std::vector<NvrtcPlace> nvrtc_places();

struct NvrtcInfo {
  std::string path;    // with symbolic links resolved, so that a toolkit's file shows its full version
  std::string reason;  // of the place
  int major = 0;
  int minor = 0;
  std::string build;            // tells builds of one version apart (build_id.h)
  bool fits = true;             // the driver loads what it emits
  std::string note;             // if it does not fit: why, and what to do about it
  std::vector<int> archs = {};  // what it compiles for: 75, 80, ...; empty: it did not say

  int version() const { return 1000 * major + 10 * minor; }
};

struct NvrtcSearch {
  int driver_version = 0;             // 0: no driver
  std::vector<NvrtcPlace> places;     // in order, each with its outcome
  Result<NvrtcInfo> info = Status();  // the one to use; or why there is none, with the outcome of every place
};

// The NVRTC that cubins (or PTX) are compiled with, opening it first if needed. What was found is kept for the life of
// the process; a search that found nothing is repeated at the next call.
NvrtcSearch nvrtc_search(bool ptx = false);
Result<NvrtcInfo> nvrtc_info(bool ptx = false);  // its info alone

// The CUDA version that the driver supports, as cuDriverGetVersion gives it: 12040 for 12.4; 0: no driver. Asked once,
// of libcuda.so.1 itself, since the answer must not depend on whether a device was used before.
int driver_version();

// The rule of the search. Versions are written as 12040 for 12.4; driver 0: there is none, and everything fits.
constexpr bool fits_driver(int nvrtc, int driver, bool ptx) {
  return driver == 0 || (ptx ? nvrtc <= driver : nvrtc / 1000 <= driver / 1000);
}

// The index of the NVRTC to use. versions: in order of preference; 0: it cannot be used. -1: none can.
int choose_nvrtc(std::span<const int> versions, int driver, bool ptx);

// Searches these places and keeps nothing open; nvrtc_search(ptx) is this for nvrtc_places() and driver_version().
NvrtcSearch search_places(std::vector<NvrtcPlace> places, int driver, bool ptx);

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
