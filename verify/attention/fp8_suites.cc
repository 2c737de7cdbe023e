// Cases of e4m3: forward with scales.
#include "verify/attention/make_case.h"

namespace tessera::cases {
namespace {

constexpr DType kBf16 = DType::kBFloat16, kFp16 = DType::kFloat16;

}  // namespace

void add_quick_fp8(std::vector<Case>& out) {
  const auto add = [&](DType dtype, const Shape& s, std::initializer_list<Change> changes) {
    out.push_back(make(kForward, dtype, s, changes));
  };
  for (const std::int64_t d : {16, 64, 80, 128}) add(kBf16, {1, 65, 97, 2, 1, d, d}, {fp8()});
  const Shape s{2, 70, 150, 4, 2, 64, 64};
  add(kBf16, s, {fp8(-1, -1, -1)});
  add(kFp16, s, {fp8(64, 64, 64), causal(), bottom_right()});
  add(kBf16, s, {fp8(128, 128, 128), causal(), top_left()});
  add(kFp16, s, {fp8(0, 64, 0), window(31, 8), bottom_right()});
  add(kBf16, {1, 150, 70, 2, 1, 64, 32}, {fp8(), causal(), bottom_right()});  // rows that see nothing
  add(kBf16, s, {fp8(0, 64, 128), softcap(2), alibi(), bottom_right()});
  add(kBf16, s, {fp8(), scale(-0.25F), no_lse()});
  add(kFp16, s, {fp8(64, 64, 0), layout(Layout::kPadded)});
  add(kBf16, s, {fp8(), layout(Layout::kHeadsMajor)});
  add(kBf16, s, {varlen({17, 0, 1, 133}, {120, 5, 0, 140}, 3), fp8(), causal(), bottom_right()});
  add(kFp16, s, {varlen({31, 2, 90}, {16, 2, 130}), fp8(64, 64, 64), layout(Layout::kPadded)});
  for (const bool rotated : {false, true}) {
    for (const std::int64_t d : {64, 80})
      add(kBf16, {2, 150, 300, 4, 2, d, d}, {rounded_to_fp8(rotated), causal(), bottom_right()});
    add(kFp16, {1, 70, 130, 2, 1, 96, 48}, {rounded_to_fp8(rotated), layout(Layout::kPadded)});
  }
  add(kBf16, s, {varlen({17, 0, 1, 133}, {120, 5, 0, 140}, 3), rounded_to_fp8(), causal(), bottom_right()});
  add(kBf16, {2, 150, 300, 4, 2, 64, 64}, {rounded_to_fp8_with_residuals(), causal(), bottom_right()});
  add(kFp16, s, {varlen({17, 0, 1, 133}, {120, 5, 0, 140}, 3), rounded_to_fp8_with_residuals()});
  add(kBf16, {1, 65, 3000, 1, 1, 64, 64}, {fp8(), values(Distribution::kMeanValues)});  // sums are promoted
}

void add_full_fp8(std::vector<Case>& out) {
  const auto add = [&](const Shape& s, std::initializer_list<Change> changes) {
    out.push_back(make(kForward, kBf16, s, changes));
  };
  for (const std::int64_t d : {16, 32, 48, 64, 80, 96, 112, 128, 160, 176, 192, 240, 256}) {
    add({1, 97, 231, 4, 2, d, d}, {fp8(), causal(), bottom_right()});
    add({1, 70, 300, 2, 2, d, 272 - d}, {fp8(64, 64, 128)});
  }
  for (const std::int64_t n : {1, 31, 32, 33, 63, 64, 65, 95, 96, 97, 127, 128, 129, 191, 193, 257}) {
    add({1, n, 257, 2, 1, 128, 128}, {fp8()});
    add({1, 193, n, 2, 1, 64, 64}, {fp8(), causal(), bottom_right()});
  }
  // Several times as many tiles as a large GPU runs at once; scales that change from block to block.
  add({3, 40, 130, 200, 50, 64, 64}, {fp8(), causal(), bottom_right()});
  for (const std::int64_t d : {64, 128}) add({2, 300, 700, 16, 2, d, d}, {fp8(64, 64, 64), uneven()});
  add({2, 300, 700, 16, 2, 128, 128}, {fp8(64, 64, 128), uneven()});  // two scales of K in a key tile
  for (const bool rotated : {false, true}) add({1, 130, 700, 2, 1, 128, 128}, {rounded_to_fp8(rotated), uneven()});
  // The largest keys, which have most of the weight, are in key tiles with each of V's scales.
  add({1, 130, 700, 2, 1, 128, 128}, {rounded_to_fp8(), uneven(192)});
  add({1, 130, 400, 133, 133, 256, 256}, {rounded_to_fp8(), causal(), bottom_right()});  // the dynamic scheduler
  add({2, 130, 100, 200, 50, 16, 16}, {rounded_to_fp8()});  // the next Q is loaded as soon as this one is released
  // Q is loaded where the sums of the work tile before were.
  add({1, 130, 1100, 140, 70, 256, 256}, {rounded_to_fp8(), causal(), bottom_right()});
  add({1, 130, 1100, 140, 70, 256, 256}, {rounded_to_fp8(), softcap(20)});
  for (const auto& [qk, v] : {std::pair{256, 64}, {64, 256}, {208, 208}}) {
    add({3, 130, 1100, 60, 30, qk, v}, {varlen({130, 0, 70}, {1100, 5, 0}), rounded_to_fp8()});
  }
  for (const std::int64_t d : {64, 128, 256}) {
    add({1, 300, 700, 2, 1, d, d}, {fp8(64, 64, 64), values(Distribution::kSteps)});
    add({1, 300, 700, 2, 1, d, d}, {fp8(128, 64, 128), causal(), bottom_right(), softcap(20)});
  }
  add({3, 330, 90, 2, 2, 128, 128}, {fp8(64, 128, 0), window(40, 9), bottom_right()});
  // Sums of many keys are promoted.
  for (const std::int64_t d : {80, 96, 128, 256}) {
    add({1, 100, 3000, 2, 1, d, d}, {fp8(), values(Distribution::kMeanValues)});
    add({1, 100, 3000, 2, 1, d, d}, {rounded_to_fp8(), values(Distribution::kMeanValues), causal(), bottom_right()});
  }
  add({1, 100, 3000, 2, 1, 128, 128}, {fp8(64, 64, 64), values(Distribution::kMeanValues)});
  add({1, 100, 3000, 2, 1, 128, 128}, {fp8(), values(Distribution::kMeanValues), softcap(20)});
  // References are raised by more than fp16 can hold, and long after sums were promoted.
  for (const Distribution d : {Distribution::kSteps, Distribution::kSink}) {
    add({1, 100, 2000, 2, 1, 64, 64}, {fp8(), values(d)});
  }
  add({1, 100, 2000, 2, 1, 128, 128}, {fp8(), values(Distribution::kConstant)});  // the largest sums
  for (const std::int64_t d : {64, 128, 256}) add({1, 100, 2000, 2, 1, d, d}, {rounded_to_fp8(), truncated_sums()});
  for (const std::int64_t d : {64, 128}) add({1, 100, 2000, 2, 1, d, d}, {rounded_to_fp8(), uneven()});
  add({1, 100, 2000, 2, 1, 128, 128}, {fp8(64, 64, 64), uneven()});
  for (const std::int64_t d : {16, 48, 96, 112, 128, 160, 192, 256}) {
    add({1, 97, 231, 4, 2, d, d}, {rounded_to_fp8(d == 192)});
  }
  for (const std::int64_t d : {16, 80, 128, 240}) add({1, 97, 231, 4, 2, d, d}, {rounded_to_fp8_with_residuals()});
  for (const bool rotated : {false, true}) {
    add({1, 129, 257, 2, 2, 128, 64}, {rounded_to_fp8(rotated), layout(Layout::kHeadsMajor), softcap(20)});
  }
}

void add_hostile_fp8(std::vector<Case>& out) {
  const auto add = [&](const Shape& s, std::initializer_list<Change> changes) {
    out.push_back(make(kForward, kBf16, s, changes));
  };
  // No keys at all: queries must not wait for them.
  for (const Change& rounding : {rounded_to_fp8(), rounded_to_fp8(true), rounded_to_fp8_with_residuals()}) {
    add({1, 64, 0, 2, 1, 64, 64}, {rounding});
  }
  for (const Distribution d :
       {Distribution::kLogits120, Distribution::kLogits1e10, Distribution::kLogitsMinus120, Distribution::kSteps,
        Distribution::kSink, Distribution::kOneHot, Distribution::kConstant, Distribution::kHugeValues}) {
    add({1, 130, 300, 2, 1, 64, 64}, {fp8(), values(d)});
    add({1, 130, 300, 2, 1, 128, 128}, {fp8(64, 64, 128), values(d), causal(), bottom_right()});
  }
  for (const Distribution d :
       {Distribution::kLogits120, Distribution::kSteps, Distribution::kOneHot, Distribution::kHugeValues}) {
    add({1, 130, 300, 2, 1, 128, 128}, {rounded_to_fp8(), values(d)});
  }
  for (const int exponent : {40, -40}) add({1, 70, 200, 2, 1, 64, 64}, {fp8(64, 64, 0), scale_exponent(exponent)});
  add({1, 64, 8, 2, 1, 64, 64}, {fp8(), causal(), bottom_right()});
  add({1, 8, 8, 2, 1, 64, 64}, {varlen({5, 9, 3}, {0, 7, 0}, 8), fp8()});
}

void add_sanitize_fp8(std::vector<Case>& out) {
  out.push_back(make(kForward, kBf16, {1, 97, 131, 2, 1, 128, 128}, {fp8()}));
  out.push_back(make(kForward, kBf16, {1, 131, 197, 2, 1, 80, 80}, {fp8(64, 64, 64), causal(), bottom_right()}));
  out.push_back(make(kForward, kBf16, {1, 131, 1100, 1, 1, 128, 128}, {fp8()}));
  out.push_back(make(kForward, kFp16, {1, 1, 1, 2, 1, 64, 64}, {varlen({17, 0, 1, 70}, {20, 5, 0, 80}, 3), fp8()}));
  for (const bool rotated : {false, true}) {
    out.push_back(make(kForward, kBf16, {1, 131, 197, 2, 1, 80, 80}, {rounded_to_fp8(rotated)}));
  }
}

void add_bench_fp8(std::vector<Case>& out) {
  for (const std::int64_t d : {64, 80, 128, 256}) {
    const std::int64_t h = 2048 / d;
    for (const std::int64_t s : {4096, 16384}) {
      out.push_back(make(kForward, kBf16, {16384 / s, s, s, h, h, d, d}, {fp8()}));
      out.push_back(make(kForward, kBf16, {16384 / s, s, s, h, h, d, d}, {fp8(), causal()}));
      out.push_back(make(kForward, kBf16, {16384 / s, s, s, h, h, d, d}, {rounded_to_fp8()}));
      out.push_back(make(kForward, kBf16, {16384 / s, s, s, h, h, d, d}, {rounded_to_fp8(), causal()}));
    }
    if (d <= 128) out.push_back(make(kForward, kBf16, {1, 16384, 16384, h, h, d, d}, {fp8(64, 64, 128), causal()}));
  }
}

}  // namespace tessera::cases
