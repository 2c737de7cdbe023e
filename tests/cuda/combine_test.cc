#include "attention/split_combine.h"

#include "tests/cuda/helpers.h"

namespace tessera::cuda {
namespace {

using attention::combine_launch;
using attention::CombineArgs;

struct Case {
  DType dtype;
  Shape shape;
  std::int64_t splits;
  Layout layout;
  double lse_spread;  // of the splits' LSE, in units of the natural log
};

std::string describe(const Case& c) {
  return std::string(tessera::name_of(c.dtype)) + " [" + std::to_string(c.shape.batch) + ", " +
         std::to_string(c.shape.seq) + ", " + std::to_string(c.shape.heads) + ", " + std::to_string(c.shape.dim) +
         "] x " + std::to_string(c.splits) + " layout " + std::to_string(static_cast<int>(c.layout)) + " spread " +
         std::to_string(c.lse_spread);
}

Status upload(DeviceBuffer& buffer, const std::vector<float>& values) {
  auto made = DeviceBuffer::make(kDevice, values.size() * 4);
  if (!made.ok()) return made.status();
  buffer = std::move(*made);
  return buffer.upload(values.data(), values.size() * 4);
}

void run(const CombineArgs& args, const jit::Target& target) {
  const auto info = device(kDevice);
  ASSERT_TRUE(info.ok());
  const auto what = combine_launch(args, info->multiprocessors);
  ASSERT_TRUE(what.ok()) << what.status().message();
  const auto kernel = load_kernel(kDevice, what->instance, target);
  ASSERT_TRUE(kernel.ok()) << kernel.status().message();
  const auto stream = Stream::make(kDevice);
  ASSERT_TRUE(stream.ok());
  ASSERT_OK(launch(**kernel, *what, stream->get()));
  ASSERT_OK(stream->synchronize());
}

void check(const Case& c, const jit::Target& target) {
  SCOPED_TRACE(describe(c) + " on " + name_of(target));
  const auto [batch, seq, heads, dim] = c.shape;
  const std::int64_t rows = c.shape.rows();
  std::mt19937 random(4321);
  std::normal_distribution<double> normal;
  std::uniform_real_distribution<double> uniform(-1, 1);
  std::vector<float> o_partial(static_cast<std::size_t>(c.splits * rows * dim), std::nanf(""));
  std::vector<float> lse_partial(static_cast<std::size_t>(c.splits * rows));
  for (std::int64_t i = 0; i < c.splits; ++i) {
    for (std::int64_t r = 0; r < rows; ++r) {
      const bool empty = r % 7 == 2 || (i + r) % 5 == 1;  // the first: a row with no key in any split
      const auto at = static_cast<std::size_t>(i * rows + r);
      lse_partial[at] = empty ? -kInfinity : static_cast<float>(uniform(random) * c.lse_spread);
      if (empty) continue;  // its o stays NaN: nothing may come of it
      for (std::int64_t d = 0; d < dim; ++d)
        o_partial[at * static_cast<std::size_t>(dim) + static_cast<std::size_t>(d)] =
            static_cast<float>(normal(random));
    }
  }
  DeviceBuffer o_device, lse_device;
  ASSERT_OK(upload(o_device, o_partial));
  ASSERT_OK(upload(lse_device, lse_partial));
  HostTensor o(c.shape, c.layout);
  const std::vector<std::uint16_t> before = o.bits;
  HostRows lse(c.shape, 2);
  ASSERT_OK(o.to_device());
  ASSERT_OK(lse.to_device());

  run({c.dtype, c.splits, batch, seq, heads, dim, o_device.as<float>(), lse_device.as<float>(), o.view(), lse.view()},
      target);
  if (testing::Test::HasFatalFailure()) return;
  ASSERT_OK(o.buffer.download(o.bits.data(), o.bits.size() * 2));
  ASSERT_OK(lse.buffer.download(lse.values.data(), lse.values.size() * 4));

  for (std::int64_t b = 0; b < batch; ++b) {
    for (std::int64_t h = 0; h < heads; ++h) {
      for (std::int64_t s = 0; s < seq; ++s) {
        const std::int64_t r = (b * heads + h) * seq + s;
        double maximum = -HUGE_VAL;
        for (std::int64_t i = 0; i < c.splits; ++i)
          maximum = std::max<double>(maximum, lse_partial[static_cast<std::size_t>(i * rows + r)]);
        std::vector<double> expected(static_cast<std::size_t>(dim), 0.0);
        double sum = 0, largest = 0;
        for (std::int64_t i = 0; i < c.splits && std::isfinite(maximum); ++i) {
          const auto at = static_cast<std::size_t>(i * rows + r);
          const double weight = std::exp(lse_partial[at] - maximum);
          if (weight == 0) continue;
          sum += weight;
          for (std::size_t d = 0; d < static_cast<std::size_t>(dim); ++d) {
            expected[d] += weight * o_partial[at * static_cast<std::size_t>(dim) + d];
            largest = std::max<double>(largest, std::fabs(o_partial[at * static_cast<std::size_t>(dim) + d]));
          }
        }
        const float got_lse = lse.at(b, h, s);
        if (sum == 0) {
          ASSERT_EQ(got_lse, -kInfinity) << b << " " << h << " " << s;
        } else {
          const double wanted = maximum + std::log(sum);
          ASSERT_LE(std::fabs(got_lse - wanted), 1e-6 + 1.2e-7 * std::fabs(wanted)) << b << " " << h << " " << s;
        }
        for (std::int64_t d = 0; d < dim; ++d) {
          const double got = decode(c.dtype, o.at(b, s, h, d));
          const double wanted = sum == 0 ? 0 : expected[static_cast<std::size_t>(d)] / sum;
          // Rounding to the output's type, and fp32 arithmetic whose exponent carries the error of lse - maximum.
          const double allowed = 1.02 * rounding(c.dtype) * std::fabs(wanted) + (4e-6 + 2e-7 * c.lse_spread) * largest +
                                 (c.dtype == DType::kFloat16 ? 6e-8 : 0);
          ASSERT_LE(std::fabs(got - wanted), allowed) << b << " " << h << " " << s << " " << d;
          o.at(b, s, h, d) = kPoison16;
        }
      }
      ASSERT_TRUE(is_poison(lse.at(b, h, seq))) << "written past a row's end";
    }
  }
  ASSERT_EQ(o.bits, before) << "written outside the view";
}

TEST(Combine, matches_fp64_for_every_head_dim_layout_and_architecture) {
  REQUIRE_DEVICE();
  int cases = 0;
  for (const jit::Target& target : targets_to_run()) {
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      for (const std::int64_t dim : {8, 64, 72, 80, 128, 256}) {
        for (const Layout layout : kLayouts) {
          for (const std::int64_t splits : {1, 3, 17}) {
            check({dtype, {2, 5, 3, dim}, splits, layout, 5}, target);
            if (testing::Test::HasFatalFailure()) return;
            ++cases;
          }
        }
      }
    }
  }
  std::printf("split_combine: %d cases match fp64\n", cases);
}

TEST(Combine, takes_many_splits_and_far_apart_ones) {
  REQUIRE_DEVICE();
  for (const std::int64_t splits : {2, 64, 256, 300}) {
    for (const double spread : {0.0, 100.0, 1e4, 1e30}) {
      check({DType::kBFloat16, {1, 1, 8, 128}, splits, Layout::kContiguous, spread}, targets_to_run().at(0));
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

TEST(Combine, serves_many_rows_and_head_dims_beyond_one_block) {
  REQUIRE_DEVICE();
  for (const std::int64_t dim : {1, 3, 20, 100, 257, 300, 2048}) {
    check({DType::kFloat16, {1, 9, 2, dim}, 4, Layout::kContiguous, 3}, targets_to_run().at(0));
    if (testing::Test::HasFatalFailure()) return;
  }
  check({DType::kFloat16, {3, 1001, 5, 64}, 5, Layout::kContiguous, 3}, targets_to_run().at(0));
}

TEST(Combine, rounds_to_nearest_even_and_keeps_nan_on_every_architecture) {
  REQUIRE_DEVICE();
  std::vector<float> values;
  for (const std::uint32_t upper :
       {0x3f80u, 0x3f81u, 0xbf80u, 0x4049u, 0x0001u, 0x0080u, 0x7f7fu, 0x477fu, 0x3380u, 0x8000u}) {
    for (const std::uint32_t lower :
         {0x0000u, 0x0001u, 0x1000u, 0x2000u, 0x3000u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      const std::uint32_t bits = upper << 16 | lower;
      float value;
      std::memcpy(&value, &bits, 4);
      values.push_back(value);
    }
  }
  for (const float special : {kInfinity, -kInfinity, std::nanf(""), 65504.0f, 65519.0f, 65520.0f, 1e-8f, 0.0f})
    values.push_back(special);
  std::uint32_t thin = 0x7f800001u;  // a NaN whose payload lies in the half that is cut off
  float thin_nan;
  std::memcpy(&thin_nan, &thin, 4);
  values.push_back(thin_nan);
  while (values.size() % 8 != 0) values.push_back(1);
  const auto dim = static_cast<std::int64_t>(values.size());

  for (const jit::Target& target : targets_to_run()) {
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      for (const Layout layout : {Layout::kContiguous, Layout::kOdd}) {  // pairs, and one by one
        SCOPED_TRACE(std::string(tessera::name_of(dtype)) + " on " + name_of(target));
        DeviceBuffer o_device, lse_device;
        ASSERT_OK(upload(o_device, values));
        ASSERT_OK(upload(lse_device, {0}));
        HostTensor o({1, 1, 1, dim}, layout);
        ASSERT_OK(o.to_device());
        run({dtype, 1, 1, 1, 1, dim, o_device.as<float>(), lse_device.as<float>(), o.view(), {}}, target);
        if (testing::Test::HasFatalFailure()) return;
        ASSERT_OK(o.buffer.download(o.bits.data(), o.bits.size() * 2));
        for (std::int64_t d = 0; d < dim; ++d) {
          const float value = values[static_cast<std::size_t>(d)];
          const std::uint16_t got = o.at(0, 0, 0, d);
          if (std::isnan(value)) {
            EXPECT_TRUE(std::isnan(decode(dtype, got))) << "NaN became " << got;
          } else if (value == 0) {
            EXPECT_EQ(decode(dtype, got), 0) << value;  // of either sign: it has been through a sum
          } else {
            EXPECT_EQ(got, encode(dtype, value)) << value;
          }
        }
      }
    }
  }
}

TEST(Combine, works_above_two_to_the_31_elements) {
  REQUIRE_DEVICE();
  constexpr std::int64_t kSplits = 3, kSeq = (std::int64_t{1} << 16) + 1, kHeads = 86, kDim = 128;
  constexpr std::int64_t kRows = kSeq * kHeads, kPartial = kSplits * kRows * kDim;
  static_assert(kPartial > std::int64_t{1} << 31);
  const auto available = free_memory(kDevice);
  ASSERT_TRUE(available.ok());
  if (*available < 12'000'000'000u) GTEST_SKIP() << "12 GB of device memory are needed, " << *available << " are free";

  auto o_partial = DeviceBuffer::make(kDevice, kPartial * 4);
  auto lse_partial = DeviceBuffer::make(kDevice, kSplits * kRows * 4);
  auto o = DeviceBuffer::make(kDevice, kRows * kDim * 2);
  for (auto* buffer : {&o_partial, &lse_partial, &o}) ASSERT_TRUE(buffer->ok()) << buffer->status().message();
  const float one = 1;
  std::uint32_t one_bits;
  std::memcpy(&one_bits, &one, 4);
  ASSERT_OK(o_partial->fill_words32(one_bits));
  ASSERT_OK(lse_partial->fill_words32(0));
  ASSERT_OK(o->fill_words16(kPoison16));
  // The last split's last row, beyond 2^31 elements: (1 + 1 + 7) / 3.
  const std::vector<float> row(kDim, 7);
  ASSERT_OK(o_partial->upload(row.data(), kDim * 4, static_cast<std::size_t>((kPartial - kDim) * 4)));

  const CombineArgs args{DType::kFloat16,
                         kSplits,
                         1,
                         kSeq,
                         kHeads,
                         kDim,
                         o_partial->as<float>(),
                         lse_partial->as<float>(),
                         {o->data(), 0, kHeads * kDim, kDim},
                         {}};
  ASSERT_OK(split_combine(kDevice, args, nullptr));
  std::vector<std::uint16_t> got(static_cast<std::size_t>(kRows * kDim));
  ASSERT_OK(o->download(got.data(), got.size() * 2));
  // Row (h, s) of the partials with the highest index is the output's last too.
  const std::uint16_t usual = encode(DType::kFloat16, 1), last = encode(DType::kFloat16, 3);
  const std::size_t end = got.size() - static_cast<std::size_t>(kDim);
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (got[i] != (i < end ? usual : last)) FAIL() << "element " << i << " is " << decode(DType::kFloat16, got[i]);
  }
  std::printf("split_combine: %lld partial elements, all rows right\n", static_cast<long long>(kPartial));
}

}  // namespace
}  // namespace tessera::cuda
