#include "engine/device.h"

#include <gtest/gtest.h>

#include "base/arch.h"

namespace tessera::engine {
namespace {

TEST(EngineDevice, a_known_arch_has_its_limits_and_only_sm_90a_is_specific) {
  struct Known {
    const char* arch;
    int compute;
    std::size_t shared_memory;
  };
  for (const Known& known :
       {Known{"sm_75", 75, 64 * 1024}, Known{"sm_80", 80, 163 * 1024}, Known{"sm_86", 86, 99 * 1024},
        Known{"sm_87", 87, 163 * 1024}, Known{"sm_89", 89, 99 * 1024}, Known{"sm_90", 90, 227 * 1024},
        Known{"sm_90a", 90, 227 * 1024}, Known{"sm_100", 100, 227 * 1024}, Known{"sm_103", 103, 227 * 1024},
        Known{"sm_120", 120, 99 * 1024}, Known{"sm_121", 121, 99 * 1024}}) {
    const auto device = cuda_device(known.arch);
    ASSERT_TRUE(device.ok()) << known.arch;
    EXPECT_FALSE(device->is_cpu());
    EXPECT_EQ(device->name, known.arch);
    EXPECT_EQ(device->compute, known.compute);
    EXPECT_EQ(device->shared_memory_per_block, known.shared_memory);
    EXPECT_EQ(device->specific, std::string(known.arch) == "sm_90a");
  }
}

TEST(EngineDevice, an_unknown_arch_is_refused_with_those_that_are_known) {
  for (const char* arch : {"", "cpu", "sm_", "sm_12", "sm_70", "sm_75a", "sm_80a", "sm_90b", "sm_90aa", "sm_090", "90a",
                           "SM_90", "sm_90 ", "sm_-90", "compute_90", "sm_100a", "sm_120a", "sm_110", "sm_1200"}) {
    const auto device = cuda_device(arch);
    ASSERT_FALSE(device.ok()) << arch;
    EXPECT_EQ(device.status().code(), TESSERA_INVALID_ARGUMENT);
    EXPECT_NE(device.status().message().find(std::string("'") + arch + "'"), std::string::npos);
    for (const std::string& name : arch_names()) {
      EXPECT_NE(device.status().message().find(name), std::string::npos) << device.status().message();
    }
  }
}

TEST(EngineDevice, a_gpu_runs_its_own_code_or_the_newest_that_is_known_before_it) {
  const std::vector<int> cuda_12_4 = {75, 80, 86, 87, 89, 90};
  const std::vector<int> cuda_13_0 = {75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121};
  for (const int arch : cuda_12_4) {
    EXPECT_EQ(portable_arch(arch, cuda_12_4), arch);
    EXPECT_EQ(portable_arch(arch, {}), arch);
  }
  EXPECT_EQ(portable_arch(120, cuda_13_0), 120);
  EXPECT_EQ(portable_arch(88, cuda_13_0), 87) << "known to the compiler alone";
  EXPECT_EQ(portable_arch(110, cuda_13_0), 103);
  EXPECT_EQ(portable_arch(150, cuda_13_0), 121);
  EXPECT_EQ(portable_arch(120, cuda_12_4), 90) << "newer than the compiler";
  EXPECT_EQ(portable_arch(150, {}), 121) << "a compiler that does not say";
  EXPECT_EQ(portable_arch(70, cuda_13_0), 0);
}

TEST(EngineDevice, the_cpu_says_how_many_threads_it_has) {
  EXPECT_TRUE(cpu_device(1).is_cpu());
  EXPECT_EQ(cpu_device(1).name, "cpu, 1 thread");
  EXPECT_EQ(cpu_device(8).name, "cpu, 8 threads");
  EXPECT_EQ(cpu_device(8).threads, 8);
}

}  // namespace
}  // namespace tessera::engine
