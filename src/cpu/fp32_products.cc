// Products of fp32: Highway, compiled for every x86 level the library knows and chosen at run time by products.cc (only the
// headers of Highway are used: its own dispatcher would need its shared library).
//
// The product is an outer product in registers: MR rows of lhs, broadcast, times NV vectors of rhs. With AVX-512, 6x4
// accumulators keep both FMA units busy (24 independent sums, 10 loads for 24 FMAs); 6x2 fit the 16 registers of AVX2
// and SSE4. A block of NV panels of rhs stays in L1 while the rows of lhs stream past it. An accumulating product
// starts from zero and is added at the end: a sum over a long sequence is then a sum of block sums, whose rounding
// error grows with the number of blocks and not of terms.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/fp32_products.cc"
#include "hwy/foreach_target.h"
//
#include "cpu/vectors-inl.h"
#include "hwy/cache_control.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace tessera::cpu {
namespace HWY_NAMESPACE {
namespace {

constexpr int kMaxPanels = HWY_TARGET <= HWY_AVX3 ? 4 : 2;  // accumulators to a row of lhs

// kTransposed: lhs is [k][W] from its packing by rows of k, else [k / W][m][W].
template <bool kTransposed, int MR, int NV>
void micro(const float* HWY_RESTRICT lhs, std::int64_t lhs_stride, const float* HWY_RESTRICT rhs,
           std::int64_t rhs_stride, float* HWY_RESTRICT result, std::int64_t result_stride, std::int64_t k,
           bool accumulate) {
  const F f;
  V acc[MR][NV];
#pragma GCC unroll 8
  for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < NV; ++j) {
      acc[i][j] = hn::Zero(f);
    }
  }
  const auto step = [&](const float* a, std::int64_t row_stride) HWY_ATTR {
    V b[NV];
#pragma GCC unroll 8
    for (int j = 0; j < NV; ++j) b[j] = hn::LoadU(f, rhs + j * rhs_stride);
#pragma GCC unroll 8
    for (int i = 0; i < MR; ++i) {
      const V ai = hn::Set(f, a[i * row_stride]);
#pragma GCC unroll 8
      for (int j = 0; j < NV; ++j) acc[i][j] = hn::MulAdd(ai, b[j], acc[i][j]);
    }
    rhs += kW;
  };
  if constexpr (kTransposed) {
    for (std::int64_t kk = 0; kk < k; ++kk) {
      hwy::Prefetch(lhs + lhs_stride + kk * kW);
      step(lhs + kk * kW, 1);
    }
  } else {
    for (; k >= kW; k -= kW, lhs += lhs_stride) {
      for (int i = 0; i < MR; ++i) hwy::Prefetch(lhs + (MR + i) * kW);
#pragma GCC unroll 4
      for (std::int64_t kk = 0; kk < kW; ++kk) step(lhs + kk, kW);
    }
    for (std::int64_t kk = 0; kk < k; ++kk) step(lhs + kk, kW);
  }
#pragma GCC unroll 8
  for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < NV; ++j) {
      float* to = result + j * result_stride + i * kW;
      hn::StoreU(accumulate ? hn::Add(acc[i][j], hn::LoadU(f, to)) : acc[i][j], f, to);
    }
  }
}

template <bool kTransposed, int NV>
void multiply_panels(const float* lhs, std::int64_t lhs_stride, const float* rhs, std::int64_t rhs_stride,
                     float* result, std::int64_t result_stride, std::int64_t m, std::int64_t k, bool accumulate) {
  for (std::int64_t row = 0; row < m;) {
    std::int64_t left = m - row;
    const float* from = lhs + row * kW;
    if constexpr (kTransposed) {
      // A block of rows stays within one panel: 16 = 6 + 6 + 4, 8 = 4 + 4.
      from = lhs + row / kW * lhs_stride + row % kW;
      if (kW - row % kW < left) left = kW - row % kW;
    }
    float* to = result + row * kW;
    if (left >= 6 && left != 8) {
      micro<kTransposed, 6, NV>(from, lhs_stride, rhs, rhs_stride, to, result_stride, k, accumulate);
      row += 6;
    } else if (left >= 4) {
      micro<kTransposed, 4, NV>(from, lhs_stride, rhs, rhs_stride, to, result_stride, k, accumulate);
      row += 4;
    } else if (left >= 2) {
      micro<kTransposed, 2, NV>(from, lhs_stride, rhs, rhs_stride, to, result_stride, k, accumulate);
      row += 2;
    } else {
      micro<kTransposed, 1, NV>(from, lhs_stride, rhs, rhs_stride, to, result_stride, k, accumulate);
      row += 1;
    }
  }
}

