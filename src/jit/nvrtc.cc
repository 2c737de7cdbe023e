#include "jit/nvrtc.h"

#include <dlfcn.h>
#include <glob.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <set>

#include "ops/format.h"

namespace tessera::jit {
namespace {

// The part of nvrtc.h that is used.
using Program = struct NvrtcProgramTag*;
using NvrtcResult = int;
constexpr NvrtcResult kSuccess = 0;
constexpr NvrtcResult kInvalidOption = 5;

struct Nvrtc {
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
  NvrtcInfo info;
};

constexpr const char* kNames[] = {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"};

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "";
}

bool is_file(const std::string& path) {
  struct stat info;
  return stat(path.c_str(), &info) == 0 && S_ISREG(info.st_mode);
}

bool is_folder(const std::string& path) {
  struct stat info;
  return stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode);
}

// Newest version first.
std::vector<std::string> expand(const std::string& pattern) {
  glob_t found = {};
  std::vector<std::string> paths;
  if (glob(pattern.c_str(), 0, nullptr, &found) == 0) paths.assign(found.gl_pathv, found.gl_pathv + found.gl_pathc);
  globfree(&found);
  std::sort(paths.begin(), paths.end(),
            [](const std::string& a, const std::string& b) { return strverscmp(a.c_str(), b.c_str()) > 0; });
  return paths;
}

// "" for the file system's root, so that a path can always be put behind it.
std::string parent(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  return slash == std::string::npos ? "" : path.substr(0, slash);
}

std::string real_path(const std::string& path) {
  const std::unique_ptr<char, decltype(&std::free)> real(realpath(path.c_str(), nullptr), &std::free);
  return real ? real.get() : path;
}

std::string program_path() {
  char path[PATH_MAX];
  const ssize_t size = readlink("/proc/self/exe", path, sizeof path);
  return size > 0 ? std::string(path, static_cast<std::size_t>(size)) : "";
}

std::string library_path() {
  Dl_info info = {};
  if (dladdr(reinterpret_cast<const void*>(&nvrtc_places), &info) == 0 || info.dli_fname == nullptr) return "";
  return real_path(info.dli_fname);
}

class PlaceList {
 public:
  void add_file(const std::string& path, const std::string& reason) {
    if (seen_.insert(path).second) places_.push_back({path, reason, is_file(path)});
  }
  void add_folder(const std::string& folder, const std::string& reason) {
    bool found = false;
    for (const char* name : kNames) {
      if (!is_file(folder + "/" + name)) continue;
      add_file(folder + "/" + name, reason);
      found = true;
    }
    // One line for a folder without it, instead of one for each name.
    if (!found && seen_.insert(folder).second) places_.push_back({folder + "/libnvrtc.so.*", reason, false});
  }
  void add_toolkit(const std::string& root, const std::string& reason) {
    for (const char* folder : {"/lib64", "/lib", "/targets/x86_64-linux/lib"}) {
      if (is_folder(root + folder)) add_folder(real_path(root + folder), reason);
    }
  }
  void add_site_packages(const std::string& folder, const std::string& reason) {
    for (const char* wheel : {"/nvidia/cu13/lib", "/nvidia/cu12/lib", "/nvidia/cuda_nvrtc/lib"}) {
      add_folder(folder + wheel, reason);
    }
  }
  void add_prefix(const std::string& prefix, const std::string& reason) {
    for (const std::string& folder : expand(prefix + "/lib/python3*/site-packages")) add_site_packages(folder, reason);
  }
  void add_loader(const std::string& name) { places_.push_back({name, "the loader's path", true}); }
  std::vector<NvrtcPlace> take() { return std::move(places_); }

