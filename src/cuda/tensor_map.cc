#include "cuda/tensor_map.h"

#include "cuda/driver.h"
#include "ops/format.h"

namespace tessera::cuda {

Result<TensorMap> encode(const TensorBox& box) {
  // Enumerators of cuda.h: 16-bit integers (bits are only moved), no interleaving, 256 bytes at a time into L2, zeros.
  constexpr int kUint16 = 1;
  constexpr int kInterleaveNone = 0;
  constexpr int kL2Promotion256 = 3;
  constexpr int kFillZeros = 0;
  const int swizzle = box.columns == 64 ? 3 : box.columns == 32 ? 2 : 1;
  const auto d = driver();
  if (!d.ok()) return d.status();
  if ((*d)->tensor_map_encode == nullptr) {
    return Status(TESSERA_UNSUPPORTED, "the CUDA driver knows no tensor maps; 12.0 or newer is needed");
  }
  TensorMap map = {};
  const std::uint32_t extents[4] = {box.columns, box.rows, 1, 1};
  const std::uint32_t steps[4] = {1, 1, 1, 1};
  const CUresult result = (*d)->tensor_map_encode(&map, kUint16, 4, reinterpret_cast<void*>(box.address),
                                                  box.extents.data(), box.strides.data(), extents, steps,
                                                  kInterleaveNone, swizzle, kL2Promotion256, kFillZeros);
  if (result == kCudaSuccess) return map;
  return status_of(
      **d, result,
      format("describing a tensor of {} x {} x {} x {} with strides of {}, {} and {} bytes", box.extents[0],
             box.extents[1], box.extents[2], box.extents[3], box.strides[0], box.strides[1], box.strides[2]));
}

}  // namespace tessera::cuda