template <bool kTransposed>
void multiply(const void* lhs_data, std::int64_t lhs_stride, const void* rhs_data, std::int64_t rhs_stride,
              float* result, std::int64_t result_stride, std::int64_t m, int panels, std::int64_t k, bool accumulate) {
  const float* lhs = static_cast<const float*>(lhs_data);
  const float* rhs = static_cast<const float*>(rhs_data);
  while (panels > 0) {
    // For 5 panels, 3 + 2 is faster than 4 + 1.
    const int now = panels == kMaxPanels + 1 && kMaxPanels > 2 ? kMaxPanels - 1
                    : panels < kMaxPanels                      ? panels
                                                               : kMaxPanels;
    if constexpr (kMaxPanels == 4) {
      if (now == 4)
        multiply_panels<kTransposed, 4>(lhs, lhs_stride, rhs, rhs_stride, result, result_stride, m, k, accumulate);
      if (now == 3)
        multiply_panels<kTransposed, 3>(lhs, lhs_stride, rhs, rhs_stride, result, result_stride, m, k, accumulate);
    }
    if (now == 2)
      multiply_panels<kTransposed, 2>(lhs, lhs_stride, rhs, rhs_stride, result, result_stride, m, k, accumulate);
    if (now == 1)
      multiply_panels<kTransposed, 1>(lhs, lhs_stride, rhs, rhs_stride, result, result_stride, m, k, accumulate);
    rhs += now * rhs_stride;
    result += now * result_stride;
    panels -= now;
  }
}

// [ceil(cols / W)][capacity][W]: an lhs by its rows, an rhs by its rows, and an lhs to be read transposed, all alike.
void pack_rows(const Source& source, std::int64_t rows, std::int64_t cols, std::int64_t capacity, void* dst) {
  float* to = static_cast<float*>(dst);
  with_type(source.dtype, [&](auto type) HWY_ATTR {
    using T = decltype(type);
    for (std::int64_t row = 0; row < rows; ++row) {
      const T* from = static_cast<const T*>(source.data) + row * source.stride;
      for (std::int64_t col = 0; col < cols; col += kW) {
        hn::StoreU(load_some(from + col, cols - col), F(), to + (col / kW * capacity + row) * kW);
      }
    }
  });
}

// [ceil(rows / W)][capacity][W], line c holding column c of W rows.
void pack_columns(const Source& source, std::int64_t rows, std::int64_t cols, std::int64_t capacity, void* dst) {
  with_type(source.dtype, [&](auto type) HWY_ATTR {
    using T = decltype(type);
    const F f;
    for (std::int64_t row = 0; row < round_up(rows, kW); row += 4) {
      float* to = static_cast<float*>(dst) + row / kW * capacity * kW + row % kW;
      const T* from = static_cast<const T*>(source.data) + row * source.stride;
      for (std::int64_t col = 0; col < cols; col += kW) {
        const std::int64_t left = cols - col;
        const auto line = [&](std::int64_t r) HWY_ATTR {
          return row + r < rows ? load_some(from + r * source.stride + col, left) : hn::Zero(f);
        };
        V t0 = line(0), t1 = line(1), t2 = line(2), t3 = line(3);
        transpose_blocks(t0, t1, t2, t3);
        float* lines = to + col * kW;
        scatter_blocks(f, t0, lines, 4 * kW);
        scatter_blocks(f, t1, lines + kW, 4 * kW);
        scatter_blocks(f, t2, lines + 2 * kW, 4 * kW);
        scatter_blocks(f, t3, lines + 3 * kW, 4 * kW);
      }
    }
  });
}

}  // namespace

extern const Products kFp32Products;
const Products kFp32Products = {kW,        kW,           sizeof(float),   pack_rows,      pack_rows,
                                pack_rows, pack_columns, multiply<false>, multiply<true>, nullptr,
                                nullptr};

}  // namespace HWY_NAMESPACE
}  // namespace tessera::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tessera::cpu {

const Products* fp32_products(Isa isa) {
  switch (isa) {
#if HWY_TARGETS & HWY_AVX3
    case Isa::kAvx512:
      return &N_AVX3::kFp32Products;
#endif
#if HWY_TARGETS & HWY_AVX2
    case Isa::kAvx2:
      return &N_AVX2::kFp32Products;
#endif
#if HWY_TARGETS & HWY_SSE4
    case Isa::kSse4:
      return &N_SSE4::kFp32Products;
#endif
    default:
      return nullptr;
  }
}

}  // namespace tessera::cpu
#endif
