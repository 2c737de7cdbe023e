// The part of the Hopper backward for head dims above 128 (backward_wide_sm90.cc) that tests use.
#pragma once

#include <cstdint>

#include "attention/backward_wide_sm90_config.h"
#include "base/dtype.h"

namespace tessera::attention {

// The tile that is offered, if a head dim is above 128.
AttentionBackwardWideSm90Config backward_wide_sm90_config(DType dtype, int dim_qk, int dim_v, bool masked,
                                                          bool deterministic, std::int64_t seq_k, bool score_mod);

}  // namespace tessera::attention
