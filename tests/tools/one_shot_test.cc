// One-shot calls on a GPU that give no workspace, through the shared library on the stand-in driver (../emulated/driver.cc),
// whose memory is the host's.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "tessera/tessera.hpp"

namespace tessera::test {
namespace {

constexpr std::int64_t kB = 2, kS = 70, kH = 2, kD = 64;
constexpr tessera_device kGpu{TESSERA_CUDA, 0};
constexpr std::uint16_t kOne = 0x3f80;  // bf16

struct Memory {
  std::vector<std::uint16_t> values = std::vector<std::uint16_t>(kB * kS * kH * kD, kOne);
  Tensor view() const { return {values.data(), kBFloat16, {kB, kS, kH, kD}, {}, kGpu}; }
};

struct OneShot : testing::Test {
  Memory q, k, v, out, dout, dq, dk, dv;
  std::vector<float> lse = std::vector<float>(kB * kH * kS);

  Attention forward() {
    for (std::uint16_t& x : out.values) x = 0xffff;  // NaN
    return {.q = q.view(),
            .k = k.view(),
            .v = v.view(),
            .out = out.view(),
            .lse = {lse.data(), kFloat32, {kB, kH, kS}, {}, kGpu},
            .causal = true};
  }
};

// With a causal mask and this many tiles the Hopper forward may ask for a counter; the backward always asks for memory.
TEST_F(OneShot, forward_allocates_what_it_needs) {
  attention_forward(forward());
  EXPECT_EQ(out.values.front(), kOne) << "the mean of ones";
  EXPECT_EQ(out.values.back(), kOne);
}

TEST_F(OneShot, backward_allocates_what_it_needs_and_gives_it_back) {
  Attention attention = forward();
  attention.dout = dout.view();
  attention.dq = dq.view();
  attention.dk = dk.view();
  attention.dv = dv.view();
  EXPECT_GT(Plan(TESSERA_ATTENTION_BACKWARD, attention).workspace(), 0u);
  for (int n = 0; n < 3; ++n) EXPECT_NO_THROW(attention_backward(attention));
}

TEST_F(OneShot, quantising_nothing_writes_the_scale_1) {
  std::vector<float> scale(kB * kH, -1.0f);
  std::uint8_t out = 0;
  const auto quantise = [&] {
    attention_quantize_fp8({.x = {q.values.data(), kBFloat16, {kB, 0, kH, kD}, {}, kGpu},
                            .out = {&out, {TESSERA_FLOAT8_E4M3FN, 8, 1}, {kB, 0, kH, kD}, {}, kGpu},
                            .scale = {scale.data(), kFloat32, {kB, kH, 1}, {}, kGpu}});
  };
  if (std::getenv("FAKE_CUDA_ARCH") != std::string("90")) {
    EXPECT_THROW(quantise(), Error);  // e4m3 needs sm_89
    return;
  }
  quantise();
  for (const float each : scale) EXPECT_EQ(each, 1.0f);
}

}  // namespace
}  // namespace tessera::test
