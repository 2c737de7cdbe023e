// The quantiser on the CPU, through the C ABI: what it promises about scales, and what it refuses.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "tessera/attention.h"
#include "verify/host_tensor.h"

namespace tessera {
namespace {

constexpr tessera_dtype kFp32{TESSERA_FLOAT, 32, 1}, kFp16{TESSERA_FLOAT, 16, 1}, kE4m3{TESSERA_FLOAT8_E4M3FN, 8, 1},
    kInt32{TESSERA_INT, 32, 1};

struct Call {
  std::vector<std::int64_t> x_shape, scale_shape, cu_shape;
  std::vector<float> x;
  std::vector<std::uint8_t> out;
  std::vector<float> scale;
  std::vector<std::int32_t> cu;
  tessera_tensor x_view{}, out_view{}, scale_view{}, cu_view{};
  tessera_quantize_fp8 args = TESSERA_QUANTIZE_FP8_INIT;

  Call(const std::vector<std::int64_t>& shape, const std::vector<std::int64_t>& scales)
      : x_shape(shape), scale_shape(scales) {
    std::int64_t n = 1, m = 1;
    for (const std::int64_t d : shape) n *= d;
    for (const std::int64_t d : scales) m *= d;
    for (std::int64_t i = 0; i < n; ++i)
      x.push_back(std::sin(static_cast<float>(i * 37 % 1009)) * static_cast<float>(1 + i % 13));
    out.assign(static_cast<std::size_t>(n), 0x55);
    scale.assign(static_cast<std::size_t>(m), -1.0f);
    const auto view = [](void* data, tessera_dtype dtype, std::vector<std::int64_t>& dims) {
      return tessera_tensor{data, {TESSERA_CPU, 0}, static_cast<std::int32_t>(dims.size()), dtype, dims.data(), nullptr,
                            0};
    };
    x_view = view(x.data(), kFp32, x_shape);
    out_view = view(out.data(), kE4m3, x_shape);
    scale_view = view(scale.data(), kFp32, scale_shape);
    args.x = &x_view;
    args.out = &out_view;
    args.scale = &scale_view;
  }
  void pack(const std::vector<std::int32_t>& offsets, std::int64_t longest) {
    cu = offsets;
    cu_shape = {static_cast<std::int64_t>(cu.size())};
    cu_view = {cu.data(), {TESSERA_CPU, 0}, 1, kInt32, cu_shape.data(), nullptr, 0};
    args.cu_seqlens = &cu_view;
    args.max_seqlen = longest;
  }
};

// Rows first to last - 1 of [B, S, H, D], of head h: each value is rounded by the scale, which is the least that fits.
void expect_rounded(const Call& c, std::int64_t batch, std::int64_t first, std::int64_t last, std::int64_t h,
                    float scale) {
  const std::int64_t rank = static_cast<std::int64_t>(c.x_shape.size());
  const std::int64_t heads = c.x_shape[rank - 2], dim = c.x_shape[rank - 1], seq = c.x_shape[rank - 3];
  double largest = 0;
  for (std::int64_t i = first; i < last; ++i) {
    for (std::int64_t d = 0; d < dim; ++d) {
      const auto at = static_cast<std::size_t>(((batch * seq + i) * heads + h) * dim + d);
      largest = std::max<double>(largest, std::abs(c.x[at]));
      EXPECT_EQ(c.out[at], verify::to_bits_e4m3(c.x[at] / scale)) << i << " " << h << " " << d;
    }
  }
  EXPECT_EQ(scale, std::exp2(std::round(std::log2(scale))));
  EXPECT_LE(largest / scale, 448);
  EXPECT_GT(2 * largest / scale, 448);
}

TEST(QuantizeFp8, blocks_have_the_least_power_of_two_that_fits) {
  for (const std::int64_t block : {64, 128}) {
    const std::int64_t blocks = (150 + block - 1) / block;
    Call c({2, 150, 3, 16}, {2, 3, blocks});
    ASSERT_EQ(tessera_attention_quantize_fp8(&c.args, nullptr), TESSERA_OK) << tessera_last_error();
    for (std::int64_t n = 0; n < 2 * 3 * blocks; ++n) {
      const std::int64_t b = n / blocks / 3, h = n / blocks % 3, first = n % blocks * block;
      expect_rounded(c, b, first, std::min<std::int64_t>(150, first + block), h, c.scale[static_cast<std::size_t>(n)]);
    }
  }
}

TEST(QuantizeFp8, one_scale_may_be_of_a_head_or_of_all) {
  Call heads({2, 30, 3, 16}, {2, 3, 1}), all({1, 30, 1, 16}, {1, 1, 1});
  ASSERT_EQ(tessera_attention_quantize_fp8(&heads.args, nullptr), TESSERA_OK) << tessera_last_error();
  for (std::int64_t n = 0; n < 6; ++n)
    expect_rounded(heads, n / 3, 0, 30, n % 3, heads.scale[static_cast<std::size_t>(n)]);
  ASSERT_EQ(tessera_attention_quantize_fp8(&all.args, nullptr), TESSERA_OK) << tessera_last_error();
  expect_rounded(all, 0, 0, 30, 0, all.scale[0]);
}

TEST(QuantizeFp8, packed_blocks_start_with_each_sequence) {
  Call c({180, 2, 16}, {3, 2, 2});
  c.pack({0, 100, 100, 175}, 100);
  ASSERT_EQ(tessera_attention_quantize_fp8(&c.args, nullptr), TESSERA_OK) << tessera_last_error();
  for (std::int64_t h = 0; h < 2; ++h) {
    const auto scale = [&](std::size_t b, std::size_t block) {
      return c.scale[(b * 2 + static_cast<std::size_t>(h)) * 2 + block];
    };
    expect_rounded(c, 0, 0, 64, h, scale(0, 0));
    expect_rounded(c, 0, 64, 100, h, scale(0, 1));
    expect_rounded(c, 0, 100, 164, h, scale(2, 0));
    EXPECT_EQ(scale(1, 0), 1.0f);
  }
  EXPECT_EQ(c.out.back(), 0x55);  // behind the last sequence
}

TEST(QuantizeFp8, zeros_and_extremes_have_finite_scales) {
  Call c({1, 64, 3, 16}, {1, 3, 1});
  for (std::size_t n = 0; n < c.x.size(); ++n) {
    const std::size_t head = n / 16 % 3;
    c.x[n] = head == 0 ? 0.0f : head == 1 ? 3e38f : 1e-38f;
  }
  ASSERT_EQ(tessera_attention_quantize_fp8(&c.args, nullptr), TESSERA_OK) << tessera_last_error();
  EXPECT_EQ(c.scale[0], 1.0f);
  EXPECT_EQ(c.out[0], 0);
  EXPECT_EQ(c.scale[1], std::exp2(60.0f));
  EXPECT_EQ(c.out[16], 0x7e);  // the largest
  EXPECT_EQ(c.scale[2], std::exp2(-60.0f));
}

TEST(QuantizeFp8, nan_has_the_bits_of_a_gpu) {
  Call c({1, 1, 1, 16}, {1, 1, 1});
  c.x[0] = std::copysign(NAN, 1.0f);
  c.x[1] = std::copysign(NAN, -1.0f);
  ASSERT_EQ(tessera_attention_quantize_fp8(&c.args, nullptr), TESSERA_OK) << tessera_last_error();
  EXPECT_EQ(c.out[0], 0x7f);
  EXPECT_EQ(c.out[1], 0x7f);
  EXPECT_TRUE(std::isfinite(c.scale[0]));
}

TEST(QuantizeFp8, bad_arguments_write_nothing_and_say_why) {
  const auto refused = [](Call& c, const char* message) {
    EXPECT_EQ(tessera_attention_quantize_fp8(&c.args, nullptr), TESSERA_INVALID_ARGUMENT);
    EXPECT_NE(std::string(tessera_last_error()).find(message), std::string::npos) << tessera_last_error();
    EXPECT_EQ(c.out[0], 0x55);
    EXPECT_EQ(c.scale[0], -1.0f);
  };
  Call blocks({1, 150, 2, 16}, {1, 2, 5});
  refused(blocks, "scale has 5 blocks; 1, 3 of 64 rows or 2 of 128 are accepted for 150 rows");
  Call heads({1, 150, 2, 16}, {1, 3, 1});
  refused(heads, "scale has heads = 3; 1 or 2 is accepted");
  Call shared({2, 150, 2, 16}, {1, 2, 3});
  refused(shared, "with blocks, every head of every sequence has its own");
  Call type({1, 64, 1, 16}, {1, 1, 1});
  type.out_view.dtype = kFp16;
  type.out.resize(type.out.size() * 2, 0x55);
  type.out_view.data = type.out.data();
  refused(type, "out is fp16; e4m3 is accepted, or x's type, fp32");
  Call flags({1, 64, 1, 16}, {1, 1, 1});
  flags.args.flags = TESSERA_FP8;
  refused(flags, "TESSERA_FP8_ROTATE is accepted");
  Call packed({64, 1, 16}, {1, 1, 1});
  packed.pack({0, 64}, 0);
  refused(packed, "max_seqlen is 0");
  packed.pack({0, 100}, 64);
  refused(packed, "cu_seqlens ends at 100, past the 64 rows of x");
  packed.pack({0, 64}, 40);
  refused(packed, "max_seqlen is 40, but cu_seqlens has a sequence of 64");
}

TEST(QuantizeFp8, values_are_e4m3_times_the_scale) {
  Call e4m3({2, 30, 3, 16}, {2, 3, 1}), values({2, 30, 3, 16}, {2, 3, 1});
  std::vector<float> got(values.x.size(), -1.0f);
  values.out_view.dtype = kFp32;
  values.out_view.data = got.data();
  ASSERT_EQ(tessera_attention_quantize_fp8(&e4m3.args, nullptr), TESSERA_OK) << tessera_last_error();
  ASSERT_EQ(tessera_attention_quantize_fp8(&values.args, nullptr), TESSERA_OK) << tessera_last_error();
  EXPECT_EQ(values.scale, e4m3.scale);
  for (std::size_t n = 0; n < got.size(); ++n) {
    const float scale = e4m3.scale[n / (30 * 3 * 16) * 3 + n / 16 % 3];
    EXPECT_EQ(got[n], static_cast<float>(verify::round_to_e4m3(values.x[n] / scale)) * scale);
  }
}

// One large channel: rotated, it is spread over its block, and rotated back, it is there again.
TEST(QuantizeFp8, rotation_spreads_a_channel_and_is_undone) {
  for (const std::int64_t dim : {64, 80}) {
    Call c({1, 20, 1, dim}, {1, 1, 1});
    for (std::size_t n = 0; n < c.x.size(); ++n) c.x[n] = n % static_cast<std::size_t>(dim) == 5 ? 400.0f : 0.0f;
    c.args.flags = TESSERA_FP8_ROTATE;
    ASSERT_EQ(tessera_attention_quantize_fp8(&c.args, nullptr), TESSERA_OK) << tessera_last_error();
    const int block = dim == 64 ? 64 : 16;
    for (std::int64_t d = 0; d < dim; ++d) {
      const double want = d < block ? 400 / std::sqrt(static_cast<double>(block)) / c.scale[0] : 0;
      EXPECT_EQ(c.out[static_cast<std::size_t>(d)] & 0x7f, verify::to_bits_e4m3(want)) << dim << " " << d;
    }
    std::vector<float> back(c.x.size(), -1.0f);
    c.out_view.dtype = kFp32;
    c.out_view.data = back.data();
    ASSERT_EQ(tessera_attention_quantize_fp8(&c.args, nullptr), TESSERA_OK) << tessera_last_error();
    for (std::size_t n = 0; n < back.size(); ++n) EXPECT_NEAR(back[n], c.x[n], 400.0 / 16) << dim << " " << n;
  }
}

TEST(QuantizeFp8, nothing_has_the_scale_1) {
  Call c({2, 0, 3, 16}, {2, 3, 1});
  ASSERT_EQ(tessera_attention_quantize_fp8(&c.args, nullptr), TESSERA_OK) << tessera_last_error();
  for (const float scale : c.scale) EXPECT_EQ(scale, 1.0f);
}

}  // namespace
}  // namespace tessera
