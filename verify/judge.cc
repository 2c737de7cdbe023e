// Rounding to the storage types, sizes of tensors, and the accuracy rule.
#include "verify/judge.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <limits>

#include "verify/parallel.h"

namespace tessera::verify {
namespace {

struct Format {
  int significand;    // bits of precision, the hidden one included
  int quantum;        // exponent of the smallest subnormal
  int max_exponent;   // every finite value is below 2^max_exponent
  int fraction_bits;  // stored
  int exponent_bias;
};

constexpr Format format_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return {11, -24, 16, 10, 15};
    case DType::kBFloat16:
      return {8, -133, 128, 7, 127};
    case DType::kFloat32:
      break;
  }
  return {24, -149, 128, 23, 127};
}

// Of a normal double; std::ldexp is a call that takes longer than everything around it.
double power_of_two(int exponent) { return std::bit_cast<double>(static_cast<std::uint64_t>(exponent + 1023) << 52); }

struct RowVerdict {
  double ratio = 0;  // of the worst row
  std::int64_t row = -1;
  double err = 0;
  double allowed = 0;
};

// Each vector along the last dim by itself, so that an error in a row of small values (the late rows of a causal
// output, the gradients of keys that few queries see) is not hidden by the tolerance of the largest values. One row
// of the plain computation may be right by luck, so the error of its median row, relative to the row's size, and the
// expected error of rounding dS are allowed too, and the factor is wider than the rule's 2.
RowVerdict judge_rows(const HostTensor& result, const HostTensor& oracle, const HostTensor& baseline, double per_value,
                      double per_term, double per_noise) {
  constexpr double kFactor = 6;
  const auto dims = static_cast<std::size_t>(oracle.shape[3]);
  if (dims < 2) return {};  // lse: fp32, and of one size throughout
  const std::size_t rows = oracle.data.size() / dims;
  std::vector<double> err(rows), plain(rows), size(rows), relative;
  for (std::size_t r = 0; r < rows; ++r) {
    for (std::size_t x = r * dims; x < (r + 1) * dims; ++x) {
      const double want = oracle.data[x];
      err[r] += (result.data[x] - want) * (result.data[x] - want);
      if (std::isfinite(baseline.data[x])) plain[r] += (baseline.data[x] - want) * (baseline.data[x] - want);
      size[r] += want * want;
    }
    err[r] = std::sqrt(err[r]);
    plain[r] = std::sqrt(plain[r]);
    size[r] = std::sqrt(size[r]);
    if (size[r] > 0) relative.push_back(plain[r] / size[r]);
  }
  double median = 0;
  if (!relative.empty()) {
    const auto middle = relative.begin() + static_cast<std::ptrdiff_t>(relative.size() / 2);
    std::nth_element(relative.begin(), middle, relative.end());
    median = *middle;
  }
  RowVerdict worst;
  for (std::size_t r = 0; r < rows; ++r) {
    if (err[r] == 0) continue;
    const double expected = oracle.row_rounding.empty() ? 0 : oracle.row_rounding[r];
    const double allowed = kFactor * std::max({plain[r], median * size[r], expected}) + per_value * size[r] +
                           per_term * std::sqrt(static_cast<double>(dims)) +
                           (oracle.row_noise.empty() ? 0 : per_noise * oracle.row_noise[r]);
    if (err[r] / allowed > worst.ratio) {
      worst = {err[r] / allowed, static_cast<std::int64_t>(r), err[r], allowed};
    }
  }
  return worst;
}

}  // namespace

double round_to(DType dtype, double value) {
  if (dtype == DType::kFloat32) return static_cast<float>(value);
  if (!std::isfinite(value) || value == 0) return value;
  const Format f = format_of(dtype);
  if (std::abs(value) >= power_of_two(f.quantum + f.significand) &&
      std::abs(value) < power_of_two(f.max_exponent - 1)) {
    // Far from both ends of the range: drop the low bits of the fp64 pattern; a carry into the exponent is right.
    const int dropped = 53 - f.significand;
    auto bits = std::bit_cast<std::uint64_t>(value);
    bits += (std::uint64_t{1} << (dropped - 1)) - 1 + ((bits >> dropped) & 1);
    return std::bit_cast<double>(bits >> dropped << dropped);
  }
  int exponent = 0;
  std::frexp(value, &exponent);  // |value| in [2^(exponent-1), 2^exponent)
  const int quantum = std::max(exponent - f.significand, f.quantum);
  const double result = std::ldexp(std::nearbyint(std::ldexp(value, -quantum)), quantum);
  if (std::abs(result) >= std::ldexp(1.0, f.max_exponent)) {
    return std::copysign(std::numeric_limits<double>::infinity(), value);
  }
  return result;
}

