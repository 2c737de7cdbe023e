// Tiles with fp32 operands: Highway, compiled for every x86 level, as the products are (cpu/fp32_products.cc).
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "attention/cpu/fp32_tile_ops.cc"
#include "hwy/foreach_target.h"
//
#include "attention/cpu/tile_ops-inl.h"
#include "hwy/cache_control.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace tessera::cpu {
namespace HWY_NAMESPACE {
namespace {

constexpr int kQueryPanels = 64 / kW;

// The probabilities overwrite the scores: the result form is the rhs form.
struct InPlace {
  float* scores;
  std::int64_t stride;

  HWY_INLINE void pair(std::int64_t panel, std::int64_t row, V p0, V p1) const {
    float* to = scores + (panel * stride + row) * kW;
    hn::StoreU(p0, F(), to);
    hn::StoreU(p1, F(), to + kW);
  }
  HWY_INLINE void finish(std::int64_t, std::int64_t) const {}
};

void softmax(const SoftmaxTile& tile) { softmax_panels(tile, InPlace{tile.scores, tile.score_stride}); }

template <bool kPlain>
void grad_panels(const GradTile& tile) {
  const F f;
  const V scale = hn::Set(f, tile.map.scale);
  for (std::int64_t panel = 0; panel < tile.panels; ++panel) {
    float* HWY_RESTRICT s = tile.scores + panel * tile.stride * kW;
    float* HWY_RESTRICT d = tile.d_probs + panel * tile.stride * kW;
    const V log_sum = hn::LoadU(f, tile.log_sum + panel * kW);
    const V row_dot = hn::LoadU(f, tile.row_dot + panel * kW);
    const PanelMap map(tile.map, panel);
    for (std::int64_t row = 0; row < tile.rows; ++row) {
      V prob, d_score;
      grad_point<kPlain>(map, scale, log_sum, row_dot, static_cast<float>(row), hn::LoadU(f, s + row * kW),
                         hn::LoadU(f, d + row * kW), &prob, &d_score);
      hn::StoreU(prob, f, s + row * kW);
      hn::StoreU(d_score, f, d + row * kW);
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

}  // namespace

extern const Tiles kFp32Tiles;
const Tiles kFp32Tiles = {kQueryPanels, kQueryPanels,     128,    128,  softmax, softmax_grad,
                          store_rows,   store_transposed, stream, widen};

}  // namespace HWY_NAMESPACE
}  // namespace tessera::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tessera::cpu {

const TileOps* fp32_ops(Isa isa) {
  switch (isa) {
#if HWY_TARGETS & HWY_AVX3
    case Isa::kAvx512: {
      static const TileOps ops = {*fp32_products(Isa::kAvx512), N_AVX3::kFp32Tiles};
      return &ops;
    }
#endif
#if HWY_TARGETS & HWY_AVX2
    case Isa::kAvx2: {
      static const TileOps ops = {*fp32_products(Isa::kAvx2), N_AVX2::kFp32Tiles};
      return &ops;
    }
#endif
#if HWY_TARGETS & HWY_SSE4
    case Isa::kSse4: {
      static const TileOps ops = {*fp32_products(Isa::kSse4), N_SSE4::kFp32Tiles};
      return &ops;
    }
#endif
    default:
      return nullptr;
  }
}

}  // namespace tessera::cpu
#endif
