// The program of the tests and, with an argument of its own, of the processes that they start.
#include <gtest/gtest.h>

#include <cstdio>
#include <string>

#include "cuda/driver.h"
#include "tests/jit/helpers.h"

namespace tessera::jit {
namespace {

// 0 if the argument is known and did what it says; -1 if it is not known.
int run(const std::string& argument) {
  if (argument == "--compile") {
    const auto found = get(some_request());
    if (!found.ok()) std::fprintf(stderr, "%s\n", found.status().message().c_str());
    return found.ok() ? 0 : 1;
  }
  if (argument == "--key") {
    const auto key = key_of(some_request());
    if (key.ok()) std::printf("%s\n", key->hex().c_str());
    return key.ok() ? 0 : 1;
  }
  if (argument == "--nvrtc") {
    std::printf("driver %d\n", driver_version());
    for (const bool ptx : {false, true}) {
      const NvrtcSearch search = nvrtc_search(ptx);
      if (!search.info.ok()) return 1;
      std::printf("%s %d %s\n", ptx ? "ptx" : "cubin", search.info->version(),
                  search.info->fits ? "fits" : "does not fit");
    }
    return 0;
  }
  if (argument == "--refused") {
    cuda::Driver driver = {};
    driver.error_name = driver.error_string = [](cuda::CUresult, const char**) { return 1; };
    for (const auto& [what, result] : {std::pair{"cubin", 200}, {"ptx", 222}, {"launch", 1}}) {
      std::printf("%s: %s\n", what, cuda::status_of(driver, result, "loading").message().c_str());
    }
    return 0;
  }
  return -1;
}

}  // namespace
}  // namespace tessera::jit

int main(int argc, char** argv) {
  if (argc == 2) {
    if (const int result = tessera::jit::run(argv[1]); result >= 0) return result;
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