double round_to_e4m3(double value) {
  constexpr double kLargest = 448;
  constexpr int kSignificand = 4, kQuantum = -9;
  if (std::isnan(value) || value == 0) return value;
  if (std::abs(value) > kLargest) return std::copysign(kLargest, value);
  const int exponent = std::max(static_cast<int>(std::bit_cast<std::uint64_t>(std::abs(value)) >> 52) - 1022, -1000);
  const int quantum = std::max(exponent - kSignificand, kQuantum);
  return std::nearbyint(value * power_of_two(-quantum)) * power_of_two(quantum);
}

std::uint8_t to_bits_e4m3(double value) {
  const auto sign = static_cast<std::uint8_t>(std::signbit(value) ? 0x80 : 0);
  if (std::isnan(value)) return 0xff;
  const double x = std::abs(round_to_e4m3(value));
  if (x < power_of_two(-6)) return static_cast<std::uint8_t>(sign | static_cast<int>(x * power_of_two(9)));
  const int exponent = std::ilogb(x);
  return static_cast<std::uint8_t>(sign | ((exponent + 7) << 3) |
                                   (static_cast<int>(x * power_of_two(3 - exponent)) - 8));
}

double from_bits_e4m3(std::uint8_t bits) {
  const int exponent = bits >> 3 & 15, fraction = bits & 7;
  if (exponent == 15 && fraction == 7) return std::numeric_limits<double>::quiet_NaN();
  const double size = exponent == 0 ? fraction * power_of_two(-9) : (8 + fraction) * power_of_two(exponent - 10);
  return (bits & 0x80) != 0 ? -size : size;
}

void round_all(DType dtype, HostTensor& tensor) {
  over_range(tensor.size(), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t n = begin; n < end; ++n) {
      double& x = tensor.data[static_cast<std::size_t>(n)];
      x = round_to(dtype, x);
    }
  });
}

std::uint16_t to_bits16(DType dtype, double value) {
  const Format f = format_of(dtype);
  const auto sign = static_cast<std::uint16_t>(std::signbit(value) ? 0x8000 : 0);
  const auto infinity = static_cast<std::uint16_t>((1 << 15) - (1 << f.fraction_bits));
  if (std::isnan(value)) return static_cast<std::uint16_t>(infinity | (1 << (f.fraction_bits - 1)));
  const double x = std::abs(round_to(dtype, value));
  if (std::isinf(x)) return static_cast<std::uint16_t>(sign | infinity);
  if (x == 0) return sign;
  if (x < power_of_two(f.quantum + f.significand - 1)) {  // subnormal: a multiple of the quantum
    return static_cast<std::uint16_t>(sign | static_cast<std::uint32_t>(std::ldexp(x, -f.quantum)));
  }
  const auto bits = std::bit_cast<std::uint64_t>(x);
  const auto exponent = static_cast<int>(bits >> 52) - 1023;
  const auto fraction = static_cast<std::uint32_t>(bits >> (52 - f.fraction_bits)) & ((1U << f.fraction_bits) - 1);
  return static_cast<std::uint16_t>(sign | (static_cast<std::uint32_t>(exponent + f.exponent_bias) << f.fraction_bits) |
                                    fraction);
}

double from_bits16(DType dtype, std::uint16_t bits) {
  const Format f = format_of(dtype);
  const int fraction = bits & ((1 << f.fraction_bits) - 1);
  const int biased = (bits & 0x7fff) >> f.fraction_bits;
  const int all_ones = 0x7fff >> f.fraction_bits;
  double x = 0;
  if (biased == all_ones) {
    x = fraction == 0 ? std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
  } else if (biased == 0) {
    x = fraction * power_of_two(f.quantum);
  } else {
    x = (fraction + (1 << f.fraction_bits)) * power_of_two(biased - f.exponent_bias - f.fraction_bits);
  }
  return (bits & 0x8000) != 0 ? -x : x;
}

double largest(const HostTensor& t) {
  double most = 0;
  for (const double x : t.data) most = std::max(most, std::abs(x));
  return most;
}

double largest_norm(const HostTensor& t, bool of_columns) {
  std::vector<double> squares(static_cast<std::size_t>(t.shape[of_columns ? 3 : 2]));
  for (std::int64_t i = 0; i < t.shape[2]; ++i) {
    for (std::int64_t j = 0; j < t.shape[3]; ++j) {
      squares[static_cast<std::size_t>(of_columns ? j : i)] += t.at(0, 0, i, j) * t.at(0, 0, i, j);
    }
  }
  return squares.empty() ? 0 : std::sqrt(*std::max_element(squares.begin(), squares.end()));
}

