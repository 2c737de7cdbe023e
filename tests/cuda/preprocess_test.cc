#include "attention/backward_preprocess.h"

#include "tests/cuda/helpers.h"

namespace tessera::cuda {
namespace {

using attention::preprocess_launch;
using attention::PreprocessArgs;

constexpr double kLog2E = 1.4426950408889634074;

struct Case {
  DType dtype;
  Shape shape;
  Layout layout;
  bool with_d_lse;
};

std::string describe(const Case& c) {
  return std::string(tessera::name_of(c.dtype)) + " [" + std::to_string(c.shape.batch) + ", " +
         std::to_string(c.shape.seq) + ", " + std::to_string(c.shape.heads) + ", " + std::to_string(c.shape.dim) +
         "] layout " + std::to_string(static_cast<int>(c.layout)) + (c.with_d_lse ? " with dLSE" : "");
}

void check(const Case& c, const jit::Target& target) {
  SCOPED_TRACE(describe(c) + " on " + name_of(target));
  const auto [batch, seq, heads, dim] = c.shape;
  std::mt19937 random(1234);
  std::normal_distribution<double> normal;
  // O and dO in different layouts, so that one's strides cannot serve the other.
  HostTensor o(c.shape, c.layout);
  HostTensor d_o(c.shape, c.layout == Layout::kHeadMajor ? Layout::kContiguous : c.layout);
  HostRows lse(c.shape, 0), d_lse(c.shape, 3), delta(c.shape, 5), lse_log2(c.shape, 1);
  for (std::int64_t b = 0; b < batch; ++b) {
    for (std::int64_t h = 0; h < heads; ++h) {
      for (std::int64_t s = 0; s < seq; ++s) {
        const bool empty = (b + h + s) % 11 == 3;
        lse.at(b, h, s) = empty ? -kInfinity : static_cast<float>(normal(random) * 30);
        // A row that saw no key must not let a wild dLSE through.
        d_lse.at(b, h, s) = empty ? std::nanf("") : static_cast<float>(normal(random));
        for (std::int64_t d = 0; d < dim; ++d) {
          o.at(b, s, h, d) = empty ? 0 : encode(c.dtype, normal(random));
          d_o.at(b, s, h, d) = encode(c.dtype, normal(random));
        }
      }
    }
  }
  for (HostTensor* tensor : {&o, &d_o}) ASSERT_OK(tensor->to_device());
  for (HostRows* rows : {&lse, &d_lse, &delta, &lse_log2}) ASSERT_OK(rows->to_device());

  PreprocessArgs args{c.dtype,    batch, seq,          heads,          dim, o.view(), d_o.view(),
                      lse.view(), {},    delta.view(), lse_log2.view()};
  if (c.with_d_lse) args.d_lse = d_lse.view();
  constexpr std::size_t kZeros = 16 * 1000, kBehind = 16;
  std::vector<unsigned char> zeroed(kZeros + kBehind, 0xff);
  auto sums = DeviceBuffer::make(kDevice, zeroed.size());
  ASSERT_TRUE(sums.ok());
  ASSERT_OK(sums->upload(zeroed.data(), zeroed.size()));
  args.zeroed = sums->data();
  args.zeroed_bytes = kZeros;
  const auto what = preprocess_launch(args);
  ASSERT_TRUE(what.ok()) << what.status().message();
  const auto kernel = load_kernel(kDevice, what->instance, target);
  ASSERT_TRUE(kernel.ok()) << kernel.status().message();
  const auto stream = Stream::make(kDevice);
  ASSERT_TRUE(stream.ok());
  ASSERT_OK(launch(**kernel, *what, stream->get()));
  ASSERT_OK(stream->synchronize());
  ASSERT_OK(delta.buffer.download(delta.values.data(), delta.values.size() * 4));
  ASSERT_OK(lse_log2.buffer.download(lse_log2.values.data(), lse_log2.values.size() * 4));
  ASSERT_OK(sums->download(zeroed.data(), zeroed.size()));
  for (std::size_t i = 0; i < zeroed.size(); ++i) ASSERT_EQ(zeroed[i], i < kZeros ? 0 : 0xff) << i;

  for (std::int64_t b = 0; b < batch; ++b) {
    for (std::int64_t h = 0; h < heads; ++h) {
      for (std::int64_t s = 0; s < seq; ++s) {
        const float row_lse = lse.at(b, h, s);
        const float got_delta = delta.at(b, h, s), got_lse = lse_log2.at(b, h, s);
        if (row_lse == -kInfinity) {
          ASSERT_EQ(got_delta, 0.0f) << b << " " << h << " " << s;
          ASSERT_EQ(got_lse, kInfinity) << b << " " << h << " " << s;
          continue;
        }
        double sum = 0, magnitude = 0;
        for (std::int64_t d = 0; d < dim; ++d) {
          const double product = decode(c.dtype, o.at(b, s, h, d)) * decode(c.dtype, d_o.at(b, s, h, d));
          sum += product;
          magnitude += std::fabs(product);
        }
        if (c.with_d_lse) {
          sum -= d_lse.at(b, h, s);
          magnitude += std::fabs(d_lse.at(b, h, s));
        }
        ASSERT_LE(std::fabs(got_delta - sum), 2e-6 * magnitude) << b << " " << h << " " << s;
        ASSERT_LE(std::fabs(got_lse - row_lse * kLog2E), 2.5e-7 * std::fabs(row_lse * kLog2E))
            << b << " " << h << " " << s;
      }
      for (int gap = 0; gap < 5; ++gap) ASSERT_TRUE(is_poison(delta.at(b, h, seq + gap))) << "written past a row's end";
      ASSERT_TRUE(is_poison(lse_log2.at(b, h, seq))) << "written past a row's end";
    }
  }
}

TEST(Preprocess, matches_fp64_for_every_head_dim_layout_and_architecture) {
  REQUIRE_DEVICE();
  int cases = 0;
  for (const jit::Target& target : targets_to_run()) {
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      for (const std::int64_t dim : {8, 64, 72, 80, 128, 256}) {
        for (const Layout layout : kLayouts) {
          for (const std::int64_t seq : {1, 37, 261}) {
            check({dtype, {2, seq, 3, dim}, layout, seq != 37}, target);
            if (testing::Test::HasFatalFailure()) return;
            ++cases;
          }
        }
      }
    }
  }
  std::printf("backward_preprocess: %d cases match fp64\n", cases);
}

TEST(Preprocess, serves_head_dims_that_are_no_multiple_of_eight_and_beyond_one_pass) {
  REQUIRE_DEVICE();
  for (const std::int64_t dim : {1, 3, 20, 33, 100, 264, 511, 1024}) {
    check({DType::kBFloat16, {1, 45, 2, dim}, Layout::kContiguous, true}, targets_to_run().at(0));
    if (testing::Test::HasFatalFailure()) return;
  }
}

TEST(Preprocess, packed_sequences_are_one_batch_of_rows) {
  REQUIRE_DEVICE();
  check({DType::kFloat16, {1, 1003, 4, 80}, Layout::kContiguous, true}, targets_to_run().at(0));
}

TEST(Preprocess, works_above_two_to_the_31_elements) {
  REQUIRE_DEVICE();
  constexpr std::int64_t kSeq = (std::int64_t{1} << 18) + 3, kHeads = 64, kDim = 128;
  constexpr std::int64_t kElements = kSeq * kHeads * kDim;
  static_assert(kElements > std::int64_t{1} << 31);
  const auto available = free_memory(kDevice);
  ASSERT_TRUE(available.ok());
  if (*available < 10'000'000'000u) GTEST_SKIP() << "10 GB of device memory are needed, " << *available << " are free";

  auto o = DeviceBuffer::make(kDevice, kElements * 2);
  auto d_o = DeviceBuffer::make(kDevice, kElements * 2);
  auto lse = DeviceBuffer::make(kDevice, kSeq * kHeads * 4);
  auto delta = DeviceBuffer::make(kDevice, kSeq * kHeads * 4);
  auto lse_log2 = DeviceBuffer::make(kDevice, kSeq * kHeads * 4);
  for (auto* buffer : {&o, &d_o, &lse, &delta, &lse_log2}) ASSERT_TRUE(buffer->ok()) << buffer->status().message();
  ASSERT_OK(o->fill_words16(encode(DType::kFloat16, 0.5)));
  ASSERT_OK(d_o->fill_words16(encode(DType::kFloat16, 0.25)));
  const float two = 2;
  std::uint32_t two_bits;
  std::memcpy(&two_bits, &two, 4);
  ASSERT_OK(lse->fill_words32(two_bits));
  ASSERT_OK(delta->fill_words32(kPoison32));
  ASSERT_OK(lse_log2->fill_words32(kPoison32));
  // Rows on both sides of 2^31 elements, and the last, differ.
  const std::int64_t special[] = {(std::int64_t{1} << 31) / kDim - 1, (std::int64_t{1} << 31) / kDim,
                                  kSeq * kHeads - 1};
  const std::vector<std::uint16_t> row(kDim, encode(DType::kFloat16, 3));
  for (const std::int64_t r : special)
    ASSERT_OK(o->upload(row.data(), kDim * 2, static_cast<std::size_t>(r * kDim * 2)));

  const TensorView o_view{o->data(), 0, kHeads * kDim, kDim};
  const TensorView d_o_view{d_o->data(), 0, kHeads * kDim, kDim};
  const auto rows = [](const DeviceBuffer& buffer) { return RowView{buffer.as<float>(), 0, kSeq}; };
  const PreprocessArgs args{DType::kFloat16, 1,          kSeq, kHeads,       kDim,           o_view,
                            d_o_view,        rows(*lse), {},   rows(*delta), rows(*lse_log2)};
  ASSERT_OK(backward_preprocess(kDevice, args, nullptr));
  std::vector<float> got(kSeq * kHeads), got_lse(kSeq * kHeads);
  ASSERT_OK(delta->download(got.data(), got.size() * 4));
  ASSERT_OK(lse_log2->download(got_lse.data(), got_lse.size() * 4));
  for (std::int64_t h = 0; h < kHeads; ++h) {
    for (std::int64_t s = 0; s < kSeq; ++s) {
      const std::int64_t r = s * kHeads + h;
      const bool differs = r == special[0] || r == special[1] || r == special[2];
      const auto at = static_cast<std::size_t>(h * kSeq + s);
      ASSERT_EQ(got[at], differs ? 3 * 0.25f * kDim : 0.125f * kDim) << "head " << h << " query " << s;
      ASSERT_NEAR(got_lse[at], 2 * kLog2E, 1e-6) << "head " << h << " query " << s;
    }
  }
  std::printf("backward_preprocess: %lld elements a tensor, all rows right\n", static_cast<long long>(kElements));
}

TEST(Preprocess, strides_beyond_two_to_the_31_elements_are_followed) {
  REQUIRE_DEVICE();
  constexpr std::int64_t kBatchStride = (std::int64_t{1} << 31) + 8, kDim = 8;
  const auto available = free_memory(kDevice);
  ASSERT_TRUE(available.ok());
  if (*available < 10'000'000'000u) GTEST_SKIP() << "10 GB of device memory are needed, " << *available << " are free";
  auto o = DeviceBuffer::make(kDevice, (kBatchStride + kDim) * 2);
  auto d_o = DeviceBuffer::make(kDevice, (kBatchStride + kDim) * 2);
  auto small = DeviceBuffer::make(kDevice, 64);
  for (auto* buffer : {&o, &d_o, &small}) ASSERT_TRUE(buffer->ok()) << buffer->status().message();
  ASSERT_OK(small->fill_bytes(0));
  for (auto* buffer : {&*o, &*d_o}) {
    ASSERT_OK(buffer->fill_words16(kPoison16));
    for (std::int64_t b = 0; b < 2; ++b) {
      const std::vector<std::uint16_t> row(kDim, encode(DType::kBFloat16, static_cast<double>(b + 1)));
      ASSERT_OK(buffer->upload(row.data(), kDim * 2, static_cast<std::size_t>(b * kBatchStride * 2)));
    }
  }
  float* base = small->as<float>();
  const PreprocessArgs args{DType::kBFloat16,
                            2,
                            1,
                            1,
                            kDim,
                            {o->data(), kBatchStride, 8, 8},
                            {d_o->data(), kBatchStride, 8, 8},
                            {base, 1, 1},
                            {},
                            {base + 2, 1, 1},
                            {base + 4, 1, 1}};
  ASSERT_OK(backward_preprocess(kDevice, args, nullptr));
  float got[6];
  ASSERT_OK(small->download(got, sizeof got));
  EXPECT_EQ(got[2], 8.0f);
  EXPECT_EQ(got[3], 32.0f);
}

}  // namespace
}  // namespace tessera::cuda
