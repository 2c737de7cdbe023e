// Tensors of fp64 values on the host, and rounding to the storage types.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "base/dtype.h"

namespace tessera::verify {

// A compact row-major tensor of fp64 values; a family with fewer dims sets the first ones to 1.
struct HostTensor {
  std::array<std::int64_t, 4> shape{0, 0, 0, 0};
  std::vector<double> data;

  // Results of the oracle only: the largest sum of absolute terms that went into an element (a bound, not exact). If
  // terms cancel, the error of fp32 arithmetic is still about its epsilon times this.
  double terms = 0;

  // Results of the oracle only: what rounding an earlier result to its type does to each row along the last dim, as a norm.
  // E.g. every attention backward is given a rounded O; the error of rowsum(dO o O) is one number for a whole row of dS, so
  // it does not average out, and that of the plain computation may be small by luck.
  std::vector<double> row_noise;

  // Likewise: the expected error of each row if a factor (dS, hidden values) is rounded to its type before it is multiplied,
  // as a norm. If the vectors that it multiplies are alike and their sum cancels, or if a row has few values, its error is
  // one random number, and that of the plain computation may be small by luck.
  std::vector<double> row_rounding;

  HostTensor() = default;
  HostTensor(std::int64_t a, std::int64_t b, std::int64_t c, std::int64_t d)
      : shape{a, b, c, d}, data(static_cast<std::size_t>(a * b * c * d), 0.0) {}

  bool empty() const { return data.empty(); }
  std::int64_t size() const { return static_cast<std::int64_t>(data.size()); }
  std::int64_t offset(std::int64_t a, std::int64_t b, std::int64_t c, std::int64_t d = 0) const {
    return ((a * shape[1] + b) * shape[2] + c) * shape[3] + d;
  }
  double& at(std::int64_t a, std::int64_t b, std::int64_t c, std::int64_t d = 0) {
    return data[static_cast<std::size_t>(offset(a, b, c, d))];
  }
  double at(std::int64_t a, std::int64_t b, std::int64_t c, std::int64_t d = 0) const {
    return data[static_cast<std::size_t>(offset(a, b, c, d))];
  }
};

// Rounding to nearest, ties to even, straight from fp64; overflow gives infinity.
double round_to(DType dtype, double value);
void round_all(DType dtype, HostTensor& tensor);
std::uint16_t to_bits16(DType dtype, double value);  // fp16 and bf16
double from_bits16(DType dtype, std::uint16_t bits);
// e4m3, which is no DType: beyond the largest value, to the largest.
double round_to_e4m3(double value);
std::uint8_t to_bits_e4m3(double value);
double from_bits_e4m3(std::uint8_t bits);
// The largest absolute value, and the largest norm of a matrix's rows, or of its columns.
double largest(const HostTensor& t);
double largest_norm(const HostTensor& t, bool of_columns);
double epsilon_of(DType dtype);  // the gap between 1 and the next number: 2^-23, 2^-10, 2^-7
// The root mean square of what rounding does to a value, relative to it.
double rounding_error_of(DType dtype);

}  // namespace tessera::verify
