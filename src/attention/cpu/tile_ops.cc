// Which table serves a type on this CPU.
#include "attention/cpu/tile_ops.h"

namespace tessera::cpu {

const TileOps* ops_for(DType dtype) {
  if (dtype == DType::kBFloat16) {
    if (const TileOps* ops = bf16_ops(detect_bf16_isa())) return ops;
  }
  return fp32_ops(detect_isa());
}

}  // namespace tessera::cpu
