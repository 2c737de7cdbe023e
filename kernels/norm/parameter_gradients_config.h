// Config and Params of norm/parameter_gradients.cuh.
#pragma once

#include "norm/row.h"

namespace tessera {

struct NormParameterGradientsConfig {
  DType dtype;
  int groups;  // of 32 threads, which add rows in turn
};

template <class Visitor>
constexpr void visit_fields(const NormParameterGradientsConfig& config, Visitor&& visit) {
  visit("dtype", config.dtype);
  visit("groups", config.groups);
}

struct NormParameterGradientsParams {
  const float* partial;  // [parts, stride]
  Index stride;
  void* dweight;  // [columns], written; may be null
  void* dbias;    // [columns], written; may be null; its sums follow those of dweight
  int parts;
  int columns;
};

}  // namespace tessera
