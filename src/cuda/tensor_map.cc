#include "cuda/tensor_map.h"

#include "base/format.h"
#include "cuda/driver.h"

namespace tessera::cuda {

namespace {

Result<TensorMap> encode_by_driver(const TensorBox& box) {
  // Enumerators of cuda.h: 16-bit integers (the bits are only moved), no interleaving, L2 promotion, and
  // zeros for what is out of bounds.
  constexpr int kUint16 = 1;
  constexpr int kInterleaveNone = 0;
  constexpr int kL2PromotionNone = 0;
  constexpr int kL2Promotion256 = 3;
  constexpr int kFillZeros = 0;
  const int swizzle = box.columns == 64 ? 3 : box.columns == 32 ? 2 : 1;
  const auto d = driver();
  if (!d.ok()) return d.status();
  if ((*d)->tensor_map_encode == nullptr) {
    return Status(TESSERA_UNSUPPORTED, "the CUDA driver does not support tensor maps; 12.0 or newer is needed");
  }
  TensorMap map = {};
  const std::uint32_t extents[4] = {box.columns, box.rows, box.layers, 1};
  const std::uint32_t steps[4] = {1, 1, 1, 1};
  const CUresult result = (*d)->tensor_map_encode(
      &map, kUint16, 4, reinterpret_cast<void*>(box.address), box.extents.data(), box.strides.data(), extents, steps,
      kInterleaveNone, swizzle, box.promotes ? kL2Promotion256 : kL2PromotionNone, kFillZeros);
  if (result == kCudaSuccess) return map;
  return status_of(
      **d, result,
      format("describing a tensor of {} x {} x {} x {} with strides of {}, {} and {} bytes", box.extents[0],
             box.extents[1], box.extents[2], box.extents[3], box.strides[0], box.strides[1], box.strides[2]));
}

struct Remembered {
  TensorBox box;
  TensorMap map;
};

// A hash of the fields that differ between the tensors of a program; rows and columns distinguish a tensor's own boxes.
std::size_t place_of(const TensorBox& box, std::size_t places) {
  constexpr std::uint64_t kMix = 0x9e3779b97f4a7c15;  // 2^64 over the golden ratio
  std::uint64_t hash = box.address / 16 * kMix;
  hash = (hash ^ box.extents[1] ^ box.columns << 20 ^ box.rows << 10) * kMix;
  return hash >> 32 & (places - 1);
}

}  // namespace

Result<TensorMap> encode(const TensorBox& box) {
  // Enough for the tensors of a few layers; a collision only costs encoding the map again.
  thread_local std::array<Remembered, 128> memory = {};
  Remembered& place = memory[place_of(box, memory.size())];
  if (place.box == box) return place.map;
  Result<TensorMap> map = encode_by_driver(box);
  if (map.ok()) place = {box, *map};
  return map;
}

}  // namespace tessera::cuda
