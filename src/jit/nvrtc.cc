#include "jit/nvrtc.h"

#include <dlfcn.h>
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <mutex>

#include "base/format.h"
#include "jit/build_id.h"

namespace tessera::jit {
namespace {

// The part of nvrtc.h that is used.
using Program = struct NvrtcProgramTag*;
using NvrtcResult = int;
constexpr NvrtcResult kSuccess = 0;
constexpr NvrtcResult kInvalidOption = 5;

struct CloseLibrary {
  void operator()(void* library) const { dlclose(library); }
};

struct Nvrtc {
  std::unique_ptr<void, CloseLibrary> library;
  NvrtcResult (*version)(int*, int*) = nullptr;
  const char* (*error_string)(NvrtcResult) = nullptr;
  NvrtcResult (*create)(Program*, const char*, const char*, int, const char* const*, const char* const*) = nullptr;
  NvrtcResult (*destroy)(Program*) = nullptr;
  NvrtcResult (*compile)(Program, int, const char* const*) = nullptr;
  NvrtcResult (*log_size)(Program, std::size_t*) = nullptr;
  NvrtcResult (*log)(Program, char*) = nullptr;
  NvrtcResult (*cubin_size)(Program, std::size_t*) = nullptr;
  NvrtcResult (*cubin)(Program, char*) = nullptr;
  NvrtcResult (*ptx_size)(Program, std::size_t*) = nullptr;
  NvrtcResult (*ptx)(Program, char*) = nullptr;
  NvrtcResult (*arch_count)(int*) = nullptr;  // this and the next may be absent
  NvrtcResult (*archs)(int*) = nullptr;
  int major = 0;
  int minor = 0;

