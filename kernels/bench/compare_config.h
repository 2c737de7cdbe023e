// Config and Params of bench/compare.cuh.
#pragma once

#include "tile/types.h"

namespace tessera {

struct CompareConfig {
  DType dtype;
};

template <class Visitor>
constexpr void visit_fields(const CompareConfig& config, Visitor&& visit) {
  visit("dtype", config.dtype);
}

struct CompareTally {
  unsigned long long differing;  // elements whose bits differ
  unsigned largest;              // bits of the largest difference, a float; infinity where one of the two is NaN
  unsigned unused;
};

struct CompareParams {
  void* got;           // filled with NaN afterwards
  const void* wanted;  // as long
  long long elements;
  CompareTally* tally;
};

constexpr int kCompareThreads = 256;

}  // namespace tessera
