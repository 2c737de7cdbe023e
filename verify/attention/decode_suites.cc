// Decode's part of the suites.
#include <cstdlib>
#include <limits>

#include "verify/attention/make_case.h"

namespace tessera::cases {
namespace {

// The cache as it is, contiguous and paged.
void add_decode(std::vector<Case>& out, DType dtype, std::int64_t capacity, std::int64_t hq, std::int64_t hkv,
                std::int64_t d) {
  const auto n = static_cast<std::int32_t>(capacity);
  const Shape one{3, 1, capacity, hq, hkv, d, d};
  const Shape few{3, 4, capacity, hq, hkv, d, d};
  const auto add = [&](const Shape& shape, std::initializer_list<Change> changes) {
    out.push_back(make(kDecode, dtype, shape, changes));
  };
  add(one, {});
  add(one, {no_lse(), cache_lengths({n, 1, n / 2 + 1})});
  add(one, {cache_lengths({n - 1, 0, 7})});
  add(few, {causal(), cache_lengths({n, 5, n / 3})});
  add(few, {causal(), cache_lengths({n - 3, 2, 4})});  // fewer keys than queries: rows that see nothing
  add(one, {window(11, 0), cache_lengths({n, 9, n / 2})});
  add(one, {softcap(2), alibi(), cache_lengths({n, 9, n / 2})});
  add(one, {layout(Layout::kHeadsMajor), cache_lengths({n, 3, n - 2})});
  add({3, 1, capacity, hq, hkv, d, d == 256 ? 128 : d + 8}, {cache_lengths({n, 3, n - 2}), layout(Layout::kPadded)});
  add(one, {paged(16), cache_lengths({n, 16, 17})});
  add(few, {paged(8), causal(), cache_lengths({n, 1, 33})});
  add(one, {paged(1), cache_lengths({13, 0, 30})});
  add(one, {paged(64), cache_lengths({n, 63, 2}), layout(Layout::kPadded)});
}

// Appended keys, rotary embedding, rows of the cache and left padding: each alone and with what it meets. D = 64.
void add_append(std::vector<Case>& out, DType dtype, std::int64_t capacity, std::int64_t hq, std::int64_t hkv) {
  const auto n = static_cast<std::int32_t>(capacity);
  const auto add = [&](std::int64_t sq, std::initializer_list<Change> changes) {
    out.push_back(make(kDecode, dtype, {3, sq, capacity, hq, hkv, 64, 64}, changes));
  };
  add(1, {append(1), cache_lengths({n - 1, 0, 63}), status()});
  add(4, {append(4), causal(), cache_lengths({n - 4, 0, 61})});
  add(3, {append(5), causal(), cache_lengths({n - 5, 0, 62})});
  add(5, {append(2), causal(), cache_lengths({n - 2, 0, 13}), no_lse()});  // rows that see nothing
  add(1, {append(1), rotary(64), cache_lengths({n - 1, 0, 63})});
  add(1, {append(1), rotary(64, true), cache_lengths({n - 1, 0, 63})});
  add(1, {append(1), rotary(32), cache_lengths({n - 1, 0, 63})});
  add(1, {append(3), rotary(18, true), cache_lengths({n - 3, 0, 63})});
  add(4, {append(4), rotary(64), cache_lengths({n - 4, 0, 63})});  // every query at one position
  add(4, {append(4), rotary(64), causal(), cache_lengths({n - 4, 0, 63})});
  add(4, {append(4), rotary(48, true, 200), rotary_lengths({7, 320, 0}), causal(), cache_lengths({n - 4, 0, 63})});
  add(2, {append(3), rotary(64), window(20, 0), cache_lengths({n - 3, 0, 15})});
  add(7, {append(1), rotary(64, true, 7), causal(), cache_lengths({n - 1, 0, 15})});
  add(1, {cache_batch_idx({4, 1, 6}, 7), cache_lengths({n, 17, 64})});
  add(4, {cache_batch_idx({4, 1, 6}, 7), append(4), causal(), rotary(64), cache_lengths({n - 4, 17, 64})});
  add(1, {cache_batch_idx({2, 2, 0}, 3), cache_lengths({n, 17, 64})});  // a row that two sequences read
  add(1, {leftpad({5, 0, 64}), cache_lengths({n, 17, 65})});
  add(1, {leftpad({0, 31, 100})});
  add(3, {leftpad({64, 1, 15}), append(3), causal(), window(50, 0), cache_lengths({n - 3, 0, 63})});
  add(1, {leftpad({10, 20, 2000}), cache_lengths({10, 17, n})});  // no key is left
  add(2, {leftpad({17, 63, 1}), append(2), rotary(64), alibi(true), cache_lengths({n - 2, 64, 1})});
  add(4, {paged(16), append(4), causal(), cache_lengths({15, 16, 30}), rotary(64)});  // across a page's edge
  add(1, {paged(16), append(1), cache_lengths({15, 0, n - 1}), rotary(64, true)});
  add(3, {paged(1), append(3), causal(), cache_lengths({0, 1, 29}), status()});
  add(4, {paged(64), append(4), causal(), cache_lengths({62, 63, 0}), leftpad({0, 62, 0})});
  add(2, {paged(256), append(2), cache_lengths({n - 2, 254, 253})});
  add(4, {paged(24), append(4), causal(), cache_lengths({21, 48, 0})});
  add(4, {paged(16), append(20), causal(), cache_lengths({13, 0, 64}), layout(Layout::kPadded)});  // over whole pages
  add(1, {append(1), softcap(2), alibi(), cache_lengths({n - 1, 9, n / 2})});
  add(4, {append(4), causal(), rotary(64), layout(Layout::kPadded), cache_lengths({n - 4, 0, 63})});
  add(4, {append(4), causal(), rotary(64, true), layout(Layout::kHeadsMajor), cache_lengths({n - 4, 0, 63})});
  add(4, {append(4), causal(), rotary(64), layout(Layout::kUnaligned), cache_lengths({n - 4, 0, 63})});
  add(16, {append(16), causal(), rotary(64), cache_lengths({0, 0, 0})});  // a whole prompt
  add(1, {batch_invariant(), cache_lengths({n, 1, n / 2})});
  add(4, {batch_invariant(), paged(16), append(4), causal(), rotary(64), cache_lengths({n - 4, 1, 33})});
}

// Many queries: lengths around the edges of tiles and pages, and fewer keys than queries.
void add_prefill(std::vector<Case>& out, DType dtype, std::int64_t hq, std::int64_t hkv, std::int64_t d) {
  const auto add = [&](std::int64_t sq, std::initializer_list<Change> changes) {
    out.push_back(make(kDecode, dtype, {7, sq, 260, hq, hkv, d, d}, changes));
  };
  const Change edges = cache_lengths({260, 0, 1, 80, 128, 129, 193});
  add(70, {causal(), edges, status()});
  add(70, {edges, cache_batch_idx({3, 1, 0, 7, 5, 4, 8}, 9), leftpad({0, 0, 0, 17, 128, 1, 64})});
  add(130, {causal(), edges, paged(16)});
  add(130, {cache_lengths({0, 0, 0, 0, 0, 0, 260}), paged(16)});  // tiles without keys, one after the other
  add(70, {window(75, 10), edges, paged(64)});
  add(70, {causal(), edges, paged(256), layout(Layout::kPadded)});
  add(40, {causal(), edges, paged(24), softcap(2), alibi()});
  add(40, {causal(), edges, paged(8), leftpad({0, 0, 0, 17, 128, 1, 64})});
  add(70, {causal(), chunk(48), edges});
  add(70, {chunk(100), window(60, 60), edges, paged(16)});
  add(1, {packed_queries({17, 0, 1, 70, 3, 129, 64}, 5), causal(), edges, paged(16), status()});
  add(1, {packed_queries({260, 1, 0, 2, 0, 0, 30}), edges, alibi(true)});
  const Change before = cache_lengths({189, 0, 1, 80, 57, 129, 121});
  add(71, {append(71), causal(), before, rotary(d), status()});
  add(71, {append(71), causal(), before, rotary(d / 2, true), paged(16)});
  add(40, {append(10), window(50, 0), before, paged(64), leftpad({0, 0, 0, 17, 57, 1, 64})});
}

// A cache of e4m3, for one sequence's rows and for packed ones, with what else its loads and stores depend on.
void add_e4m3_cache(std::vector<Case>& out, DType dtype, std::int64_t capacity, std::int64_t hq, std::int64_t hkv,
                    std::int64_t d) {
  const auto n = static_cast<std::int32_t>(capacity);
  const auto add = [&](std::int64_t sq, std::initializer_list<Change> changes) {
    Case c = make(kDecode, dtype, {3, sq, capacity, hq, hkv, d, d}, changes);
    e4m3_cache()(c);
    c.name = describe(c);
    out.push_back(c);
  };
  add(1, {cache_lengths({n, 1, n / 2 + 1})});
  add(4, {causal(), cache_lengths({n - 3, 2, 4}), layout(Layout::kPadded), scales_per_batch()});
  add(1, {paged(16), cache_lengths({n, 0, 17})});
  add(1, {append(1), rotary(d), cache_lengths({n - 1, 0, 63}), status()});
  add(3, {paged(16), append(3), causal(), softcap(2), alibi(), cache_lengths({n - 3, 14, 61}), scales_per_batch()});
}

// The same with scales beside the keys.
void add_key_scales(std::vector<Case>& out, DType dtype, std::int64_t capacity, std::int64_t hq, std::int64_t hkv,
                    std::int64_t d) {
  const auto n = static_cast<std::int32_t>(capacity);
  const auto add = [&](std::int64_t sq, std::initializer_list<Change> changes) {
    out.push_back(make(kDecode, dtype, {3, sq, capacity, hq, hkv, d, d}, changes));
  };
  const Change per_token = scales_per_token(), per_page = scales_per_page();
  add(1, {per_token, cache_lengths({n, 1, n / 2 + 1}), uneven(1)});
  add(4, {per_token, causal(), cache_lengths({n - 3, 2, 4}), layout(Layout::kPadded)});
  add(1, {per_token, append(1), rotary(d), cache_lengths({n - 1, 0, 63}), status()});
  add(3, {per_token, paged(16), append(3), causal(), softcap(2), alibi(), cache_lengths({n - 3, 14, 61}), uneven(1)});
  add(1, {per_page, paged(16), cache_lengths({n, 0, 17}), one_scale()});
  add(3, {per_page, paged(16), append(3), causal(), rotary(d), cache_lengths({n - 3, 14, 61})});
}
}  // namespace

void add_quick_decode(std::vector<Case>& out, DType dtype) {
  add_decode(out, dtype, 100, 4, 2, 64);
  const auto add = [&](const Shape& shape, std::initializer_list<Change> changes) {
    out.push_back(make(kDecode, dtype, shape, changes));
  };
  const Shape one{3, 1, 100, 4, 2, 64, 64}, few{3, 4, 100, 4, 2, 64, 64};
  add(one, {append(1), rotary(64), cache_lengths({99, 0, 63}), status()});
  add(few, {append(4), rotary(32, true), rotary_lengths({5, 0, 96}), causal(), cache_lengths({96, 0, 63})});
  add(few, {append(6), rotary(64), window(30, 0), leftpad({3, 0, 40}), cache_lengths({94, 0, 63})});
  add(few, {append(2), paged(16), causal(), softcap(2), alibi(), cache_lengths({98, 1, 15})});
  add({3, 1, 100, 8, 1, 40, 64},
      {append(1), rotary(40, true), cache_batch_idx({3, 0, 4}, 5), cache_lengths({9, 0, 99})});
  add({3, 3, 100, 7, 1, 64, 40}, {append(3), paged(1), rotary(24), cache_lengths({96, 0, 63})});
  add({3, 9, 100, 4, 4, 80, 80}, {append(9), causal(), rotary(80), layout(Layout::kPadded), cache_lengths({91, 0, 1})});
  add(one, {batch_invariant(), leftpad({0, 9, 70}), cache_lengths({100, 10, 64})});
  add(one, {append(1), cache_lengths({100, 50, 99}), refused()});  // the first cache is full
  // Many queries.
  const Shape many{3, 40, 100, 4, 2, 64, 64};
  add(many, {causal(), cache_lengths({100, 0, 63}), status()});
  add(many, {causal(), chunk(24), paged(16), cache_lengths({100, 1, 33})});
  add(many, {append(40), causal(), rotary(64), cache_lengths({60, 0, 45})});
  add(many, {packed_queries({17, 0, 1, 33}, 2), causal(), paged(8), cache_lengths({100, 5, 0, 33}), status()});
  add(many,
      {packed_queries({17, 0, 33}), leftpad({3, 0, 40}), cache_batch_idx({3, 0, 1}, 4), cache_lengths({99, 5, 70})});
  add(few, {causal(), chunk(7), cache_lengths({100, 1, 33})});
  add_e4m3_cache(out, dtype, 100, 4, 2, 64);
  add(one, {e4m3_cache(), one_scale(), no_lse(), window(40, 0), leftpad({3, 0, 40}), cache_lengths({99, 5, 70})});
  add({3, 1, 100, 8, 1, 48, 80},
      {e4m3_cache(), append(1), rotary(48, true), cache_batch_idx({3, 0, 4}, 5), cache_lengths({9, 0, 99})});
  add_key_scales(out, dtype, 100, 4, 2, 64);
  add(one, {scales_per_token(), no_lse(), window(40, 0), leftpad({3, 0, 40}), cache_lengths({99, 5, 70})});
  add({3, 1, 100, 8, 1, 48, 80},
      {scales_per_token(), append(1), rotary(48, true), cache_batch_idx({3, 0, 4}, 5), cache_lengths({9, 0, 99})});
  add(many,
      {packed_queries({17, 0, 1, 33}, 2), scales_per_token(), causal(), paged(8), cache_lengths({100, 5, 0, 33})});
}

void add_full_decode(std::vector<Case>& out, DType dtype) {
  for (std::int64_t d : {8, 16, 24, 40, 64, 72, 80, 88, 96, 112, 128, 160, 192, 256}) {
    add_decode(out, dtype, 300, 4, 1, d);
  }
  add_decode(out, dtype, 1025, 8, 8, 64);
  add_decode(out, dtype, 2048, 32, 4, 128);
  add_append(out, dtype, 150, 8, 2);
  if (dtype == DType::kBFloat16) add_append(out, dtype, 300, 4, 4);
  const auto add = [&](const Shape& shape, std::initializer_list<Change> changes) {
    out.push_back(make(kDecode, dtype, shape, changes));
  };
  // Every length around the edges of tiles and pages in one batch.
  const std::vector<std::int32_t> edges = {0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129};
  const Shape edge{11, 1, 130, 8, 2, 64, 64};
  add(edge, {cache_lengths(edges)});
  add(edge, {cache_lengths(edges), append(1), rotary(64)});
  for (std::int64_t page : {1, 12, 16, 64, 256}) {
    add(edge, {paged(page), cache_lengths(edges)});
    add(edge, {paged(page), cache_lengths(edges), append(1), rotary(64, true)});
  }
  // Long enough to be split, by several numbers of keys.
  const Shape split{2, 1, 4096, 8, 1, 128, 128};
  add(split, {cache_lengths({4095, 17}), append(1), rotary(128)});
  add(split, {cache_lengths({4095, 2047}), append(1), rotary(128), paged(16), batch_invariant()});
  add(split, {cache_lengths({4096, 2048}), leftpad({3000, 5}), batch_invariant()});
  add({2, 4, 4096, 4, 1, 64, 64}, {cache_lengths({4092, 1023}), append(4), causal(), window(1500, 0), paged(64)});
  if (dtype == DType::kFloat32) return;
  for (const std::int64_t d : {64, 80, 128, 256}) add_prefill(out, dtype, 4, 2, d);
  // Enough keys that every stage is reused.
  add({1, 200, 1500, 4, 2, 128, 128}, {causal()});
  add({1, 200, 1500, 4, 2, 128, 128}, {causal(), paged(16)});
  add({1, 200, 1500, 4, 2, 64, 64}, {paged(64)});
  // Megabytes of pages, so that no other memory is before them, and boxes behind the last key.
  if (dtype == DType::kBFloat16) add({1, 65, 2056, 16, 16, 64, 64}, {causal(), paged(16)});
  // Several times as many tiles as a large GPU runs at once.
  for (const std::int64_t d : {64, 128}) {
    add({2, 200, 150, 132, 44, d, d}, {causal(), cache_lengths({150, 101})});
    add({2, 200, 150, 132, 44, d, d}, {causal(), paged(16), cache_lengths({150, 101})});
    add({2, 200, 150, 132, 44, d, d}, {paged(64), cache_lengths({120, 71}), append(30), rotary(64, false, 200)});
  }
  // So many sequences that each CTA has several.
  std::vector<std::int32_t> many;
  for (int i = 0; i < 33; ++i) many.push_back(i * 127 % 301);
  add({33, 1, 300, 8, 8, 16, 16}, {cache_lengths(many)});
  // As many row blocks as a large GPU has SMs.
  std::vector<std::int32_t> some(many.begin(), many.begin() + 16);
  if (dtype == DType::kBFloat16) {
    add({16, 1, 300, 32, 8, 128, 128}, {cache_lengths(some)});
    add({16, 1, 300, 32, 8, 128, 128}, {cache_lengths(some), e4m3_cache()});
    add({16, 1, 300, 32, 8, 80, 80}, {cache_lengths(some)});
    add({16, 1, 300, 32, 8, 128, 128}, {cache_lengths(some), append(1), rotary(128), paged(16)});
    // At equal lengths CTAs have whole row blocks, or parts of them.
    add({16, 1, 300, 32, 8, 128, 128}, {});
    add({33, 1, 300, 8, 8, 16, 16}, {});
    add({3, 1, 2000, 8, 8, 16, 16}, {});
  }
  // So many pages that each CTA's come in several groups of 32.
  std::vector<std::int32_t> long_ones;
  for (const std::int32_t length : some) long_ones.push_back(1200 - length);
  if (dtype == DType::kBFloat16) add({16, 1, 1200, 8, 8, 16, 16}, {cache_lengths(long_ones), paged(8)});
  // One sequence of so many heads that clusters of three and of six share the keys of each.
  if (dtype == DType::kBFloat16) {
    add({1, 1, 2000, 32, 32, 64, 64}, {cache_lengths({1990}), append(1), rotary(64)});
    add({1, 1, 2000, 16, 16, 64, 64}, {cache_lengths({1999})});
    add({1, 16, 2000, 64, 8, 64, 64}, {cache_lengths({1999})});  // two row blocks
  }
  // So many row blocks that no clusters of all fit a large GPU, and so few that CTAs share the keys of each.
  if (dtype == DType::kBFloat16) {
    add({1, 1, 1000, 64, 64, 128, 128}, {});
    add({1, 1, 1000, 64, 64, 128, 128}, {e4m3_cache()});
    add({1, 1, 1000, 64, 64, 80, 80}, {});
    add({1, 16, 600, 64, 64, 128, 128}, {causal(), cache_lengths({599})});
    add({1, 20, 600, 64, 64, 64, 64}, {causal()});
    add({3, 1, 700, 128, 32, 64, 64}, {cache_lengths({700, 0, 333})});
    add({3, 1, 700, 64, 32, 128, 128}, {cache_lengths({699, 0, 333}), append(1), rotary(128)});
    add({3, 1, 700, 64, 32, 128, 128}, {cache_lengths({700, 0, 333}), paged(16)});
  }
  // So many tiles that every stage is used often.
  if (dtype == DType::kBFloat16) add({2, 1, 33800, 8, 8, 16, 16}, {cache_lengths({33800, 30011})});
  // Rows of a group: queries times heads.
  for (std::int64_t group : {1, 4, 7, 8, 16}) {
    for (std::int64_t sq : {1, 2, 7, 16}) {
      const auto new_keys = static_cast<std::int32_t>(sq);
      add({2, sq, 100, 2 * group, 2, 64, 64}, {append(sq), causal(), rotary(64), cache_lengths({100 - new_keys, 31})});
    }
  }
  for (std::int64_t d : {8, 24, 72, 96, 128, 160, 192, 256}) {
    add({2, 2, 100, 4, 2, d, d}, {append(2), causal(), rotary(d), paged(16), cache_lengths({98, 15})});
  }
  add({2, 1, 100, 4, 2, 192, 128}, {append(1), rotary(64), cache_lengths({99, 15})});  // MLA's dims
  add({2, 4, 100, 4, 2, 64, 128}, {append(4), causal(), rotary(64, true), paged(8), cache_lengths({96, 15})});
  add({2, 4, 100, 4, 2, 40, 8}, {append(4), causal(), rotary(40, true), leftpad({0, 3}), cache_lengths({96, 15})});
  add_key_scales(out, dtype, 300, 4, 1, 128);
  if (dtype == DType::kFloat16) return add_e4m3_cache(out, dtype, 300, 4, 1, 128);
  for (const std::int64_t d : {16, 32, 80, 96, 128, 256}) add_e4m3_cache(out, dtype, 300, 4, 1, d);
  for (const std::int64_t group : {1, 8, 16}) {
    for (const std::int64_t sq : {1, 5, 16}) {
      add({2, sq, 300, 2 * group, 2, 128, 128}, {e4m3_cache(), causal(), cache_lengths({300, 31})});
    }
  }
  for (const std::int64_t page : {1, 8, 24, 64, 256}) {
    add(edge, {e4m3_cache(), paged(page), cache_lengths(edges), append(1), rotary(64, true)});
  }
  add(split, {e4m3_cache(), cache_lengths({4095, 17}), append(1), rotary(128)});
  add(split, {e4m3_cache(), cache_lengths({4095, 2047}), append(1), paged(16), batch_invariant()});
  add({33, 1, 300, 8, 8, 16, 16}, {e4m3_cache(), cache_lengths(many)});
  for (const std::int64_t d : {16, 80, 256}) add_key_scales(out, dtype, 300, 4, 1, d);
  for (const std::int64_t group : {1, 16}) {
    add({2, 5, 300, 2 * group, 2, 128, 128}, {scales_per_token(), causal(), cache_lengths({300, 31}), uneven(1)});
  }
  for (const std::int64_t page : {1, 8, 24, 64, 256}) {
    add(edge, {scales_per_token(), paged(page), cache_lengths(edges), append(1), rotary(64, true)});
    add(edge, {scales_per_page(), paged(page), cache_lengths(edges), append(1), rotary(64, true)});
  }
  add(split, {scales_per_token(), cache_lengths({4095, 17}), append(1), rotary(128), uneven(1)});
  add(split, {scales_per_token(), cache_lengths({4095, 2047}), append(1), paged(16), batch_invariant()});
  add({16, 1, 300, 32, 8, 128, 128}, {cache_lengths(some), scales_per_token(), uneven(1)});
  add({2, 70, 260, 4, 2, 64, 128}, {scales_per_token(), append(70), causal(), rotary(64), cache_lengths({190, 31})});
  add({2, 70, 260, 4, 2, 64, 128}, {e4m3_cache(), append(70), causal(), rotary(64), cache_lengths({190, 31})});
}

void add_hostile_decode(std::vector<Case>& out, DType dtype) {
  for (Distribution d :
       {Distribution::kLogits120, Distribution::kLogits1e4, Distribution::kLogits1e10, Distribution::kLogitsMinus120,
        Distribution::kOneHot, Distribution::kConstant, Distribution::kHugeValues}) {
    out.push_back(make(kDecode, dtype, {2, 1, 700, 4, 1, 128, 128}, {values(d), cache_lengths({700, 129})}));
    out.push_back(make(kDecode, dtype, {2, 2, 256, 4, 2, 64, 64}, {values(d), paged(16), cache_lengths({256, 31})}));
  }
  for (Distribution d :
       {Distribution::kLogits120, Distribution::kLogits1e10, Distribution::kLogitsMinus120, Distribution::kSteps,
        Distribution::kOneHot, Distribution::kConstant, Distribution::kHugeValues}) {
    out.push_back(
        make(kDecode, dtype, {2, 1, 700, 4, 1, 128, 128}, {e4m3_cache(), values(d), cache_lengths({700, 129})}));
  }
  for (Distribution d : {Distribution::kLogits1e10, Distribution::kLogitsMinus120, Distribution::kSteps,
                         Distribution::kOneHot, Distribution::kHugeValues}) {
    const int sizes = d == Distribution::kHugeValues ? 0 : 1;  // larger ones would not fit fp16
    out.push_back(make(kDecode, dtype, {2, 1, 700, 4, 1, 128, 128},
                       {scales_per_token(), values(d), cache_lengths({700, 129}), uneven(sizes)}));
  }
  // Values that nothing is seen of, and far larger than those that are; and the other way around.
  for (const int exponent : {13, -13, 40, -40}) {
    if (dtype == DType::kFloat16 && std::abs(exponent) > 13) continue;
    out.push_back(
        make(kDecode, dtype, {2, 1, 700, 4, 1, 128, 128},
             {scales_per_token(), values(Distribution::kOneHot), value_exponent(exponent), cache_lengths({700, 129})}));
    out.push_back(make(kDecode, dtype, {2, 1, 700, 4, 1, 128, 128},
                       {scales_per_token(), values(Distribution::kOneHot), value_exponent(exponent), append(1),
                        paged(16), cache_lengths({699, 128})}));
    if (exponent < 0) continue;
    // So many sequences that a CTA meets both sizes, one after the other.
    out.push_back(make(kDecode, dtype, {24, 1, 700, 8, 8, 64, 64}, {scales_per_token(), value_exponent(exponent)}));
  }
  // Queries far from 1, which fp16 could not hold, and some of them 0.
  for (const double size : {1e30, 1e-30}) {
    if (dtype == DType::kFloat16) continue;
    out.push_back(
        make(kDecode, dtype, {2, 2, 200, 4, 1, 128, 128}, {e4m3_cache(), queries_of(size), cache_lengths({200, 129})}));
  }
  out.push_back(make(kDecode, dtype, {3, 1, 64, 4, 2, 64, 64},
                     {e4m3_cache(), append(1), paged(16), cache_lengths({63, 64, 5}), refused()}));
  for (const Change& scales : {scales_per_token(), scales_per_page()}) {
    out.push_back(make(kDecode, dtype, {3, 1, 64, 4, 2, 64, 64},
                       {scales, append(1), paged(16), cache_lengths({63, 64, 5}), refused()}));
  }
  out.push_back(make(kDecode, dtype, {3, 1, 64, 4, 2, 64, 64}, {cache_lengths({0, 0, 0})}));
  out.push_back(make(kDecode, dtype, {3, 1, 64, 4, 2, 64, 64}, {cache_lengths({0, 0, 0}), paged(16)}));
  const auto add = [&](const Shape& shape, std::initializer_list<Change> changes) {
    out.push_back(make(kDecode, dtype, shape, changes));
  };
  const Shape few{2, 2, 256, 4, 2, 64, 64};
  add(few, {values(Distribution::kLogits120), append(2), causal(), rotary(64), cache_lengths({254, 31})});
  add(few, {values(Distribution::kLogits1e4), append(2), causal(), paged(16), cache_lengths({254, 31})});
  add(few, {values(Distribution::kHugeValues), append(2), leftpad({200, 0}), cache_lengths({254, 31})});
  add(few, {values(Distribution::kLogits1e4), append(5), rotary(64, true), cache_lengths({250, 0})});
  const Shape many{2, 70, 256, 4, 2, 64, 64};
  add(many, {values(Distribution::kHugeValues), causal(), paged(16), cache_lengths({256, 31})});
  add(many, {values(Distribution::kLogits1e4), causal(), append(70), rotary(64), cache_lengths({186, 31})});
  add(many, {values(Distribution::kSteps), cache_lengths({255, 131})});
  // Sequences that do not fit the cache.
  const Shape one{3, 1, 64, 4, 2, 64, 64};
  const std::int32_t huge = std::numeric_limits<std::int32_t>::max();
  add(one, {append(1), cache_lengths({63, 64, 5}), refused()});
  add(one, {append(1), cache_lengths({huge, -1, -huge - 1}), refused()});
  add(one, {append(5), paged(16), rotary(64), cache_lengths({60, 59, 13}), refused()});
  add(one, {append(20), paged(16), cache_lengths({64, huge, 44}), refused()});
  add(one, {append(1), rotary(64), rotary_lengths({64, 63, -1}), cache_lengths({0, 5, 5}), refused()});
  add(one, {append(1), rotary(64), rotary_lengths({huge, 0, 1}), cache_lengths({0, 5, 5}), refused()});
  add(one, {append(1), cache_batch_idx({7, 2, -1}, 7), cache_lengths({3, 5, 5}), refused()});
  add(one, {cache_batch_idx({huge, 2, 0}, 7), cache_lengths({3, 65, 5}), refused()});
  add(one, {leftpad({-1, 0, 3}), cache_lengths({64, 64, 64}), refused()});
  add(one, {append(1), paged(16), bad_page(1), cache_lengths({3, 40, 5}), refused()});
  add(one, {paged(16), cache_lengths({65, huge, 64}), refused()});
  const Shape rows{3, 33, 64, 4, 2, 64, 64};
  add(rows, {append(33), causal(), cache_lengths({31, 32, -1}), refused()});
  add(rows, {append(33), paged(16), rotary(64), bad_page(1), cache_lengths({3, 20, huge}), refused()});
  add(rows, {append(33), rotary(64), rotary_lengths({32, 31, -1}), cache_lengths({0, 5, 5}), refused()});
  add(rows, {cache_batch_idx({huge, 2, -1}, 7), cache_lengths({3, 65, 5}), refused()});
  add(rows, {leftpad({-1, 70, 3}), cache_lengths({64, 64, -5}), refused()});
  add(rows, {packed_queries({5, 40, 0}), paged(16), cache_lengths({65, 64, huge}), refused()});
  add(one, {cache_lengths({65, 0, -1}), refused(), [](Case& c) { c.with_status = false; }});
}

void add_sanitize_decode(std::vector<Case>& out) {
  out.push_back(make(kDecode, DType::kBFloat16, {2, 1, 300, 8, 2, 128, 128}, {cache_lengths({300, 17})}));
  out.push_back(
      make(kDecode, DType::kBFloat16, {2, 2, 100, 4, 2, 64, 64}, {paged(16), causal(), cache_lengths({100, 31})}));
  out.push_back(
      make(kDecode, DType::kBFloat16, {2, 3, 100, 4, 2, 64, 64},
           {paged(16), append(3), causal(), rotary(64), leftpad({0, 20}), cache_lengths({97, 31}), status()}));
  out.push_back(make(kDecode, DType::kFloat16, {2, 1, 300, 8, 2, 80, 80},
                     {append(1), rotary(80, true), cache_batch_idx({3, 0}, 4), cache_lengths({299, 0})}));
  out.push_back(
      make(kDecode, DType::kBFloat16, {3, 1, 64, 4, 2, 64, 64}, {append(1), cache_lengths({64, 1, -1}), refused()}));
  out.push_back(make(kDecode, DType::kBFloat16, {2, 1, 300, 8, 2, 128, 128},
                     {e4m3_cache(), cache_lengths({300, 17}), scales_per_batch()}));
  out.push_back(make(kDecode, DType::kBFloat16, {2, 3, 100, 4, 2, 64, 64},
                     {e4m3_cache(), paged(16), append(3), causal(), rotary(64), cache_lengths({97, 31}), status()}));
  out.push_back(make(kDecode, DType::kBFloat16, {2, 1, 300, 8, 2, 128, 128},
                     {scales_per_token(), cache_lengths({299, 17}), append(1), uneven(1)}));
  out.push_back(make(kDecode, DType::kBFloat16, {2, 3, 100, 4, 2, 64, 64},
                     {scales_per_token(), paged(16), append(3), causal(), rotary(64), cache_lengths({97, 31})}));
  const Shape many{3, 70, 150, 4, 2, 64, 64};
  out.push_back(make(kDecode, DType::kBFloat16, many, {causal(), chunk(48), cache_lengths({150, 0, 81}), status()}));
  out.push_back(make(kDecode, DType::kBFloat16, many,
                     {causal(), append(70), rotary(64), paged(16), cache_lengths({80, 0, 17}), status()}));
  out.push_back(make(kDecode, DType::kFloat16, {3, 1, 150, 4, 2, 80, 80},
                     {packed_queries({70, 0, 5}, 2), paged(24), cache_lengths({150, 3, 17})}));
  out.push_back(make(kDecode, DType::kFloat16, {3, 40, 150, 4, 2, 40, 40},
                     {layout(Layout::kUnaligned), append(40), paged(16), cache_lengths({80, 0, 17})}));
}

}  // namespace tessera::cases