  int version_number() const { return 1000 * major + 10 * minor; }
};

bool is_file(const std::string& path) {
  struct stat info;
  return stat(path.c_str(), &info) == 0 && S_ISREG(info.st_mode);
}

std::string folder_of(const std::string& path) { return path.substr(0, std::min(path.rfind('/'), path.size())); }

constexpr int kOldest = 12000;  // of NVRTC

std::string version_text(int version) { return format("{}.{}", version / 1000, version % 1000 / 10); }

// Why the driver does not load what this NVRTC emits; it does not fit.
std::string misfit(int nvrtc, int driver, bool ptx) {
  if (ptx) {
    return format("NVRTC {} emits PTX that is newer than what the driver accepts, which supports CUDA {}",
                  version_text(nvrtc), version_text(driver));
  }
  return format("NVRTC {} emits cubins of CUDA {}, which the driver does not load: it supports CUDA {}",
                version_text(nvrtc), nvrtc / 1000, version_text(driver));
}

std::string advice(int driver, bool ptx, bool forced) {
  if (driver < kOldest) return format("Install a driver that supports CUDA {} or newer.", version_text(kOldest));
  const std::string wanted = ptx ? version_text(driver) + " or older" : format("{} or older", driver / 1000);
  if (forced) return format("Set TESSERA_NVRTC to an NVRTC of CUDA {}, or install a newer driver.", wanted);
  return format("Install an NVRTC of CUDA {}, or a newer driver.", wanted);
}

template <class Function>
bool resolve(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

Result<Nvrtc> open(const std::string& path) {
  Nvrtc nvrtc;
  nvrtc.library.reset(dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL));
  void* const library = nvrtc.library.get();
  if (library == nullptr) return Status(TESSERA_COMPILE_FAILED, dlerror());
  const bool complete =
      resolve(library, "nvrtcVersion", nvrtc.version) && resolve(library, "nvrtcGetErrorString", nvrtc.error_string) &&
      resolve(library, "nvrtcCreateProgram", nvrtc.create) && resolve(library, "nvrtcDestroyProgram", nvrtc.destroy) &&
      resolve(library, "nvrtcCompileProgram", nvrtc.compile) &&
      resolve(library, "nvrtcGetProgramLogSize", nvrtc.log_size) && resolve(library, "nvrtcGetProgramLog", nvrtc.log) &&
      resolve(library, "nvrtcGetCUBINSize", nvrtc.cubin_size) && resolve(library, "nvrtcGetCUBIN", nvrtc.cubin) &&
      resolve(library, "nvrtcGetPTXSize", nvrtc.ptx_size) && resolve(library, "nvrtcGetPTX", nvrtc.ptx);
  if (!complete || nvrtc.version(&nvrtc.major, &nvrtc.minor) != kSuccess) {
    return Status(TESSERA_COMPILE_FAILED, "not an NVRTC that emits cubins");
  }
  resolve(library, "nvrtcGetNumSupportedArchs", nvrtc.arch_count);
  resolve(library, "nvrtcGetSupportedArchs", nvrtc.archs);
  if (nvrtc.version_number() < kOldest) {
    return Status(TESSERA_COMPILE_FAILED,
                  format("version {}.{}; {} or newer is needed", nvrtc.major, nvrtc.minor, version_text(kOldest)));
  }
  return nvrtc;
}

std::vector<int> archs_of(const Nvrtc& nvrtc) {
  int count = 0;
  const bool says = nvrtc.arch_count != nullptr && nvrtc.archs != nullptr && nvrtc.arch_count(&count) == kSuccess;
  std::vector<int> archs(static_cast<std::size_t>(says ? std::max(count, 0) : 0));
  if (!archs.empty() && nvrtc.archs(archs.data()) != kSuccess) archs.clear();
  return archs;
}

// The file that dlopen found; for the loader's names that is not what was asked for.
std::string path_of(const Nvrtc& nvrtc, const std::string& asked) {
  Dl_info found = {};
  const bool known = dladdr(reinterpret_cast<const void*>(nvrtc.version), &found) != 0 && found.dli_fname != nullptr;
  return known ? found.dli_fname : asked;
}

std::string real_path(const std::string& path) {
  const std::unique_ptr<char, decltype(&std::free)> real(realpath(path.c_str(), nullptr), &std::free);
  return real ? real.get() : path;
}

// NVRTC opens its builtins by name alone and does not look beside itself; a library that is already open is found.
void open_builtins(const Nvrtc& nvrtc, const std::string& path) {
  for (const std::string& folder : {folder_of(path), folder_of(real_path(path))}) {
    const std::string builtins = format("{}/libnvrtc-builtins.so.{}.{}", folder, nvrtc.major, nvrtc.minor);
    if (is_file(builtins) && dlopen(builtins.c_str(), RTLD_NOW | RTLD_LOCAL) != nullptr) return;
  }
}

struct Searched {
  NvrtcSearch search;
  Nvrtc nvrtc;  // the one to use, open; if search.info is OK
};

Searched run_search(std::vector<NvrtcPlace> places, int driver, bool ptx) {
  Searched result{{driver, std::move(places), Status()}, {}};
  std::vector<NvrtcPlace>& all = result.search.places;
  std::vector<int> versions;
  for (NvrtcPlace& place : all) {
    versions.push_back(0);
    if (!place.exists) {
      place.outcome = "not found";
      continue;
    }
    auto opened = open(place.path);
    if (!opened.ok()) {
      place.outcome = opened.status().message();
      continue;
    }
    place.version = versions.back() = opened->version_number();
    const bool fits = fits_driver(place.version, driver, ptx);
    place.outcome = fits ? "used" : "passed over: " + misfit(place.version, driver, ptx);
    if (!fits) continue;  // closed here
    result.nvrtc = std::move(*opened);
    break;
  }
  const int chosen = choose_nvrtc(versions, driver, ptx);
  if (chosen < 0) {
    std::string tried;
    for (const NvrtcPlace& place : all) tried += format("\n  {} ({}): {}", place.path, place.reason, place.outcome);
    result.search.info = Status(
        TESSERA_COMPILE_FAILED,
        "NVRTC, which compiles the kernels, was not found. Install the Python package nvidia-cuda-nvrtc or a CUDA "
        "toolkit, or set TESSERA_NVRTC to libnvrtc.so or its folder. Looked at:" +
            tried);
    return result;
  }
  for (std::size_t i = versions.size(); i < all.size(); ++i) all[i].outcome = "not needed";

  NvrtcPlace& place = all[static_cast<std::size_t>(chosen)];
  const bool fits = fits_driver(place.version, driver, ptx);
  if (!fits) {
    auto reopened = open(place.path);
    if (!reopened.ok()) {
      result.search.info = reopened.status();
      return result;
    }
    result.nvrtc = std::move(*reopened);
    place.outcome = "used, although it does not fit the driver: " + misfit(place.version, driver, ptx);
  }
  place.used = true;
  NvrtcInfo info{real_path(path_of(result.nvrtc, place.path)),
                 place.reason,
                 result.nvrtc.major,
                 result.nvrtc.minor,
                 build_id(reinterpret_cast<const void*>(result.nvrtc.version)),
                 fits,
                 "",
                 archs_of(result.nvrtc)};
  if (!fits) {
    info.note =
        format("{}. {}", misfit(place.version, driver, ptx), advice(driver, ptx, place.reason == "TESSERA_NVRTC"));
  }
  result.search.info = std::move(info);
  return result;
}

// Kept for the life of the process and never closed: kernels may be compiled until it ends.
struct Kept {
  std::mutex mutex;
  std::unique_ptr<const Searched> found[2];  // for cubins, for PTX
};

Kept& kept() {
  static Kept* instance = new Kept;
  return *instance;
}

// Calls use(searched), with what is kept or, if nothing was found, with what was tried.
template <class Use>
auto with_search(bool ptx, Use&& use) {
  Kept& all = kept();
  const std::lock_guard lock(all.mutex);
  std::unique_ptr<const Searched>& found = all.found[ptx ? 1 : 0];
  if (found != nullptr) return use(*found);
  auto searched = std::make_unique<Searched>(run_search(nvrtc_places(), driver_version(), ptx));
  if (!searched->search.info.ok()) return use(*searched);
  open_builtins(searched->nvrtc, path_of(searched->nvrtc, searched->search.info->path));
  found = std::move(searched);
  return use(*found);
}

// The one that is kept: it may be used without the lock.
Result<const Searched*> nvrtc(bool ptx) {
  return with_search(ptx, [](const Searched& searched) -> Result<const Searched*> {
    if (!searched.search.info.ok()) return searched.search.info.status();
    return &searched;
  });
}

struct ProgramOwner {
  const Nvrtc& nvrtc;
  Program program = nullptr;
  ~ProgramOwner() {
    if (program != nullptr) nvrtc.destroy(&program);
  }
};

template <class Size, class Get>
std::string fetch(Program program, Size size, Get get) {
  std::size_t bytes = 0;
  if (size(program, &bytes) != kSuccess || bytes == 0) return "";
  std::string text(bytes, '\0');
  return get(program, text.data()) == kSuccess ? text : "";
}

}  // namespace

int choose_nvrtc(std::span<const int> versions, int driver, bool ptx) {
  int oldest = -1;
  for (int i = 0; i < static_cast<int>(versions.size()); ++i) {
    if (versions[i] == 0) continue;
    if (fits_driver(versions[i], driver, ptx)) return i;
    if (oldest < 0 || versions[i] < versions[oldest]) oldest = i;
  }
  return oldest;
}

int driver_version() {
  static const int version = [] {
    // Stays open: the driver is not made to be closed.
    void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    int (*get)(int*) = nullptr;
    int number = 0;
    // Works before cuInit, and without a GPU.
    const bool known = library != nullptr && resolve(library, "cuDriverGetVersion", get) && get(&number) == 0;
    return known ? number : 0;
  }();
  return version;
}

NvrtcSearch search_places(std::vector<NvrtcPlace> places, int driver, bool ptx) {
  return run_search(std::move(places), driver, ptx).search;
}

NvrtcSearch nvrtc_search(bool ptx) {
  return with_search(ptx, [](const Searched& searched) { return searched.search; });
}

Result<NvrtcInfo> nvrtc_info(bool ptx) {
  return with_search(ptx, [](const Searched& searched) { return searched.search.info; });
}

Result<NvrtcOutput> nvrtc_compile(const std::string& name, const std::string& program_text,
                                  const std::vector<const Source*>& headers, const std::vector<std::string>& options,
                                  bool ptx) {
  const auto searched = nvrtc(ptx);
  if (!searched.ok()) return searched.status();
  const Nvrtc& rtc = (*searched)->nvrtc;

  std::vector<const char*> texts, paths, flags;
  for (const Source* header : headers) {
    texts.push_back(header->text.c_str());
    paths.push_back(header->path.c_str());
  }
  for (const std::string& option : options) flags.push_back(option.c_str());

  const auto start = std::chrono::steady_clock::now();
  for (;;) {
    ProgramOwner owner{rtc};
    NvrtcResult result = rtc.create(&owner.program, program_text.c_str(), (name + ".cu").c_str(),
                                    static_cast<int>(texts.size()), texts.data(), paths.data());
    if (result == kSuccess) result = rtc.compile(owner.program, static_cast<int>(flags.size()), flags.data());
    std::string log;
    if (owner.program != nullptr) log = fetch(owner.program, rtc.log_size, rtc.log);
    while (!log.empty() && (log.back() == '\0' || log.back() == '\n')) log.pop_back();

    // NVRTC before 12.9 has no cache of its own and rejects the option that disables it.
    const auto no_cache = std::find(flags.begin(), flags.end(), std::string_view("--no-cache"));
    if (result == kInvalidOption && no_cache != flags.end()) {
      flags.erase(no_cache);
      continue;
    }
    if (result != kSuccess) {
      return Status(TESSERA_COMPILE_FAILED, format("NVRTC {}.{} could not compile {}: {}\n{}", rtc.major, rtc.minor,
                                                   name, rtc.error_string(result), log));
    }
    NvrtcOutput output;
    output.image = ptx ? fetch(owner.program, rtc.ptx_size, rtc.ptx) : fetch(owner.program, rtc.cubin_size, rtc.cubin);
    output.log = std::move(log);
    output.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (output.image.empty()) {
      return Status(TESSERA_COMPILE_FAILED, format("NVRTC emitted no {} for {}", ptx ? "PTX" : "cubin", name));
    }
    return output;
  }
}

}  // namespace tessera::jit
