#include "engine/device.h"

#include <gtest/gtest.h>

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
        Known{"sm_89", 89, 99 * 1024}, Known{"sm_90", 90, 227 * 1024}, Known{"sm_90a", 90, 227 * 1024}}) {
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
                           "SM_90", "sm_90 ", "sm_-90", "compute_90"}) {
    const auto device = cuda_device(arch);
    ASSERT_FALSE(device.ok()) << arch;
    EXPECT_EQ(device.status().code(), TESSERA_INVALID_ARGUMENT);
    EXPECT_NE(device.status().message().find(std::string("'") + arch + "'"), std::string::npos);
    EXPECT_NE(device.status().message().find("sm_90a"), std::string::npos) << device.status().message();
  }
}

TEST(EngineDevice, the_cpu_says_how_many_threads_it_has) {
  EXPECT_TRUE(cpu_device(1).is_cpu());
  EXPECT_EQ(cpu_device(1).name, "cpu, 1 thread");
  EXPECT_EQ(cpu_device(8).name, "cpu, 8 threads");
  EXPECT_EQ(cpu_device(8).threads, 8);
}

}  // namespace
}  // namespace tessera::engine
