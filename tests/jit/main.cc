// The program of the tests, and, with --compile, of the processes that the race test starts.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstring>

#include "tests/jit/helpers.h"

int main(int argc, char** argv) {
  if (argc == 2 && std::strcmp(argv[1], "--compile") == 0) {
    const auto found = tessera::jit::get(tessera::jit::some_request());
    if (!found.ok()) std::fprintf(stderr, "%s\n", found.status().message().c_str());
    return found.ok() ? 0 : 1;
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
