// A GPU that fails: each failure is a status, and the process goes on.
#include <cstdlib>

#include "attention/backward_preprocess.h"
#include "cuda/kernel.h"
#include "tessera/tessera.hpp"
#include "tests/cuda/helpers.h"

namespace tessera::cuda {
namespace {

constexpr tessera_device kGpu{TESSERA_CUDA, kDevice};
constexpr std::uint16_t kOne = 0x3f80;  // bf16

// q, k, v of ones in one buffer and `out` in another; with claim > seq the tensors are said to be longer than they are.
struct Small {
  static constexpr std::int64_t kSeq = 128, kHeads = 4, kDim = 64;
  DeviceBuffer ones, out;

  Status allocate() {
    const std::size_t bytes = kSeq * kHeads * kDim * 2;
    for (DeviceBuffer* to : {&ones, &out}) {
      auto made = DeviceBuffer::make(kDevice, bytes);
      if (!made.ok()) return made.status();
      *to = std::move(*made);
    }
    if (Status s = out.fill_words16(kPoison16); !s.ok()) return s;
    return ones.fill_words16(kOne);
  }
  tessera::Attention forward(std::int64_t batch = 1, std::int64_t seq = kSeq) const {
    const auto tensor = [&](const DeviceBuffer& of) {
      return tessera::Tensor(of.data(), tessera::kBFloat16, {batch, seq, kHeads, kDim}, {}, kGpu);
    };
    return {.q = tensor(ones), .k = tensor(ones), .v = tensor(ones), .out = tensor(out)};
  }
  // TESSERA_OK only if the result has arrived and is the mean of ones.
  tessera_status run() const {
    try {
      tessera::attention_forward(forward());
    } catch (const tessera::Error& e) {
      return e.status();
    }
    std::vector<std::uint16_t> got(kSeq * kHeads * kDim);
    if (const Status s = out.download(got.data(), got.size() * 2); !s.ok()) return s.code();
    return got == std::vector<std::uint16_t>(got.size(), kOne) ? TESSERA_OK : TESSERA_INTERNAL;
  }
};

tessera_status cpu_status() {
  std::vector<float> ones(2 * 3 * 4, 1.0F), out(ones.size());
  const auto tensor = [](std::vector<float>& of) {
    return tessera::Tensor(of.data(), tessera::kFloat32, {1, 2, 3, 4});
  };
  try {
    tessera::attention_forward({.q = tensor(ones), .k = tensor(ones), .v = tensor(ones), .out = tensor(out)});
  } catch (const tessera::Error& e) {
    return e.status();
  }
  return out == ones ? TESSERA_OK : TESSERA_INTERNAL;
}

TEST(Errors, out_of_memory_is_a_status_and_the_next_call_works) {
  REQUIRE_DEVICE();
  EXPECT_EQ(DeviceBuffer::make(kDevice, 2 * device(kDevice)->memory_bytes).status().code(), TESSERA_OUT_OF_MEMORY);
  Small small;
  ASSERT_OK(small.allocate());
  // A workspace of more than any GPU has; nothing is launched on tensors that are far smaller than they are said to be.
  tessera::Attention backward = small.forward(4096, std::int64_t{1} << 20);
  auto lse = DeviceBuffer::make(kDevice, 1024);
  ASSERT_TRUE(lse.ok());
  backward.lse =
      tessera::Tensor(lse->data(), tessera::kFloat32, {4096, Small::kHeads, std::int64_t{1} << 20}, {}, kGpu);
  backward.dout = backward.q;
  backward.dq = backward.dk = backward.dv = backward.out;
  tessera_status status = TESSERA_OK;
  std::string message;
  try {
    tessera::attention_backward(backward);
  } catch (const tessera::Error& e) {
    status = e.status();
    message = e.what();
  }
  EXPECT_EQ(status, TESSERA_OUT_OF_MEMORY) << message;
  EXPECT_EQ(small.run(), TESSERA_OK);
}

TEST(Errors, a_launch_that_the_driver_refuses_is_a_status_and_the_next_call_works) {
  REQUIRE_DEVICE();
  const auto kernel = load_kernel(kDevice, attention::instance_of(attention::preprocess_config(DType::kFloat16, 8)));
  ASSERT_TRUE(kernel.ok()) << kernel.status().message();
  const BackwardPreprocessParams params = {};
  EXPECT_EQ(launch(**kernel, Grid{1, 70000, 1}, &params, nullptr).code(), TESSERA_CUDA_FAILED);  // y is at most 65535
  Small small;
  ASSERT_OK(small.allocate());
  EXPECT_EQ(small.run(), TESSERA_OK);
}

// The number of checks that failed, in a process of its own: its context does not come back.
int after_a_lost_context() {
  int failed = 0;
  const auto expect = [&](bool holds, const char* what) {
    if (!holds) std::fprintf(stderr, "not so: %s\n", what), ++failed;
  };
  Small small;
  expect(small.allocate().ok(), "tensors are allocated");
  expect(small.run() == TESSERA_OK, "a call works before");
  try {
    tessera::attention_forward(small.forward(64, 1 << 20));  // reads and writes far behind both buffers
  } catch (const tessera::Error& e) {
    std::fprintf(stderr, "refused: %s\n", e.what());
    return 100;
  }
  std::uint16_t value = 0;
  const Status lost = small.out.download(&value, 2);
  std::fprintf(stderr, "the fault: %s\n", lost.message().c_str());
  expect(lost.code() == TESSERA_CUDA_FAILED, "the fault is a status where the result is waited for");
  expect(small.run() == TESSERA_CUDA_FAILED, "another call is a status");
  expect(DeviceBuffer::make(kDevice, 16).status().code() == TESSERA_CUDA_FAILED, "an allocation is a status");
  expect(cpu_status() == TESSERA_OK, "the CPU goes on");
  return failed;
}

TEST(Errors, a_lost_context_is_a_status_and_the_cpu_goes_on) {
  REQUIRE_DEVICE();
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // in a process that starts anew
  EXPECT_EXIT(std::exit(after_a_lost_context()), testing::ExitedWithCode(0), "the fault: ");
}

}  // namespace
}  // namespace tessera::cuda
