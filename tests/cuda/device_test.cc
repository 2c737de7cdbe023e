#include "cuda/device.h"

#include <thread>

#include "attention/backward_preprocess.h"
#include "cuda/code_arch.h"
#include "cuda/kernel.h"
#include "tests/cuda/helpers.h"

namespace tessera::cuda {
namespace {

using attention::backward_preprocess;
using attention::instance_of;
using attention::preprocess_config;
using attention::preprocess_launch;
using attention::PreprocessArgs;

TEST(Device, without_a_gpu_everything_says_why) {
  if (devices().ok()) GTEST_SKIP() << "this machine has a GPU";
  EXPECT_EQ(devices().status().code(), TESSERA_NO_DEVICE);
  EXPECT_FALSE(devices().status().message().empty());
  EXPECT_EQ(DeviceBuffer::make(0, 16).status().code(), TESSERA_NO_DEVICE);
  EXPECT_EQ(Stream::make(0).status().code(), TESSERA_NO_DEVICE);
  EXPECT_EQ(backward_preprocess(0, {DType::kFloat16, 1, 1, 1, 8, {}, {}, {}, {}, {}, {}}, nullptr).code(),
            TESSERA_NO_DEVICE);
}

TEST(Device, is_described) {
  REQUIRE_DEVICE();
  const auto info = device(0);
  ASSERT_TRUE(info.ok());
  std::printf("device 0: %s, compute capability %d.%d, %d SMs, %.1f GB, L2 %.1f MB, shared memory %d, driver %d\n",
              info->name.c_str(), info->major, info->minor, info->multiprocessors, 1e-9 * double(info->memory_bytes),
              1e-6 * double(info->l2_bytes), info->shared_memory_per_block_optin, info->driver_version);
  EXPECT_GT(info->multiprocessors, 0);
  EXPECT_GT(info->shared_memory_per_block_optin, 48 * 1024);
  EXPECT_EQ(device(1000).status().code(), TESSERA_NO_DEVICE);
}

DeviceInfo some_device(int major, int minor, int shared) {
  DeviceInfo info;
  info.name = "a GPU";
  info.major = major;
  info.minor = minor;
  info.shared_memory_per_block_optin = shared;
  return info;
}

TEST(CodeArch, older_code_is_ptx_with_the_older_limits_and_own_code_a_cubin) {
  const DeviceInfo hopper = some_device(9, 0, 227 * 1024);
  const auto native = code_arch_for(hopper, "native");
  ASSERT_TRUE(native.ok());
  EXPECT_EQ(native->target, (jit::Target{"sm_90a", false}));
  EXPECT_EQ(native->compute, 90);
  EXPECT_EQ(code_arch_for(hopper, "sm_90a")->target, native->target);
  const std::pair<const char*, std::size_t> older[] = {
      {"sm_75", 64 * 1024}, {"sm_80", 163 * 1024}, {"sm_86", 99 * 1024}, {"sm_89", 99 * 1024}};
  for (const auto& [arch, shared] : older) {
    const auto code = code_arch_for(hopper, arch);
    ASSERT_TRUE(code.ok()) << arch;
    EXPECT_EQ(code->target, (jit::Target{arch, true}));
    EXPECT_EQ(code->shared_memory_per_block, shared);
  }
  // sm_80's limit is more than an sm_86 has.
  EXPECT_EQ(code_arch_for(some_device(8, 6, 99 * 1024), "sm_80")->shared_memory_per_block, 99 * 1024U);
}

TEST(CodeArch, an_arch_that_is_unknown_or_newer_than_the_device_is_refused_with_a_sentence) {
  const DeviceInfo ampere = some_device(8, 0, 163 * 1024);
  for (const char* arch : {"sm_86", "sm_90", "sm_90a"}) {
    const auto code = code_arch_for(ampere, arch);
    ASSERT_FALSE(code.ok()) << arch;
    EXPECT_EQ(code.status().code(), TESSERA_INVALID_ARGUMENT);
    EXPECT_NE(code.status().message().find("a GPU"), std::string::npos) << code.status().message();
  }
  // sm_90a's instructions are not in what comes after.
  EXPECT_FALSE(code_arch_for(some_device(10, 0, 227 * 1024), "sm_90a").ok());
  EXPECT_TRUE(code_arch_for(some_device(10, 0, 227 * 1024), "sm_89").ok());
  // sm_90 is Hopper without what it alone has, and its own code, not PTX.
  const auto plain = code_arch_for(some_device(9, 0, 227 * 1024), "sm_90");
  ASSERT_TRUE(plain.ok());
  EXPECT_EQ(plain->target, (jit::Target{"sm_90", false}));
  EXPECT_FALSE(plain->specific);
  EXPECT_TRUE(code_arch_for(some_device(9, 0, 227 * 1024), "sm_90a")->specific);
  for (const char* arch : {"", "sm_12", "sm_75a", "75", "SM_75"}) {
    const auto code = code_arch_for(ampere, arch);
    ASSERT_FALSE(code.ok()) << arch;
    EXPECT_NE(code.status().message().find("sm_75"), std::string::npos) << code.status().message();
  }
}

TEST(CodeArch, the_choice_holds_for_the_thread_until_taken_back) {
  const DeviceInfo hopper = some_device(9, 0, 227 * 1024);
  set_code_arch(*code_arch_for(hopper, "sm_75"));
  EXPECT_EQ(code_arch_of(hopper)->target, (jit::Target{"sm_75", true}));
  EXPECT_EQ(code_arch_of(hopper)->compute, 75);
  std::thread([&] { EXPECT_TRUE(code_arch_of(hopper)->own); }).join();
  set_code_arch(*code_arch_for(hopper, "native"));
  EXPECT_EQ(code_arch_of(hopper)->target, (jit::Target{"sm_90a", false}));
}

TEST(CodeArch, a_device_newer_than_all_that_is_known_keeps_its_own_limits) {
  const DeviceInfo newer = some_device(12, 0, 99 * 1024);
  set_code_arch(*code_arch_for(newer, "native"));
  EXPECT_EQ(code_arch_of(newer)->shared_memory_per_block, 99 * 1024U);
  EXPECT_EQ(code_arch_of(newer)->target, (jit::Target{"sm_120", false}));
}

TEST(CodeArch, kernels_are_loaded_for_the_chosen_arch) {
  REQUIRE_DEVICE();
  const jit::KernelInstance instance = instance_of(preprocess_config(DType::kFloat16, 8));
  const auto own = load_kernel(kDevice, instance);
  ASSERT_TRUE(own.ok()) << own.status().message();
  set_code_arch(*code_arch_for(*device(kDevice), "sm_75"));
  const auto older = load_kernel(kDevice, instance);
  const auto named = load_kernel(kDevice, instance, jit::Target{"sm_75", true});
  set_code_arch(*code_arch_for(*device(kDevice), "native"));
  ASSERT_TRUE(older.ok()) << older.status().message();
  EXPECT_EQ(*older, *named);
  EXPECT_TRUE(*older != *own || arch_of(*device(kDevice)) == "sm_75");
}

TEST(Device, memory_goes_there_and_back) {
  REQUIRE_DEVICE();
  auto buffer = DeviceBuffer::make(kDevice, 1000);
  ASSERT_TRUE(buffer.ok()) << buffer.status().message();
  ASSERT_OK(buffer->fill_bytes(7));
  ASSERT_OK(buffer->upload("abc", 3, 10));
  std::string back(16, ' ');
  ASSERT_OK(buffer->download(back.data(), 16));
  EXPECT_EQ(back, std::string(10, 7) + "abc" + std::string(3, 7));
}

TEST(Device, a_kernel_is_loaded_once_and_a_bad_launch_is_a_status_that_names_it) {
  REQUIRE_DEVICE();
  const jit::KernelInstance instance = instance_of(preprocess_config(DType::kFloat16, 8));
  const auto first = load_kernel(kDevice, instance);
  ASSERT_TRUE(first.ok()) << first.status().message();
  const auto second = load_kernel(kDevice, instance);
  ASSERT_TRUE(second.ok());
  EXPECT_EQ(*first, *second);
  std::printf("%s: %d registers, %d bytes local, image %s in %.3f s, loaded in %.4f s\n", instance.name.c_str(),
              (*first)->registers, (*first)->local_bytes, jit::name_of((*first)->origin), (*first)->image_seconds,
              (*first)->load_seconds);
  EXPECT_EQ((*first)->local_bytes, 0);

  const BackwardPreprocessParams params = {};
  const Status refused = launch(**first, Grid{1, 70000, 1}, &params, nullptr);  // y is at most 65535
  EXPECT_EQ(refused.code(), TESSERA_CUDA_FAILED);
  EXPECT_NE(refused.message().find(instance.name), std::string::npos) << refused.message();
}

// What the ops ask for, before any device.

PreprocessArgs some_preprocess(std::int64_t dim) {
  PreprocessArgs args;
  args.batch = 2;
  args.seq = 100;
  args.heads = 3;
  args.head_dim = dim;
  args.o = args.d_o = {reinterpret_cast<void*>(256), 300 * dim, 3 * dim, dim};
  return args;
}

TEST(Launch, preprocess_loads_sixteen_bytes_where_everything_is_aligned_and_one_element_else) {
  const auto config_of = [](const PreprocessArgs& args) { return preprocess_launch(args)->instance.config; };
  const auto wide = instance_of(preprocess_config(DType::kFloat16, 8)).config;
  const auto narrow = instance_of(preprocess_config(DType::kFloat16, 1)).config;
  PreprocessArgs args = some_preprocess(80);
  EXPECT_EQ(config_of(args), wide);
  args.o.data = reinterpret_cast<void*>(258);
  EXPECT_EQ(config_of(args), narrow);
  args = some_preprocess(80);
  args.d_o.head_stride = 81;
  EXPECT_EQ(config_of(args), narrow);
  args.heads = 1;  // that stride is then never used
  EXPECT_EQ(config_of(args), wide);
  EXPECT_EQ(config_of(some_preprocess(12)), narrow);
}

TEST(Launch, preprocess_grid_covers_every_row) {
  for (const std::int64_t dim : {1, 8, 72, 80, 128, 200, 256, 512}) {
    const auto what = preprocess_launch(some_preprocess(dim));
    ASSERT_TRUE(what.ok());
    const auto& p = what->params;
    const int vector = dim % 8 == 0 ? 8 : 1;
    const int rows = preprocess_rows_per_block(preprocess_config(DType::kFloat16, vector), int(p.lanes_per_row));
    EXPECT_EQ(p.vectors, dim / vector);
    EXPECT_LE(p.lanes_per_row, 32u);
    EXPECT_GE(p.seq_tiles * static_cast<unsigned>(rows), 100u);
    EXPECT_LT((p.seq_tiles - 1) * static_cast<unsigned>(rows), 100u);
    EXPECT_EQ(what->grid.x, 2 * 3 * p.seq_tiles);
  }
}

TEST(Launch, preprocess_s_ctas_have_equal_shares_of_what_is_to_be_zeroed) {
  PreprocessArgs args = some_preprocess(64);
  for (const std::int64_t words : {0, 1, 5, 6, 7, 100000}) {
    args.zeroed_bytes = words * 16;
    const auto what = preprocess_launch(args);
    ASSERT_TRUE(what.ok());
    EXPECT_EQ(what->params.zeroed_words, words);
    EXPECT_GE(what->params.zeroed_a_block * what->grid.x, words);
    EXPECT_LT((what->params.zeroed_a_block - 1) * what->grid.x, std::max<std::int64_t>(words, 1));
  }
}

TEST(Launch, empty_tensors_launch_nothing_and_bad_ones_are_refused) {
  PreprocessArgs args = some_preprocess(64);
  args.seq = 0;
  EXPECT_EQ(preprocess_launch(args)->grid.x, 0u);
  args = some_preprocess(0);
  EXPECT_EQ(preprocess_launch(args).status().code(), TESSERA_INVALID_ARGUMENT);
  args = some_preprocess(64);
  args.dtype = DType::kFloat32;
  EXPECT_EQ(preprocess_launch(args).status().code(), TESSERA_UNSUPPORTED);
  args = some_preprocess(64);
  for (const std::int64_t seq : {std::int64_t{1} << 50, std::numeric_limits<std::int64_t>::max()}) {
    args.seq = seq;
    EXPECT_EQ(preprocess_launch(args).status().code(), TESSERA_UNSUPPORTED);
  }
}

}  // namespace
}  // namespace tessera::cuda
