// A small problem from a number: what `tessera fuzz` tries. All that a problem may have is drawn, sizes around the edges of
// tiles most of all, and kept so small that the oracle takes milliseconds.
#include <algorithm>

#include "verify/attention/family.h"
#include "verify/attention/make_case.h"
#include "verify/random.h"

namespace tessera::verify {
namespace {

using namespace cases;  // NOLINT(google-build-using-namespace)

constexpr std::int64_t kMostProducts = 1 << 20;  // multiplications of one Q K^T

// 1 to most.
std::int64_t draw_length(Draw& draw, std::int64_t most) {
  constexpr std::int64_t kEdges[] = {1, 15, 16, 17, 31, 33, 63, 64, 65, 80, 127, 128, 129, 191, 193};
  return std::min(most, draw.one_in(2) ? draw.pick(kEdges) : 1 + draw.below(most));
}

std::vector<std::int32_t> draw_lengths(Draw& draw, std::int64_t count, std::int64_t most) {
  std::vector<std::int32_t> list;
  for (std::int64_t n = 0; n < count; ++n) {
    const std::int64_t length = draw.one_in(4) ? most : draw.below(most + 1);
    list.push_back(static_cast<std::int32_t>(draw.one_in(8) ? 0 : length));
  }
  return list;
}

void draw_mask(Draw& kind, Draw& draw, std::vector<Change>& changes, bool decode) {
  if (!decode) changes.push_back(draw.one_in(2) ? top_left() : bottom_right());
  if (kind.one_in(2)) changes.push_back(causal());
  if (kind.one_in(4)) {
    const std::int64_t left = draw.one_in(4) ? -1 : draw.below(100);
    const std::int64_t right = decode || draw.one_in(2) ? 0 : draw.below(40);
    changes.push_back(window(left, right));
  }
  if (kind.one_in(6)) changes.push_back(softcap(2));
  if (kind.one_in(6)) changes.push_back(alibi(draw.one_in(3)));
  if (draw.one_in(8)) changes.push_back(scale(0.25F));
}

void draw_cache(Draw& kind, Draw& draw, std::vector<Change>& changes, const Shape& s) {
  const bool in_pages = kind.one_in(2);
  constexpr std::int64_t kPages[] = {1, 12, 16, 64};
  if (in_pages) changes.push_back(paged(kind.pick(kPages)));
  const std::int64_t added =
      kind.one_in(2) ? 0 : std::min<std::int64_t>(s.sk, draw.one_in(3) ? 1 + draw.below(6) : s.sq);
  if (added > 0) changes.push_back(append(added));
  std::vector<std::int32_t> lengths = draw_lengths(draw, s.b, s.sk - added);
  if (draw.one_in(4)) {
    std::vector<std::int32_t> padding;
    for (const std::int32_t length : lengths) padding.push_back(static_cast<std::int32_t>(draw.below(length + 1)));
    changes.push_back(leftpad(padding));
  }
  changes.push_back(cache_lengths(lengths));
  if (added > 0 && kind.one_in(2)) {
    const std::int64_t columns = draw.one_in(2) ? s.dqk / 16 * 16 : s.dqk / 32 * 16;
    if (columns > 0) changes.push_back(rotary(columns, draw.one_in(2), s.sq + draw.below(3)));
  }
  if (!in_pages && draw.one_in(4)) {
    std::vector<std::int32_t> rows;
    for (std::int64_t b = 0; b < s.b; ++b) rows.push_back(static_cast<std::int32_t>(s.b - b));
    changes.push_back(cache_batch_idx(rows, s.b + 1));
  }
  if (draw.one_in(4)) changes.push_back(status());
  if (draw.one_in(8)) changes.push_back(batch_invariant());
  if (kind.one_in(3)) {
    const Change scales[] = {e4m3_cache(), scales_per_token(), scales_per_page()};
    changes.push_back(scales[kind.below(in_pages ? 3 : 2)]);
  }
}

}  // namespace

std::unique_ptr<Case> random_attention(std::uint64_t number, std::uint64_t kind_number) {
  Draw kind(kind_number, 0x6b696e64), draw(number, 0x66757a7a);
  constexpr AttentionOp kOps[] = {kForward, kForward, kBackward, kBackward, kDecode};
  constexpr DType kTypes[] = {DType::kFloat16, DType::kBFloat16};
  constexpr std::int64_t kDims[] = {64, 64, 64, 80, 96, 128, 128, 8, 40, 192, 256};
  constexpr std::int64_t kGroups[] = {1, 1, 2, 3, 4, 8};
  const AttentionOp op = kind.pick(kOps);
  const DType dtype = kind.one_in(16) ? DType::kFloat32 : kind.pick(kTypes);
  Shape s{};
  s.dqk = kind.pick(kDims);
  s.dv = kind.one_in(12) ? kind.pick(kDims) : s.dqk;
  s.b = 1 + draw.below(3);
  s.hkv = 1 + draw.below(2);
  s.hq = s.hkv * kind.pick(kGroups);
  s.sq = op == kDecode ? (draw.one_in(2) ? 1 : 1 + draw.below(8)) : draw_length(draw, 200);
  s.sk = draw.one_in(3) && op != kDecode ? s.sq : draw_length(draw, op == kDecode ? 600 : 200);
  const auto products = [&] { return s.b * s.hq * s.sq * s.sk * std::max(s.dqk, s.dv); };
  if (products() > kMostProducts) s.b = 1;
  if (products() > kMostProducts) s.hkv = s.hq = 1;
  while (products() > kMostProducts) (s.sq > s.sk ? s.sq : s.sk) /= 2;

  std::vector<Change> changes = {seed(number)};
  draw_mask(kind, draw, changes, op == kDecode);
  constexpr Layout kLayouts[] = {Layout::kCompact, Layout::kCompact, Layout::kHeadsMajor, Layout::kPadded,
                                 Layout::kUnaligned};
  const Layout lies = kind.pick(kLayouts);
  if (op == kDecode) {
    draw_cache(kind, draw, changes, s);
    changes.push_back(layout(lies == Layout::kHeadsMajor ? Layout::kPadded : lies));  // pages have no such layout
    changes.push_back([](cases::Case& c) {  // a GPU reads no other rows of e4m3
      if (c.problem.fp8_cache && c.layout == Layout::kUnaligned) c.layout = Layout::kPadded;
    });
  } else {
    const bool in_one = kind.one_in(3);
    if (in_one) changes.push_back(varlen(draw_lengths(draw, s.b, s.sq), draw_lengths(draw, s.b, s.sk), draw.below(3)));
    changes.push_back(layout(in_one && lies == Layout::kHeadsMajor ? Layout::kPadded : lies));
    if (op == kBackward && kind.one_in(3)) changes.push_back(dlse());
    if (op == kBackward && kind.one_in(3)) changes.push_back(deterministic());
    if (op == kForward && kind.one_in(4)) changes.push_back(no_lse());
  }
  return attention_case(make(op, dtype, s, {[&](cases::Case& c) {
                               for (const Change& change : changes) change(c);
                             }}));
}

}  // namespace tessera::verify
