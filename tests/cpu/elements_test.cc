#include "cpu/elements.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace tessera::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr double kUlp = 0x1p-24;  // half the gap above 1

// visit(x) for numbers of both signs and all sizes up to `most`.
template <class Visit>
void for_numbers(float most, Visit&& visit) {
  for (std::uint32_t bits = 0; bits < std::bit_cast<std::uint32_t>(most); bits += 4999) {
    visit(std::bit_cast<float>(bits));
    visit(-std::bit_cast<float>(bits));
  }
}

// The largest error of f, as a part of its value. Of values below the smallest normal number: as a part of that.
template <class F, class Exact>
double worst(float most, F&& f, Exact&& exact) {
  double found = 0;
  for_numbers(most, [&](float x) {
    const double want = exact(static_cast<double>(x));
    if (want > std::numeric_limits<float>::max()) return;
    const double allowed = std::max(std::abs(want), static_cast<double>(std::numeric_limits<float>::min()));
    found = std::max(found, std::abs(static_cast<double>(f(x)) - want) / allowed);
  });
  return found;
}

TEST(Elements, exponentials_are_right_to_three_halves_of_a_unit_in_the_last_place) {
  EXPECT_LT(worst(120.0f, exponential, [](double x) { return std::exp(x); }), 3 * kUlp);
  EXPECT_EQ(exponential(0), 1.0f);
  EXPECT_EQ(exponential(89), kInfinity);
  EXPECT_EQ(exponential(kInfinity), kInfinity);
  EXPECT_EQ(exponential(-105), 0.0f);
  EXPECT_EQ(exponential(-kInfinity), 0.0f);
  EXPECT_TRUE(std::isnan(exponential(std::numeric_limits<float>::quiet_NaN())));
}

TEST(Elements, the_part_of_a_normal_distribution_has_the_accuracy_that_is_promised) {
  const auto exact = [](double x) { return 0.5 * std::erfc(-x / std::sqrt(2.0)); };
  EXPECT_LT(worst(1.0f, normal_below, exact), 5e-7);
  EXPECT_LT(worst(4.0f, normal_below, exact), 2e-6);
  EXPECT_LT(worst(13.0f, normal_below, exact), 2e-5);
  EXPECT_EQ(normal_below(40), 1.0f);
  EXPECT_EQ(normal_below(-40), 0.0f);
  EXPECT_EQ(normal_below(kInfinity), 1.0f);
  EXPECT_TRUE(std::isnan(normal_below(std::numeric_limits<float>::quiet_NaN())));
}

TEST(Elements, numbers_are_rounded_to_the_nearest_16_bits_ties_to_even) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    int wrong = 0;
    for (std::uint32_t i = 0; i < 0x7f00u; ++i) {
      const auto bits = static_cast<std::uint16_t>(i), next = static_cast<std::uint16_t>(i + 1);
      const float x = load(dtype, &bits, 0), y = load(dtype, &next, 0);
      if (std::isinf(y) || std::isnan(y)) break;
      const double middle = (static_cast<double>(x) + static_cast<double>(y)) / 2;
      const auto rounded = [&](float value) {
        std::uint16_t to = 0;
        store(dtype, &to, 0, value);
        return to;
      };
      const auto tie = static_cast<float>(middle);
      wrong += rounded(x) != bits || rounded(-x) != (bits | 0x8000u);
      if (static_cast<double>(tie) != middle) continue;  // between subnormal numbers of fp32
      wrong += rounded(tie) != (i % 2 == 0 ? bits : next);
      wrong += rounded(std::nextafter(tie, 0.0f)) != bits && tie != 0;
      wrong += rounded(std::nextafter(tie, kInfinity)) != next;
    }
    EXPECT_EQ(wrong, 0) << name_of(dtype);
  }
}

}  // namespace
}  // namespace tessera::cpu
