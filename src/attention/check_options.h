// What is no tensor: scale, softcap, flags, window and chunk.
#pragma once

#include "attention/problem.h"
#include "base/status.h"
#include "tessera/attention.h"

namespace tessera::attention {

// problem: with its op and all that tensors say; gets the options.
Status check_options(const tessera_attention& in, AttentionProblem& problem);

}  // namespace tessera::attention
