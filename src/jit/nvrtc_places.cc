// The places where NVRTC may be, in the order that nvrtc.h documents.
#include <dlfcn.h>
#include <glob.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <set>

#include "jit/nvrtc.h"

namespace tessera::jit {
namespace {

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

// "" for the file system's root, so that "/name" can always be appended.
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
    // One place for a folder without NVRTC, instead of one for each name.
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
  // This library may itself be in a package: site-packages/tessera/libtessera.so, or in lib/ below that.
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

}  // namespace tessera::jit
