// What the fp32 and bf16 tables share, compiled once per target: exp2 and tanh, the map from scores to logits, the online
// softmax.
#include <cmath>
#include <cstdint>

#include "attention/cpu/tile_ops.h"
#include "cpu/vectors-inl.h"
#include "hwy/cache_control.h"
#include "hwy/highway.h"

#if defined(TESSERA_CPU_TILE_OPS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TESSERA_CPU_TILE_OPS_INL_H_
#undef TESSERA_CPU_TILE_OPS_INL_H_
#else
#define TESSERA_CPU_TILE_OPS_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace tessera::cpu {
namespace HWY_NAMESPACE {
namespace {

// 2^x for x <= 1; exactly 0 from -126.5 down, so that a masked score (-inf) adds nothing. NaN stays NaN. Rounding x
// to an integer by adding a large number leaves that integer, plus the exponent's bias, in the low bits. Relative error
// 1.5e-7; 2^0 is exact.
HWY_INLINE V exp2(V x) {
  const F f;
  const hn::RebindToSigned<F> i;
  x = hn::Max(hn::Set(f, -127.0f), hn::Min(hn::Set(f, 1.0f), x));
  const V magic = hn::Set(f, 12583039.0f);  // 1.5 * 2^23 + 127
  const V rounded = hn::Add(x, magic);
  const V rest = hn::Sub(x, hn::Sub(rounded, magic));
  V p = hn::Set(f, 0.001326472731307149f);
  p = hn::MulAdd(p, rest, hn::Set(f, 0.009671512991189957f));
  p = hn::MulAdd(p, rest, hn::Set(f, 0.05550733581185341f));
  p = hn::MulAdd(p, rest, hn::Set(f, 0.24022242426872253f));
  p = hn::MulAdd(p, rest, hn::Set(f, 0.6931470036506653f));
  p = hn::MulAdd(p, rest, hn::Set(f, 1.0f));
  return hn::Mul(p, hn::BitCast(f, hn::ShiftLeft<23>(hn::BitCast(i, rounded))));
}

// An odd polynomial near 0, where 1 - exp would cancel; relative error 2e-7.
HWY_INLINE V tanh(V x) {
  const F f;
  const V one = hn::Set(f, 1.0f);
  const V size = hn::Abs(x);
  const V e = exp2(hn::Mul(size, hn::Set(f, -2.885390081777927f)));  // exp(-2 |x|)
  const V far = hn::CopySign(hn::Div(hn::Sub(one, e), hn::Add(one, e)), x);
  const V z = hn::Mul(x, x);
  V p = hn::Set(f, -0.005895149894058704f);
  p = hn::MulAdd(p, z, hn::Set(f, 0.02079596556723118f));
  p = hn::MulAdd(p, z, hn::Set(f, -0.053783830255270004f));
  p = hn::MulAdd(p, z, hn::Set(f, 0.13331924378871918f));
  p = hn::MulAdd(p, z, hn::Set(f, -0.33333298563957214f));
  const V near = hn::MulAdd(hn::Mul(p, z), x, x);
  return hn::IfThenElse(hn::Lt(size, hn::Set(f, 0.6f)), near, far);
}

// A ScoreMap for one panel of columns.
class PanelMap {
 public:
  HWY_INLINE PanelMap(const ScoreMap& map, std::int64_t panel)
      : scale_(hn::Set(F(), map.scale)),
        cap_(hn::Set(F(), map.softcap)),
        inverse_cap_(hn::Set(F(), map.softcap > 0 ? map.scale / map.softcap : 0.0f)),
        slope_(hn::Zero(F())),
        origin_(hn::Zero(F())),
        begin_(hn::Zero(F())),
        end_(hn::Zero(F())),
        capped_(map.softcap > 0),
        sloped_(map.slopes != nullptr),
        masked_(map.begins != nullptr) {
    const F f;
    const hn::RebindToSigned<F> i;
    if (sloped_) {
      slope_ = hn::LoadU(f, map.slopes + panel * kW);
      origin_ = hn::LoadU(f, map.origins + panel * kW);
    }
    if (masked_) {
      begin_ = hn::ConvertTo(f, hn::LoadU(i, map.begins + panel * kW));
      end_ = hn::ConvertTo(f, hn::LoadU(i, map.ends + panel * kW));
    }
  }

