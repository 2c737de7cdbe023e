// An outer product in registers: `rows` rows of A, broadcast, times NV vectors of B. With AVX-512, 6 x 4 accumulators keep
// both FMA units busy; 6 x 2 fit the 16 registers of AVX2 and SSE4. (Only the headers of Highway are used: its own
// dispatcher would need its shared library.)
#include "gemm/cpu/block_product.h"

#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "gemm/cpu/block_product.cc"
#include "hwy/foreach_target.h"
//
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace tessera::gemm::cpu_backend {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;
using F = hn::ScalableTag<float>;
using V = hn::Vec<F>;
constexpr std::int64_t kW = HWY_LANES(float);
constexpr int kRows = 6;
constexpr int kVectors = HWY_TARGET <= HWY_AVX3 ? 4 : 2;
constexpr std::int64_t kColumns = kVectors * kW;

struct Bf16 {
  std::uint16_t bits;
};
struct Fp16 {
  std::uint16_t bits;
};

HWY_INLINE float widened(float x) { return x; }
HWY_INLINE float widened(Bf16 x) {
  const std::uint32_t bits = static_cast<std::uint32_t>(x.bits) << 16;
  float value = 0;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
// A multiplication by 2^112 corrects the exponent's bias and makes subnormals normal; infinities and NaN, which it would
// make finite, are the largest exponents.
HWY_INLINE float widened(Fp16 x) {
  const std::uint32_t magnitude = x.bits & 0x7fffu;
  const std::uint32_t shifted = magnitude << 13;
  float scaled = 0;
  std::memcpy(&scaled, &shifted, sizeof scaled);
  scaled *= 0x1p112f;
  std::uint32_t bits = 0;
  std::memcpy(&bits, &scaled, sizeof bits);
  bits = (magnitude >= 0x7c00u ? shifted | 0x7f800000u : bits) | (static_cast<std::uint32_t>(x.bits & 0x8000u) << 16);
  float value = 0;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

template <class T>
void pack_values(const T* values, std::int64_t stride, bool by_k, std::int64_t count, std::int64_t k, int width,
                 float* HWY_RESTRICT packed) {
  for (std::int64_t first = 0; first < count; first += width, packed += k * width) {
    const std::int64_t here = count - first < width ? count - first : width;
    if (by_k) {
      for (std::int64_t i = 0; i < here; ++i) {
        const T* from = values + (first + i) * stride;
        for (std::int64_t kk = 0; kk < k; ++kk) packed[kk * width + i] = widened(from[kk]);
      }
    } else {
      for (std::int64_t kk = 0; kk < k; ++kk) {
        const T* from = values + kk * stride + first;
        for (std::int64_t i = 0; i < here; ++i) packed[kk * width + i] = widened(from[i]);
      }
    }
    for (std::int64_t kk = 0; kk < k && here < width; ++kk) {
      for (std::int64_t i = here; i < width; ++i) packed[kk * width + i] = 0;
    }
  }
}

void pack(DType dtype, const void* values, std::int64_t stride, bool by_k, std::int64_t count, std::int64_t k,
          int width, float* packed) {
  switch (dtype) {
    case DType::kFloat32:
      return pack_values(static_cast<const float*>(values), stride, by_k, count, k, width, packed);
    case DType::kFloat16:
      return pack_values(static_cast<const Fp16*>(values), stride, by_k, count, k, width, packed);
    case DType::kBFloat16:
      return pack_values(static_cast<const Bf16*>(values), stride, by_k, count, k, width, packed);
  }
}

HWY_INLINE void micro(const float* HWY_RESTRICT a, const float* HWY_RESTRICT b, float* HWY_RESTRICT result,
                      std::int64_t stride, std::int64_t k, bool adds) {
  const F f;
  V sums[kRows][kVectors];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) sums[i][j] = hn::Zero(f);
  }
  for (std::int64_t kk = 0; kk < k; ++kk, a += kRows, b += kColumns) {
    V right[kVectors];
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) right[j] = hn::LoadU(f, b + j * kW);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const V left = hn::Set(f, a[i]);
#pragma GCC unroll 8
      for (int j = 0; j < kVectors; ++j) sums[i][j] = hn::MulAdd(left, right[j], sums[i][j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) {
      float* to = result + i * stride + j * kW;
      hn::StoreU(adds ? hn::Add(hn::LoadU(f, to), sums[i][j]) : sums[i][j], f, to);
    }
  }
}

// A panel of B stays in L1 while the panels of A pass by it.
void multiply(const float* a, const float* b, float* result, std::int64_t stride, std::int64_t a_panels,
              std::int64_t b_panels, std::int64_t k, bool adds) {
  for (std::int64_t j = 0; j < b_panels; ++j) {
    for (std::int64_t i = 0; i < a_panels; ++i) {
      micro(a + i * k * kRows, b + j * k * kColumns, result + i * kRows * stride + j * kColumns, stride, k, adds);
    }
  }
}

}  // namespace

extern const BlockOps kOps;
const BlockOps kOps = {kRows, static_cast<int>(kColumns), pack, multiply};

}  // namespace HWY_NAMESPACE
}  // namespace tessera::gemm::cpu_backend
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tessera::gemm::cpu_backend {

const BlockOps* block_ops() {
#if defined(__x86_64__)
  static const BlockOps* const found = []() -> const BlockOps* {
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
#if HWY_TARGETS & HWY_AVX3
    if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw")) {
      return &N_AVX3::kOps;
    }
#endif
#if HWY_TARGETS & HWY_AVX2
    if (avx2) return &N_AVX2::kOps;
#endif
#if HWY_TARGETS & HWY_SSE4
    if (__builtin_cpu_supports("sse4.2")) return &N_SSE4::kOps;
#endif
    return nullptr;
  }();
  return found;
#else
  return nullptr;
#endif
}

}  // namespace tessera::gemm::cpu_backend
#endif
