// Arithmetic on sizes that does not overflow.
#pragma once

#include <cstdint>
#include <limits>

namespace tessera {

// a * b * c of non-negative sizes; the largest representable number if the product is beyond it.
inline std::int64_t saturating_product(std::int64_t a, std::int64_t b, std::int64_t c = 1) {
  std::int64_t product = 0;
  if (a == 0 || b == 0 || c == 0) return 0;
  const bool overflows = __builtin_mul_overflow(a, b, &product) || __builtin_mul_overflow(product, c, &product);
  return overflows ? std::numeric_limits<std::int64_t>::max() : product;
}

inline std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return a / b + (a % b != 0 ? 1 : 0); }

}  // namespace tessera