  // The logit of a score, -inf if it is masked. derivative: of the logit by scale * score.
  HWY_INLINE V operator()(V score, float row, V* derivative) const {
    const F f;
    V logit;
    if (capped_) {
      const V t = tanh(hn::Mul(score, inverse_cap_));
      logit = hn::Mul(t, cap_);
      if (derivative != nullptr) *derivative = hn::NegMulAdd(t, t, hn::Set(f, 1.0f));
    } else {
      logit = hn::Mul(score, scale_);
      if (derivative != nullptr) *derivative = hn::Set(f, 1.0f);
    }
    const V at = hn::Set(f, row);
    if (sloped_) logit = hn::NegMulAdd(slope_, hn::Abs(hn::Sub(origin_, at)), logit);
    if (masked_) {
      const auto visible = hn::And(hn::Ge(at, begin_), hn::Lt(at, end_));
      logit = hn::IfThenElse(visible, logit, hn::Set(f, -HUGE_VALF));
    }
    return logit;
  }

 private:
  V scale_, cap_, inverse_cap_, slope_, origin_, begin_, end_;
  bool capped_, sloped_, masked_;
};

// True if logits are scale * score with scale >= 0: then one multiply-add is enough, and the largest score has the
// largest logit.
HWY_INLINE bool is_plain(const ScoreMap& map) {
  return map.softcap == 0 && map.slopes == nullptr && map.begins == nullptr && map.scale >= 0;
}

// Emit::pair(lines of the panel in the rhs form, row, probabilities of rows row and row + 1);
// Emit::finish(lines, rows) fills up to kPad.
template <class Emit>
HWY_INLINE void softmax_panels(const SoftmaxTile& tile, Emit emit) {
  const F f;
  const bool plain = is_plain(tile.map);
  for (std::int64_t panel = 0; panel < tile.panels; ++panel) {
    float* HWY_RESTRICT s = tile.scores + panel * tile.score_stride * kW;
    if (!plain) {
      const PanelMap map(tile.map, panel);
      for (std::int64_t row = 0; row < tile.rows; ++row) {
        hn::StoreU(map(hn::LoadU(f, s + row * kW), static_cast<float>(row), nullptr), f, s + row * kW);
      }
    }
    V multiplier = hn::Set(f, plain ? tile.map.scale : 1.0f);
    V max0 = hn::Set(f, -HUGE_VALF), max1 = max0, max2 = max0, max3 = max0;
    std::int64_t row = 0;
    for (; row + 4 <= tile.rows; row += 4) {
      max0 = hn::Max(max0, hn::LoadU(f, s + row * kW));
      max1 = hn::Max(max1, hn::LoadU(f, s + row * kW + kW));
      max2 = hn::Max(max2, hn::LoadU(f, s + row * kW + 2 * kW));
      max3 = hn::Max(max3, hn::LoadU(f, s + row * kW + 3 * kW));
    }
    for (; row < tile.rows; ++row) max0 = hn::Max(max0, hn::LoadU(f, s + row * kW));
    max0 = hn::Max(hn::Max(max0, max1), hn::Max(max2, max3));

    const V old_max = hn::LoadU(f, tile.row_max + panel * kW);
    const V new_max = hn::Max(old_max, hn::Min(hn::Mul(max0, multiplier), hn::Set(f, kMaxLogit)));
    // The multiply-add below uses the unrounded product, but the maximum is rounded. If an ulp of the maximum is more
    // than exp2 tolerates, the products are rounded too, so that the largest is exactly the maximum.
    if (plain && !hn::AllTrue(f, hn::Lt(hn::Abs(new_max), hn::Set(f, 8388608.0f)))) {
      for (row = 0; row < tile.rows; ++row) {
        hn::StoreU(hn::Mul(hn::LoadU(f, s + row * kW), multiplier), f, s + row * kW);
      }
      multiplier = hn::Set(f, 1.0f);
    }
    const V base = hn::Add(new_max, hn::Set(f, tile.shift));
    V sum0 = hn::Zero(f), sum1 = sum0;
    for (row = 0; row + 2 <= tile.rows; row += 2) {
      const V p0 = exp2(hn::MulSub(hn::LoadU(f, s + row * kW), multiplier, base));
      const V p1 = exp2(hn::MulSub(hn::LoadU(f, s + row * kW + kW), multiplier, base));
      sum0 = hn::Add(sum0, p0);
      sum1 = hn::Add(sum1, p1);
      emit.pair(panel, row, p0, p1);
    }
    if (row < tile.rows) {
      const V p0 = exp2(hn::MulSub(hn::LoadU(f, s + row * kW), multiplier, base));
      sum0 = hn::Add(sum0, p0);
      emit.pair(panel, row, p0, hn::Zero(f));
    }
    emit.finish(panel, tile.rows);
    const V rescale = exp2(hn::Sub(old_max, new_max));
    const V sum = hn::LoadU(f, tile.row_sum + panel * kW);
    hn::StoreU(hn::MulAdd(sum, rescale, hn::Add(sum0, sum1)), f, tile.row_sum + panel * kW);
    hn::StoreU(new_max, f, tile.row_max + panel * kW);
    if (!hn::AllTrue(f, hn::Eq(old_max, new_max))) {
      float* HWY_RESTRICT acc = tile.accumulator + panel * tile.acc_stride * kW;
      for (std::int64_t r = 0; r < tile.acc_rows; ++r) {
        hn::StoreU(hn::Mul(hn::LoadU(f, acc + r * kW), rescale), f, acc + r * kW);
      }
    }
  }
}

// Probability and gradient of the score, from the score, the gradient of the probability and the row's constants.
template <bool kPlain>
HWY_INLINE void grad_point(const PanelMap& map, V scale, V log_sum, V row_dot, float row, V score, V d_prob, V* prob,
                           V* d_score) {
  if constexpr (kPlain) {
    *prob = exp2(hn::MulSub(score, scale, log_sum));
    *d_score = hn::Mul(*prob, hn::Sub(d_prob, row_dot));
  } else {
    V derivative;
    const V logit = map(score, row, &derivative);
    *prob = exp2(hn::Sub(logit, log_sum));
    *d_score = hn::Mul(hn::Mul(*prob, hn::Sub(d_prob, row_dot)), derivative);
  }
}

inline void store_rows(const float* result, std::int64_t stride, std::int64_t rows, std::int64_t cols, float scale,
                       const Target& target) {
  with_type(target.dtype, [&](auto type) HWY_ATTR {
    using T = decltype(type);
    const V factor = hn::Set(F(), scale);
    for (std::int64_t row = 0; row < rows; ++row) {
      T* to = static_cast<T*>(target.data) + row * target.stride;
      for (std::int64_t col = 0; col < cols; col += kW) {
        const V value = hn::LoadU(F(), result + (col / kW * stride + row) * kW);
        store_some(hn::Mul(value, factor), to + col, cols - col);
      }
    }
  });
}

inline void store_transposed(const float* result, std::int64_t stride, std::int64_t rows, std::int64_t cols,
                             const float* scales, const Target& target) {
  constexpr std::int64_t kChunk = 64;
  HWY_ALIGN float lines[kW * kChunk];
  with_type(target.dtype, [&](auto type) HWY_ATTR {
    using T = decltype(type);
    const F f;
    for (std::int64_t row = 0; row < rows; row += kW) {
      const V scale = load_some(scales + row, rows - row);
      const float* panel = result + row * stride;
      const std::int64_t used = rows - row < kW ? rows - row : kW;
      for (std::int64_t start = 0; start < cols; start += kChunk) {
        const std::int64_t width = cols - start < kChunk ? cols - start : kChunk;
        for (std::int64_t col = 0; col < width; col += 4) {
          // Panels have kPad lines at least, a multiple of four: reading past cols is harmless.
          const float* from = panel + (start + col) * kW;
          V t0 = hn::Mul(scale, hn::LoadU(f, from)), t1 = hn::Mul(scale, hn::LoadU(f, from + kW));
          V t2 = hn::Mul(scale, hn::LoadU(f, from + 2 * kW)), t3 = hn::Mul(scale, hn::LoadU(f, from + 3 * kW));
          transpose_blocks(t0, t1, t2, t3);
          scatter_blocks(f, t0, lines + col, 4 * kChunk);
          scatter_blocks(f, t1, lines + kChunk + col, 4 * kChunk);
          scatter_blocks(f, t2, lines + 2 * kChunk + col, 4 * kChunk);
          scatter_blocks(f, t3, lines + 3 * kChunk + col, 4 * kChunk);
        }
        for (std::int64_t r = 0; r < used; ++r) {
          T* to = static_cast<T*>(target.data) + (row + r) * target.stride + start;
          for (std::int64_t col = 0; col < width; col += kW) {
            store_some(hn::LoadU(f, lines + r * kChunk + col), to + col, width - col);
          }
        }
      }
    }
  });
}

inline void widen(const Source& source, std::int64_t rows, std::int64_t cols, float* dst) {
  with_type(source.dtype, [&](auto type) HWY_ATTR {
    using T = decltype(type);
    const std::int64_t width = round_up(cols, kPad);
    for (std::int64_t row = 0; row < rows; ++row) {
      const T* from = static_cast<const T*>(source.data) + row * source.stride;
      for (std::int64_t col = 0; col < width; col += kW) {
        hn::StoreU(col < cols ? load_some(from + col, cols - col) : hn::Zero(F()), F(), dst + row * width + col);
      }
    }
  });
}

template <class T>
HWY_INLINE void prefetch_row(const T* row, std::int64_t dim) {
  for (std::int64_t col = 0; col < dim; col += 64 / static_cast<std::int64_t>(sizeof(T))) hwy::Prefetch(row + col);
}

// scores[row][key] for R rows.
template <int R, class T>
HWY_INLINE void stream_scores(const StreamTile& tile, std::int64_t first, float* scores) {
  const F f;
  const std::int64_t width = round_up(tile.dim_qk, kPad);
  const float* q = tile.q + first * width;
  for (std::int64_t key = 0; key < tile.keys; ++key) {
    const T* from = static_cast<const T*>(tile.k[key]);
    prefetch_row(static_cast<const T*>(tile.k[key + kStreamAhead]), tile.dim_qk);
    V sum[R];
    for (int r = 0; r < R; ++r) sum[r] = hn::Zero(f);
    for (std::int64_t col = 0; col < tile.dim_qk; col += kW) {
      const V k = load_some(from + col, tile.dim_qk - col);
      for (int r = 0; r < R; ++r) sum[r] = hn::MulAdd(k, hn::LoadU(f, q + r * width + col), sum[r]);
    }
    for (int r = 0; r < R; ++r) scores[(first + r) * kStreamKeys + key] = hn::GetLane(hn::SumOfLanes(f, sum[r]));
  }
}

// accumulator[row] += probabilities[row] * V for R rows, NV vectors of the head dim at a time.
template <int R, int NV, class T>
HWY_INLINE void stream_values(const StreamTile& tile, std::int64_t first, std::int64_t col, const float* probs) {
  const F f;
  const std::int64_t width = round_up(tile.dim_v, kPad);
  float* to = tile.accumulator + first * width + col;
  V sum[R][NV];
  for (int r = 0; r < R; ++r) {
    for (int j = 0; j < NV; ++j) sum[r][j] = hn::LoadU(f, to + r * width + j * kW);
  }
  for (std::int64_t key = 0; key < tile.keys; ++key) {
    const T* from = static_cast<const T*>(tile.v[key]) + col;
    if (col == 0) prefetch_row(static_cast<const T*>(tile.v[key + kStreamAhead]), tile.dim_v);
    V v[NV];
    for (int j = 0; j < NV; ++j) v[j] = load_some(from + j * kW, tile.dim_v - col - j * kW);
    for (int r = 0; r < R; ++r) {
      const V p = hn::Set(f, probs[(first + r) * kStreamKeys + key]);
      for (int j = 0; j < NV; ++j) sum[r][j] = hn::MulAdd(p, v[j], sum[r][j]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int j = 0; j < NV; ++j) hn::StoreU(sum[r][j], f, to + r * width + j * kW);
  }
}

// One row's scores become probabilities; the lanes are keys here.
HWY_INLINE void stream_softmax(const StreamTile& tile, std::int64_t row, float* scores) {
  const F f;
  const V scale = hn::Set(f, tile.map.scale);
  const V begin = hn::Set(f, static_cast<float>(tile.map.begins[row]));
  const V end = hn::Set(f, static_cast<float>(tile.map.ends[row]));
  V largest = hn::Set(f, -HUGE_VALF);
  for (std::int64_t key = 0; key < tile.keys; key += kW) {
    const V at = hn::Iota(f, static_cast<float>(key));
    V logit = hn::Mul(hn::LoadU(f, scores + key), scale);
    if (tile.map.softcap > 0) {
      const V cap = hn::Set(f, tile.map.softcap);
      logit = hn::Mul(tanh(hn::Div(logit, cap)), cap);
    }
    if (tile.map.slopes != nullptr) {
      const V distance = hn::Abs(hn::Sub(hn::Set(f, tile.map.origins[row]), at));
      logit = hn::NegMulAdd(hn::Set(f, tile.map.slopes[row]), distance, logit);
    }
    logit = hn::IfThenElse(hn::And(hn::Ge(at, begin), hn::Lt(at, end)), logit, hn::Set(f, -HUGE_VALF));
    largest = hn::Max(largest, logit);
    hn::StoreU(logit, f, scores + key);
  }
  const float old_max = tile.row_max[row];
  const float tile_max = hn::GetLane(hn::MaxOfLanes(f, largest));
  const float new_max = tile_max > old_max ? (tile_max < kMaxLogit ? tile_max : kMaxLogit) : old_max;
  const V base = hn::Set(f, new_max + tile.shift);
  V sum = hn::Zero(f);
  for (std::int64_t key = 0; key < tile.keys; key += kW) {
    const V p = exp2(hn::Sub(hn::LoadU(f, scores + key), base));
    sum = hn::Add(sum, p);
    hn::StoreU(p, f, scores + key);
  }
  const V rescale = exp2(hn::Set(f, old_max - new_max));
  tile.row_sum[row] = tile.row_sum[row] * hn::GetLane(rescale) + hn::GetLane(hn::SumOfLanes(f, sum));
  tile.row_max[row] = new_max;
  if (old_max == new_max) return;
  const std::int64_t width = round_up(tile.dim_v, kPad);
  float* acc = tile.accumulator + row * width;
  for (std::int64_t col = 0; col < width; col += kW) {
    hn::StoreU(hn::Mul(hn::LoadU(f, acc + col), rescale), f, acc + col);
  }
}

template <int R, class T>
HWY_INLINE void stream_rows(const StreamTile& tile, std::int64_t first, float* scores) {
  stream_scores<R, T>(tile, first, scores);
  for (int r = 0; r < R; ++r) stream_softmax(tile, first + r, scores + (first + r) * kStreamKeys);
  constexpr int kBlock = kW >= 16 ? 4 : 2;
  std::int64_t col = 0;
  for (; col + kBlock * kW <= tile.dim_v; col += kBlock * kW) stream_values<R, kBlock, T>(tile, first, col, scores);
  for (; col < tile.dim_v; col += kW) stream_values<R, 1, T>(tile, first, col, scores);
}

inline void stream(const StreamTile& tile) {
  with_type(tile.dtype, [&](auto type) HWY_ATTR {
    using T = decltype(type);
    HWY_ALIGN float scores[kStreamRows * kStreamKeys];
    int row = 0;
    for (; row + 4 <= tile.rows; row += 4) stream_rows<4, T>(tile, row, scores);
    for (; row + 2 <= tile.rows; row += 2) stream_rows<2, T>(tile, row, scores);
    if (row < tile.rows) stream_rows<1, T>(tile, row, scores);
  });
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace tessera::cpu
HWY_AFTER_NAMESPACE();

#endif
