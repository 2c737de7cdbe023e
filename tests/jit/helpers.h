#pragma once

#include <dirent.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "bench/mma_peak_config.h"
#include "jit/config_text.h"
#include "jit/jit.h"
#include "jit/nvrtc.h"

namespace tessera::jit {

// An environment variable for the length of a scope; null: unset.
class ScopedEnvironment {
 public:
  ScopedEnvironment(const char* name, const char* value) : name_(name) {
    if (const char* old = std::getenv(name)) {
      old_ = old;
      had_ = true;
    }
    set(value);
  }
  ~ScopedEnvironment() { set(had_ ? old_.c_str() : nullptr); }

 private:
  void set(const char* value) { value != nullptr ? setenv(name_, value, 1) : unsetenv(name_); }
  const char* name_;
  std::string old_;
  bool had_ = false;
};

class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string pattern = std::filesystem::temp_directory_path() / "tessera_test_XXXXXX";
    path = mkdtemp(pattern.data());
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
  }
  std::vector<std::string> files() const {
    std::vector<std::string> names;
    for (const auto& item : std::filesystem::directory_iterator(path)) names.push_back(item.path().filename());
    return names;
  }
  std::string path;
};

inline std::string read_file(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

inline void write_file(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
  chmod(path.c_str(), 0600);
}

inline constexpr const char* kArchs[] = {"sm_75", "sm_80", "sm_86", "sm_89", "sm_90a"};

// A kernel that belongs to no family.
inline constexpr const char* kSomeHeader = "bench/mma_peak.cuh";

inline CompileRequest some_request(const std::string& arch = "sm_80", DType dtype = DType::kFloat16) {
  return {{.name = "mma_peak",
           .header = kSomeHeader,
           .entry = "mma_peak",
           .params = "MmaPeakParams",
           .config = config_text("MmaPeakConfig", MmaPeakConfig{dtype}),
           .threads = kMmaPeakThreads,
           .min_blocks = 2},
          {arch, false},
          {},
          {}};
}

}  // namespace tessera::jit

// Set-up brings NVRTC, so its absence is a failure and not a reason to skip.
#define REQUIRE_NVRTC() ASSERT_TRUE(tessera::jit::nvrtc_info().ok()) << tessera::jit::nvrtc_info().status().message()
