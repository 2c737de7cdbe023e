// What vector code of several files shares, compiled once per target: loads and stores of every tensor type, transposes.
#include <cstdint>
#include <cstring>

#include "cpu/products.h"
#include "hwy/highway.h"

#if defined(TESSERA_CPU_VECTORS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TESSERA_CPU_VECTORS_INL_H_
#undef TESSERA_CPU_VECTORS_INL_H_
#else
#define TESSERA_CPU_VECTORS_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace tessera::cpu {
namespace HWY_NAMESPACE {
namespace {  // the bf16 file compiles these with more instructions than the target's name says: no sharing by the
             // linker
namespace hn = hwy::HWY_NAMESPACE;

using F = hn::ScalableTag<float>;
using V = hn::Vec<F>;
constexpr std::int64_t kW = HWY_LANES(float);

struct Bf16 {
  std::uint16_t bits;
};
struct Fp16 {
  std::uint16_t bits;
};

template <class Visit>
HWY_INLINE void with_type(DType dtype, Visit&& visit) {
  switch (dtype) {
    case DType::kFloat32:
      return visit(float{});
    case DType::kFloat16:
      return visit(Fp16{});
    case DType::kBFloat16:
      return visit(Bf16{});
  }
}

HWY_INLINE V load(const float* from) { return hn::LoadU(F(), from); }
HWY_INLINE V load(const Bf16* from) {
  const hn::Rebind<std::uint16_t, F> half;
  const hn::RebindToUnsigned<F> wide;
  const auto bits = hn::PromoteTo(wide, hn::LoadU(half, &from->bits));
  return hn::BitCast(F(), hn::ShiftLeft<16>(bits));
}
HWY_INLINE V load(const Fp16* from) {
  const hn::Rebind<hwy::float16_t, F> half;
  const V value = hn::PromoteTo(F(), hn::LoadU(half, reinterpret_cast<const hwy::float16_t*>(from)));
#if HWY_TARGET >= HWY_SSE4
  // Without F16C, Highway reads infinities and NaN as numbers from 65536 on.
  const hn::RebindToUnsigned<F> wide;
  const auto bits = hn::BitCast(wide, value);
  const auto special = hn::RebindMask(wide, hn::Ge(hn::Abs(value), hn::Set(F(), 65536.0f)));
  return hn::BitCast(F(), hn::IfThenElse(special, hn::Or(bits, hn::Set(wide, 0x7F800000u)), bits));
#else
  return value;
#endif
}

// `count` elements, zeros after them.
template <class T>
HWY_INLINE V load_some(const T* from, std::int64_t count) {
  if (HWY_LIKELY(count >= kW)) return load(from);
  T whole[kW] = {};
  std::memcpy(whole, from, static_cast<std::size_t>(count) * sizeof(T));
  return load(whole);
}

HWY_INLINE void store(V value, float* to) { hn::StoreU(value, F(), to); }
HWY_INLINE void store(V value, Bf16* to) {
  // To nearest, ties to even. A NaN keeps its upper bits with the quiet bit set.
  const hn::RebindToUnsigned<F> wide;
  const hn::RebindToSigned<F> wide_signed;
  const hn::Rebind<std::uint16_t, F> half;
  const auto bits = hn::BitCast(wide, value);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(wide, 1u));
  const auto rounded = hn::Add(bits, hn::Add(odd, hn::Set(wide, 0x7FFFu)));
  const auto quiet = hn::Or(bits, hn::Set(wide, 0x400000u));
  const auto nan = hn::RebindMask(wide, hn::IsNaN(value));
  const auto upper = hn::ShiftRight<16>(hn::IfThenElse(nan, quiet, rounded));
  hn::StoreU(hn::DemoteTo(half, hn::BitCast(wide_signed, upper)), half, &to->bits);
}
HWY_INLINE void store(V value, Fp16* to) {
#if HWY_TARGET >= HWY_SSE4
  // Without F16C, Highway truncates. To nearest, ties to even, by integers: adding 0.5 leaves a subnormal number's count
  // of 2^-24 in the low bits; of all others 13 bits are rounded off and the exponent is rebased from 127 to 15.
  const hn::RebindToUnsigned<F> wide;
  const hn::RebindToSigned<F> wide_signed;
  const hn::Rebind<std::uint16_t, F> half;
  const auto bits = hn::BitCast(wide, value);
  const auto size = hn::And(bits, hn::Set(wide, 0x7FFFFFFFu));
  const auto odd = hn::And(hn::ShiftRight<13>(size), hn::Set(wide, 1u));
  const auto rounded = hn::ShiftRight<13>(hn::Add(size, hn::Add(odd, hn::Set(wide, 0xFFFu))));
  const auto normal = hn::Min(hn::Sub(rounded, hn::Set(wide, 112u << 10)), hn::Set(wide, 0x7C00u));
  const V offset = hn::Set(F(), 0.5f);
  const auto subnormal = hn::Sub(hn::BitCast(wide, hn::Add(hn::BitCast(F(), size), offset)), hn::BitCast(wide, offset));
  const auto is_small = hn::RebindMask(wide, hn::Lt(hn::Abs(value), hn::Set(F(), 0x1p-14f)));
  const auto is_nan = hn::RebindMask(wide, hn::IsNaN(value));
  const auto magnitude = hn::IfThenElse(is_nan, hn::Set(wide, 0x7E00u), hn::IfThenElse(is_small, subnormal, normal));
  const auto sign = hn::And(hn::ShiftRight<16>(bits), hn::Set(wide, 0x8000u));
  hn::StoreU(hn::DemoteTo(half, hn::BitCast(wide_signed, hn::Or(magnitude, sign))), half, &to->bits);
#else
  const hn::Rebind<hwy::float16_t, F> half;
  hn::StoreU(hn::DemoteTo(half, value), half, reinterpret_cast<hwy::float16_t*>(to));
#endif
}

template <class T>
HWY_INLINE void store_some(V value, T* to, std::int64_t count) {
  if (HWY_LIKELY(count >= kW)) return store(value, to);
  T whole[kW];
  store(value, whole);
  std::memcpy(to, whole, static_cast<std::size_t>(count) * sizeof(T));
}

// 4x4 transposes within each 128-bit block: t[c] holds, in block b, column 4b + c of the four rows.
HWY_INLINE void transpose_blocks(V& t0, V& t1, V& t2, V& t3) {
  const F f;
  const V low02 = hn::InterleaveLower(f, t0, t2), low13 = hn::InterleaveLower(f, t1, t3);
  const V up02 = hn::InterleaveUpper(f, t0, t2), up13 = hn::InterleaveUpper(f, t1, t3);
  t0 = hn::InterleaveLower(f, low02, low13);
  t1 = hn::InterleaveUpper(f, low02, low13);
  t2 = hn::InterleaveLower(f, up02, up13);
  t3 = hn::InterleaveUpper(f, up02, up13);
}

// Writes each 128-bit block of v, four floats, `stride` floats after the one before.
template <class FV, class VV>
HWY_INLINE void scatter_blocks(FV f, VV v, float* to, std::int64_t stride) {
  if constexpr (hn::MaxLanes(FV()) <= 4) {
    (void)stride;
    hn::StoreU(v, f, to);
  } else {
    const hn::Half<FV> half;
    constexpr std::int64_t kHalfBlocks = hn::MaxLanes(FV()) / 8;
    scatter_blocks(half, hn::LowerHalf(half, v), to, stride);
    scatter_blocks(half, hn::UpperHalf(half, v), to + kHalfBlocks * stride, stride);
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace tessera::cpu
HWY_AFTER_NAMESPACE();

#endif