 private:
  std::vector<NvrtcPlace> places_;
  std::set<std::string> seen_;
};

template <class Function>
bool resolve(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

Result<std::unique_ptr<Nvrtc>> open(const NvrtcPlace& place) {
  void* library = dlopen(place.path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return Status(TESSERA_COMPILE_FAILED, dlerror());
  auto nvrtc = std::make_unique<Nvrtc>();
  const bool complete =
      resolve(library, "nvrtcVersion", nvrtc->version) &&
      resolve(library, "nvrtcGetErrorString", nvrtc->error_string) &&
      resolve(library, "nvrtcCreateProgram", nvrtc->create) &&
      resolve(library, "nvrtcDestroyProgram", nvrtc->destroy) &&
      resolve(library, "nvrtcCompileProgram", nvrtc->compile) &&
      resolve(library, "nvrtcGetProgramLogSize", nvrtc->log_size) &&
      resolve(library, "nvrtcGetProgramLog", nvrtc->log) && resolve(library, "nvrtcGetCUBINSize", nvrtc->cubin_size) &&
      resolve(library, "nvrtcGetCUBIN", nvrtc->cubin) && resolve(library, "nvrtcGetPTXSize", nvrtc->ptx_size) &&
      resolve(library, "nvrtcGetPTX", nvrtc->ptx);
  int major = 0, minor = 0;
  if (!complete || nvrtc->version(&major, &minor) != kSuccess) {
    dlclose(library);
    return Status(TESSERA_COMPILE_FAILED, "not an NVRTC that makes cubins");
  }
  if (major < 12) {
    dlclose(library);
    return Status(TESSERA_COMPILE_FAILED, format("version {}.{}; 12.0 or newer is needed", major, minor));
  }
  // What dlopen really found, which for the loader's names is not what was asked for.
  Dl_info found = {};
  const bool known = dladdr(reinterpret_cast<const void*>(nvrtc->version), &found) != 0 && found.dli_fname != nullptr;
  nvrtc->info = {known ? found.dli_fname : place.path, place.reason, major, minor};
  // NVRTC opens its builtins by name alone and does not look beside itself; a library that is already there is found.
  const std::string builtins = format("{}/libnvrtc-builtins.so.{}.{}", parent(nvrtc->info.path), major, minor);
  if (is_file(builtins)) dlopen(builtins.c_str(), RTLD_NOW | RTLD_LOCAL);
  return nvrtc;
}

// Never closed: kernels may be compiled until the process's last breath.
Result<const Nvrtc*> nvrtc() {
  static std::mutex mutex;
  static const Nvrtc* loaded = nullptr;
  const std::lock_guard lock(mutex);
  if (loaded != nullptr) return loaded;
  std::string tried;
  for (const NvrtcPlace& place : nvrtc_places()) {
    if (!place.exists) {
      tried += format("\n  {} ({}): not there", place.path, place.reason);
      continue;
    }
    auto opened = open(place);
    if (opened.ok()) {
      loaded = opened->release();
      return loaded;
    }
    tried += format("\n  {} ({}): {}", place.path, place.reason, opened.status().message());
  }
  return Status(
      TESSERA_COMPILE_FAILED,
      "NVRTC, which compiles the kernels, was not found. Install the Python package nvidia-cuda-nvrtc or a CUDA "
      "toolkit, or set TESSERA_NVRTC to libnvrtc.so or its folder. Looked at:" +
          tried);
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

std::vector<NvrtcPlace> nvrtc_places() {
  PlaceList list;
  const std::string chosen = environment("TESSERA_NVRTC");
  if (!chosen.empty()) {
    if (is_folder(chosen)) {
      list.add_folder(chosen, "TESSERA_NVRTC");
    } else {
      list.add_file(chosen, "TESSERA_NVRTC");
    }
    return list.take();
  }

  for (const char* name : {"CUDA_HOME", "CUDA_PATH"}) {
    const std::string root = environment(name);
    if (!root.empty()) list.add_toolkit(root, name);
  }
  list.add_toolkit("/usr/local/cuda", "toolkit");
  for (const std::string& root : expand("/usr/local/cuda-*")) list.add_toolkit(root, "toolkit");

  const std::string venv = environment("VIRTUAL_ENV");
  if (!venv.empty()) list.add_prefix(venv, "wheel in VIRTUAL_ENV");
  const std::string program = program_path();
  const std::string library = library_path();
  list.add_prefix(parent(parent(program)), "wheel under the program's prefix");
  // This library may itself be in a package: site-packages/tessera/libtessera.so, or lib/ below that.
  std::string folder = parent(library);
  for (int level = 0; level < 3 && !folder.empty(); ++level, folder = parent(folder)) {
    if (is_folder(folder + "/nvidia")) list.add_site_packages(folder, "wheel beside the library");
  }
  for (const std::string& path : {program, library}) {
    if (!path.empty())
      list.add_prefix(parent(parent(path)) + "/venv", "wheel in the venv beside the program or library");
  }
  for (const char* name : kNames) list.add_loader(name);
  return list.take();
}

Result<NvrtcInfo> nvrtc_info() {
  auto library = nvrtc();
  if (!library.ok()) return library.status();
  return (*library)->info;
}

Result<NvrtcOutput> nvrtc_compile(const std::string& name, const std::string& program_text,
                                  const std::vector<const Source*>& headers, const std::vector<std::string>& options,
                                  bool ptx) {
  auto library = nvrtc();
  if (!library.ok()) return library.status();
  const Nvrtc& rtc = **library;

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

    // NVRTC before 12.9 has no cache of its own to switch off, and refuses the option.
    const auto no_cache = std::find(flags.begin(), flags.end(), std::string_view("--no-cache"));
    if (result == kInvalidOption && no_cache != flags.end()) {
      flags.erase(no_cache);
      continue;
    }
    if (result != kSuccess) {
      return Status(TESSERA_COMPILE_FAILED, format("NVRTC {}.{} could not compile {}: {}\n{}", rtc.info.major,
                                                   rtc.info.minor, name, rtc.error_string(result), log));
    }
    NvrtcOutput output;
    output.image = ptx ? fetch(owner.program, rtc.ptx_size, rtc.ptx) : fetch(owner.program, rtc.cubin_size, rtc.cubin);
    output.log = std::move(log);
    output.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (output.image.empty()) {
      return Status(TESSERA_COMPILE_FAILED, format("NVRTC gave no {} for {}", ptx ? "PTX" : "cubin", name));
    }
    return output;
  }
}

}  // namespace tessera::jit
