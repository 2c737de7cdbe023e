// Tiles with bf16 operands, for the products of cpu/bf16_products.cc. The conversions are written with intrinsics because
// Highway 1.0.3 has none; the vector arithmetic around them is the Highway code that the fp32 tables use.
//
// With AMX a product takes a quarter of a cycle per score, so the softmax between the products dominates: it reads
// each score once for the maximum and once for the exponential, and two rows become one line of the next rhs.
#include <immintrin.h>

#include <cmath>
#include <cstdint>

#include "attention/cpu/tile_ops.h"
#include "hwy/cache_control.h"
#include "hwy/highway.h"

// After every header whose inline functions other files use too: those must stay runnable on any CPU.
#pragma GCC push_options
#pragma GCC target("avx512bf16")
#include "attention/cpu/tile_ops-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tessera::cpu {
namespace HWY_NAMESPACE {
namespace {

static_assert(HWY_TARGET == HWY_AVX3 && kW == 16, "this file is compiled for one target");

using Bits = std::uint16_t;  // of a bf16

constexpr std::int64_t kPairLine = 32;  // elements in a line of lhs, and in a line of pairs of rhs

// Two vectors as bf16: low's values, then high's.
HWY_INLINE __m512i to_bf16(V high, V low) { return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high.raw, low.raw)); }

// From [a0 .. a15, b0 .. b15] to [a0, b0, a1, b1, ...]: two rows become a line of pairs.
HWY_INLINE __m512i interleave(__m512i halves) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, halves);
}

struct ToPairs {
  Bits* probs;
  std::int64_t stride;

  HWY_INLINE void pair(std::int64_t panel, std::int64_t row, V p0, V p1) const {
    _mm512_storeu_si512(probs + (panel * stride + row) * kW, interleave(to_bf16(p1, p0)));
  }
  HWY_INLINE void finish(std::int64_t panel, std::int64_t rows) const {
    for (std::int64_t row = round_up(rows, 2); row < round_up(rows, kPad); row += 2) {
      _mm512_storeu_si512(probs + (panel * stride + row) * kW, _mm512_setzero_si512());
    }
  }
};

void softmax(const SoftmaxTile& tile) {
  softmax_panels(tile, ToPairs{static_cast<Bits*>(tile.probs), tile.prob_stride});
}

// Two panels and two rows at a time: a line of the lhs form is 32 queries of a key, a line of the rhs form two keys of
// 16 queries.
template <bool kPlain>
void grad_panels(const GradTile& tile) {
  const F f;
  const V scale = hn::Set(f, tile.map.scale);
  Bits* probs = static_cast<Bits*>(tile.probs);
  Bits* d_scores = static_cast<Bits*>(tile.d_scores);
  Bits* d_scores_rhs = static_cast<Bits*>(tile.d_scores_rhs);
  const std::int64_t stride = tile.stride * kW;
  for (std::int64_t panel = 0; panel < tile.panels; panel += 2) {
    const bool second = panel + 1 < tile.panels;
    const V log_sum0 = hn::LoadU(f, tile.log_sum + panel * kW);
    const V row_dot0 = hn::LoadU(f, tile.row_dot + panel * kW);
    const V log_sum1 = second ? hn::LoadU(f, tile.log_sum + (panel + 1) * kW) : log_sum0;
    const V row_dot1 = second ? hn::LoadU(f, tile.row_dot + (panel + 1) * kW) : row_dot0;
    const PanelMap map0(tile.map, panel), map1(tile.map, second ? panel + 1 : panel);
    const float* s = tile.scores + panel * stride;
    const float* d = tile.d_probs + panel * stride;
    Bits* p_line = probs + panel * stride;
    Bits* ds_line = d_scores + panel * stride;
    Bits* rhs0 = d_scores_rhs + panel * stride;
    Bits* rhs1 = rhs0 + stride;
    for (std::int64_t row = 0; row < round_up(tile.rows, kPad); row += 2) {
      V p[2][2], ds[2][2];  // [row][panel]
      for (int r = 0; r < 2; ++r) {
        const std::int64_t at = (row + r) * kW;
        for (int half = 0; half < 2; ++half) {
          p[r][half] = ds[r][half] = hn::Zero(f);
          if (row + r >= tile.rows || (half == 1 && !second)) continue;
          grad_point<kPlain>(half == 0 ? map0 : map1, scale, half == 0 ? log_sum0 : log_sum1,
                             half == 0 ? row_dot0 : row_dot1, static_cast<float>(row + r),
                             hn::LoadU(f, s + half * stride + at), hn::LoadU(f, d + half * stride + at), &p[r][half],
                             &ds[r][half]);
        }
        _mm512_storeu_si512(p_line + (row + r) * kPairLine, to_bf16(p[r][1], p[r][0]));
        _mm512_storeu_si512(ds_line + (row + r) * kPairLine, to_bf16(ds[r][1], ds[r][0]));
      }
      _mm512_storeu_si512(rhs0 + row * kW, interleave(to_bf16(ds[1][0], ds[0][0])));
      if (second) _mm512_storeu_si512(rhs1 + row * kW, interleave(to_bf16(ds[1][1], ds[0][1])));
    }
  }
}

void softmax_grad(const GradTile& tile) {
  if (is_plain(tile.map)) {
    grad_panels<true>(tile);
  } else {
    grad_panels<false>(tile);
  }
}

constexpr Tiles tiles(int forward_panels, std::int64_t forward_keys) {
  // A line of the lhs form is two panels of queries.
  const int backward_panels = forward_panels < 2 ? 2 : forward_panels;
  return {forward_panels, backward_panels, forward_keys,     256,    softmax,
          softmax_grad,   store_rows,      store_transposed, stream, widen};
}

}  // namespace

extern const Tiles kAmxTiles, kDotTiles;
const Tiles kAmxTiles = tiles(1, 64);
const Tiles kDotTiles = tiles(4, 128);

}  // namespace HWY_NAMESPACE
}  // namespace tessera::cpu
HWY_AFTER_NAMESPACE();
#pragma GCC pop_options

namespace tessera::cpu {

const TileOps* bf16_ops(Bf16Isa isa) {
  switch (isa) {
    case Bf16Isa::kAmx: {
      static const TileOps ops = {*bf16_products(isa), HWY_NAMESPACE::kAmxTiles};
      return &ops;
    }
    case Bf16Isa::kAvx512Bf16: {
      static const TileOps ops = {*bf16_products(isa), HWY_NAMESPACE::kDotTiles};
      return &ops;
    }
    default:
      return nullptr;
  }
}

}  // namespace tessera::cpu