double epsilon_of(DType dtype) { return std::ldexp(1.0, 1 - format_of(dtype).significand); }

// An error is uniform between -1/2 and 1/2 ulp, which is epsilon / m of a value with mantissa m; 0.735 is the root of the mean
// of 1 / m^2.
double rounding_error_of(DType dtype) { return 0.735 / std::sqrt(12.0) * epsilon_of(dtype); }

Verdict judge(const HostTensor& result, const HostTensor& oracle, const HostTensor& baseline, DType dtype,
              double floor) {
  Verdict verdict;
  char text[256];
  if (result.shape != oracle.shape || result.size() != oracle.size() || baseline.size() != oracle.size()) {
    verdict.message = "the shapes differ";
    verdict.ratio = std::numeric_limits<double>::infinity();
    return verdict;
  }

  double err_sq = 0, baseline_sq = 0, oracle_sq = 0, largest = 0;
  std::int64_t count = 0;
  const std::size_t n = oracle.data.size();
  for (std::size_t x = 0; x < n; ++x) {
    const double got = result.data[x];
    const double want = oracle.data[x];
    if (!std::isfinite(want) || !std::isfinite(got)) {
      if (got == want) continue;
      verdict.first_bad_index = static_cast<std::int64_t>(x);
      verdict.max_abs_err = std::numeric_limits<double>::infinity();
      verdict.ratio = verdict.max_abs_err;
      std::snprintf(text, sizeof text, "element %zu is %g where the oracle has %g", x, got, want);
      verdict.message = text;
      return verdict;
    }
    const double err = std::abs(got - want);
    // If fp16 overflows in the plain computation, its error does not count.
    const double plain_err = std::isfinite(baseline.data[x]) ? std::abs(baseline.data[x] - want) : 0;
    verdict.max_abs_err = std::max(verdict.max_abs_err, err);
    verdict.baseline_err = std::max(verdict.baseline_err, plain_err);
    largest = std::max(largest, std::abs(want));
    err_sq += err * err;
    baseline_sq += plain_err * plain_err;
    oracle_sq += want * want;
    ++count;
  }

  const double per_value = epsilon_of(dtype);
  const double per_term = epsilon_of(DType::kFloat32) * oracle.terms;
  double noise = 0, noise_fro = 0;
  for (double x : oracle.row_noise) {
    noise = std::max(noise, x);
    noise_fro = std::hypot(noise_fro, x);
  }
  verdict.allowed = 2 * verdict.baseline_err + floor * (per_value * largest + per_term + noise);
  const double allowed_fro =
      2 * std::sqrt(baseline_sq) +
      floor * (per_value * std::sqrt(oracle_sq) + per_term * std::sqrt(static_cast<double>(count)) + noise_fro);
  const double err_fro = std::sqrt(err_sq);
  verdict.rel_fro = oracle_sq > 0 ? err_fro / std::sqrt(oracle_sq) : err_fro;

  const auto over = [](double err, double allowed) { return err == 0 ? 0 : err / allowed; };
  const RowVerdict rows = judge_rows(result, oracle, baseline, floor * per_value, floor * per_term, floor);
  verdict.ratio = std::max({over(verdict.max_abs_err, verdict.allowed), over(err_fro, allowed_fro), rows.ratio});
  verdict.pass = verdict.ratio <= 1;
  if (verdict.pass) return verdict;
  for (std::size_t x = 0; x < n && verdict.first_bad_index < 0; ++x) {
    const double err = std::abs(result.data[x] - oracle.data[x]);
    if (err > verdict.allowed) {
      verdict.first_bad_index = static_cast<std::int64_t>(x);
      std::snprintf(text, sizeof text, "element %zu is %.9g, the oracle has %.9g: off by %.3g, allowed %.3g", x,
                    result.data[x], oracle.data[x], err, verdict.allowed);
      verdict.message = text;
    }
  }
  if (verdict.first_bad_index < 0 && rows.ratio > 1) {
    verdict.first_bad_index = rows.row * oracle.shape[3];
    std::snprintf(text, sizeof text, "the row from element %lld is off by %.3g in norm, allowed %.3g",
                  static_cast<long long>(verdict.first_bad_index), rows.err, rows.allowed);
    verdict.message = text;
  }
  if (verdict.first_bad_index < 0) {
    std::snprintf(text, sizeof text, "no element is far off, but the whole is: Frobenius error %.3g, allowed %.3g",
                  err_fro, allowed_fro);
    verdict.message = text;
  }
  return verdict;
}

}  // namespace tessera::verify
