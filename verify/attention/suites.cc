
#include <cmath>
#include <initializer_list>

#include "base/format.h"
#include "verify/attention/make_case.h"
#include "verify/case.h"

namespace tessera::cases {
namespace {

constexpr DType kAllTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};

// Every option of the contract once, on one shape; lengths are odd so that every edge is partial.
void add_options(std::vector<Case>& out, AttentionOp op, DType dtype, const Shape& s) {
  const Shape square{s.b, s.sk, s.sk, s.hq, s.hkv, s.dqk, s.dv};
  const Shape tall{s.b, s.sk, s.sq, s.hq, s.hkv, s.dqk, s.dv};  // more queries than keys: rows that see nothing
  const auto add = [&](const Shape& shape, std::initializer_list<Change> changes) {
    out.push_back(make(op, dtype, shape, changes));
  };
  add(s, {});
  add(square, {causal()});
  add(s, {causal(), top_left()});
  add(s, {causal(), bottom_right()});
  add(tall, {causal(), top_left()});
  add(tall, {causal(), bottom_right()});
  add(square, {window(9, 0)});
  add(square, {window(0, 0)});
  add(s, {window(7, 5), bottom_right()});
  add(tall, {window(3, 2), top_left()});
  add(square, {window(20, -1)});
  add(square, {window(-1, 4)});
  add(square, {causal(), window(12, 12)});
  add(s, {softcap(1.5F)});
  add(s, {alibi(), bottom_right()});
  add(square, {alibi(true), causal()});
  add(square, {softcap(2.5F), alibi(), causal(), window(17, 3), dlse()});
  add(s, {scale(0.3F)});
  add(s, {scale(-0.25F)});
  add(s, {layout(Layout::kHeadsMajor)});
  add(square, {layout(Layout::kPadded), causal()});
  add(s, {layout(Layout::kUnaligned)});
  add({s.b, s.sq, s.sk, s.hq, s.hq, s.dqk, s.dv}, {});
  add({s.b, s.sq, s.sk, s.hq, 1, s.dqk, s.dv}, {causal(), bottom_right()});
  add({s.b, s.sq, s.sk, s.hq, s.hkv, s.dqk, s.dv + 24}, {causal(), bottom_right()});
  add({s.b, s.sq, s.sk, s.hq, s.hkv, s.dqk + 40, s.dv}, {});
  add(s, {varlen({17, 0, 1, 33}, {20, 5, 0, 33})});
  add(s, {varlen({17, 0, 1, 33}, {20, 5, 0, 40}, 3), causal(), bottom_right()});
  add(s, {varlen({31, 2, 9}, {16, 2, 12}), causal(), top_left(), layout(Layout::kPadded), dlse()});
  add(s, {varlen({12, 40}, {40, 12}), window(6, 1), bottom_right(), alibi(true), softcap(3)});
  if (op == kBackward) {
    add(s, {dlse()});
    add(tall, {dlse(), causal(), bottom_right()});
    add(s, {deterministic()});
  } else {
    add(s, {no_lse(), causal(), bottom_right()});
    add(s, {chunk(16), causal(), bottom_right()});
    add(tall, {chunk(13), window(9, 20), bottom_right()});  // queries before the first chunk
    add(s, {varlen({17, 0, 1, 33}, {20, 5, 0, 40}, 3), chunk(8), top_left(), softcap(3)});
  }
}

// The deterministic backward is code of its own: every option once more, two at a time.
void add_deterministic(std::vector<Case>& out, DType dtype, const Shape& s) {
  const Shape tall{s.b, s.sk, s.sq, s.hq, s.hkv, s.dqk, s.dv};
  const auto add = [&](const Shape& shape, std::initializer_list<Change> changes) {
    out.push_back(make(kBackward, dtype, shape, changes));
    Case& c = out.back();
    deterministic()(c);
    c.name = describe(c);
  };
  add(s, {causal(), top_left(), dlse()});
  add(s, {causal(), bottom_right(), layout(Layout::kPadded)});
  add(tall, {causal(), bottom_right(), dlse()});  // rows that see nothing
  add(s, {window(31, 8), bottom_right()});
  add(tall, {window(3, 2), top_left(), layout(Layout::kHeadsMajor)});
  add(s, {softcap(1.5F), alibi(true), bottom_right(), dlse()});
  add(s, {scale(-0.25F), layout(Layout::kUnaligned)});
  add({s.b, s.sq, s.sk, s.hq, 1, s.dqk, s.dv}, {causal(), bottom_right()});
  add({s.b, s.sq, s.sk, s.hq, s.hq, s.dqk, s.dv + 24}, {});
  add({s.b, s.sq, s.sk, s.hq, s.hkv, s.dqk + 40, s.dv}, {causal(), bottom_right()});
  add(s, {varlen({17, 0, 1, 133}, {120, 5, 0, 140}, 3), causal(), bottom_right()});
  add(s, {varlen({112, 40, 70}, {40, 112, 70}), window(16, 1), top_left(), alibi(), softcap(3), dlse()});
}

std::vector<Case> quick() {
  std::vector<Case> out;
  for (DType dtype : kAllTypes) {
    for (AttentionOp op : {kForward, kBackward}) {
      add_options(out, op, dtype, {2, 33, 47, 4, 2, 40, 40});
      for (std::int64_t d : {8, 64, 80, 128}) out.push_back(make(op, dtype, {1, 65, 65, 2, 1, d, d}, {causal()}));
      out.push_back(make(op, dtype, {1, 1, 1, 1, 1, 8, 8}));
      out.push_back(make(op, dtype, {1, 1, 97, 2, 2, 64, 64}));
      out.push_back(make(op, dtype, {1, 97, 1, 2, 2, 64, 64}));
    }
    out.push_back(make(kForward, dtype, {2, 150, 40, 4, 2, 64, 64}, {causal(), bottom_right()}));  // keys of one tile
    // MLA's dims; a consumer of Hopper's skips more tiles than a pipeline has stages.
    out.push_back(make(kForward, dtype, {1, 300, 700, 2, 1, 192, 128}, {causal(), bottom_right()}));
    add_quick_decode(out, dtype);
  }
  add_quick_fp8(out);
  return out;
}

std::vector<Case> full() {
  std::vector<Case> out = quick();
  constexpr std::int64_t kDims[] = {8, 16, 24, 40, 64, 72, 80, 88, 96, 112, 128, 160, 192, 256};
  constexpr std::int64_t kEdges[] = {1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257};
  for (DType dtype : kAllTypes) {
    for (AttentionOp op : {kForward, kBackward}) {
      for (std::int64_t d : kDims) {
        out.push_back(make(op, dtype, {2, 97, 131, 4, 2, d, d}, {causal(), bottom_right()}));
        out.push_back(make(op, dtype, {1, 64, 64, 2, 2, d, 264 - d}));
      }
      for (std::int64_t sq : kEdges) {
        for (std::int64_t sk : kEdges) {
          // Without a mask if the lengths are equal, else causal: each edge meets each other one in both roles.
          if (sq == sk) {
            out.push_back(make(op, dtype, {1, sq, sk, 2, 1, 64, 64}));
            out.push_back(make(op, dtype, {1, sq, sk, 2, 1, 64, 64}, {causal()}));
          } else {
            out.push_back(make(op, dtype, {1, sq, sk, 2, 1, 64, 64}, {causal(), bottom_right()}));
          }
        }
        out.push_back(make(op, dtype, {1, sq, 193, 1, 1, 80, 80}, {window(31, 8), top_left()}));
      }
      add_options(out, op, dtype, {2, 113, 257, 8, 2, 80, 80});
      add_options(out, op, dtype, {1, 130, 190, 6, 3, 128, 128});
      for (std::int64_t hkv : {1, 3, 4, 12}) out.push_back(make(op, dtype, {2, 70, 70, 12, hkv, 64, 64}, {causal()}));
      out.push_back(make(op, dtype, {1, 512, 512, 2, 2, 64, 64}, {causal()}));
      if (op == kBackward) out.push_back(make(op, dtype, {1, 300, 700, 2, 1, 192, 128}, {causal(), bottom_right()}));
      out.push_back(make(op, dtype, {1, 40, 40, 2, 2, 20, 12}));  // head dims that only the CPU takes
      out.push_back(make(op, dtype, {1, 40, 40, 2, 2, 1, 1}));
    }
    if (dtype != DType::kFloat32) {  // only the CPU takes fp32, and it is always deterministic
      for (std::int64_t d : kDims) {
        out.push_back(make(kBackward, dtype, {2, 97, 131, 4, 2, d, d}, {causal(), bottom_right(), deterministic()}));
      }
      for (std::int64_t s : kEdges) {
        out.push_back(make(kBackward, dtype, {1, s, 193, 2, 1, 80, 80}, {deterministic()}));
        out.push_back(make(kBackward, dtype, {1, 193, s, 2, 1, 80, 80}, {causal(), bottom_right(), deterministic()}));
      }
      add_deterministic(out, dtype, {2, 113, 257, 8, 2, 80, 80});
      add_deterministic(out, dtype, {1, 130, 190, 6, 3, 128, 128});
    }
    add_full_decode(out, dtype);
    if (dtype == DType::kFloat32) continue;
    // Head dims above 128 have a backward of their own on Hopper: every option once, and steps that wrap its pipelines.
    add_options(out, kBackward, dtype, {1, 130, 190, 6, 3, 192, 192});
    for (std::int64_t d : {136, 144, 176, 184, 200, 232, 248}) {
      out.push_back(make(kBackward, dtype, {1, 200, 150, 4, 2, d, d}, {dlse()}));
    }
    for (std::int64_t d : {176, 256}) {
      out.push_back(make(kBackward, dtype, {1, 513, 640, 2, 1, d, d}));
      out.push_back(make(kBackward, dtype, {2, 700, 450, 2, 2, d, d}, {causal(), top_left()}));
      out.push_back(make(kBackward, dtype, {1, 500, 500, 2, 1, d, d}, {window(150, 20)}));
      out.push_back(make(kBackward, dtype, {1, 513, 640, 2, 1, d, d}, {deterministic()}));
      out.push_back(make(kBackward, dtype, {2, 300, 450, 2, 2, d, d}, {causal(), bottom_right(), deterministic()}));
    }
    // Clusters in which a CTA has no keys, or none at all.
    out.push_back(make(kBackward, dtype, {4, 200, 300, 4, 2, 256, 256},
                       {varlen({170, 9, 200, 1}, {300, 64, 33, 0}), causal(), bottom_right()}));
    out.push_back(make(kBackward, dtype, {4, 200, 300, 4, 2, 192, 192},
                       {varlen({170, 9, 200, 1}, {300, 64, 33, 0}), causal(), bottom_right(), deterministic()}));
    out.push_back(make(kBackward, dtype, {1, 500, 500, 2, 2, 144, 144}, {window(150, 20), deterministic()}));
    // All keys in one CTA, with one and with two consumers: heads that share them, queries that see none, sequences
    // without keys, and several times as many CTAs as a large GPU runs at once.
    for (std::int64_t sk : {40, 100}) {
      out.push_back(make(kBackward, dtype, {1, 300, sk, 6, 2, 64, 64}, {dlse(), deterministic()}));
      out.push_back(make(kBackward, dtype, {1, 300, sk, 2, 1, 40, 72}, {causal(), bottom_right()}));
      out.push_back(make(kBackward, dtype, {1, 300, sk, 2, 1, 88, 64}, {window(20, 5), top_left()}));
      out.push_back(make(kBackward, dtype, {2, 70, sk, 330, 330, 64, 64}));
    }
    out.push_back(make(kBackward, dtype, {4, 200, 64, 4, 2, 64, 64},
                       {varlen({170, 9, 200, 1}, {0, 64, 33, 0}), causal(), bottom_right(), deterministic()}));
    // Key tiles that take turns at dQ without being asked for an order: more columns than a wave of CTAs holds, and the last
    // ones are fewer.
    if (dtype == DType::kBFloat16) {
      for (std::int64_t d : {64, 128, 256}) {
        out.push_back(make(kBackward, dtype, {1, 70, 300, 150, 150, d, d}));
        out.push_back(make(kBackward, dtype, {1, 70, 300, 150, 150, d, d}, {causal(), bottom_right()}));
      }
      out.push_back(make(kBackward, dtype, {1, 70, 300, 150, 150, 64, 64}, {deterministic()}));
      out.push_back(make(kBackward, dtype, {1, 1100, 1100, 30, 30, 8, 8}, {window(64, 0)}));
      out.push_back(make(kBackward, dtype, {4, 70, 300, 40, 40, 64, 64},
                         {varlen({70, 0, 33, 65}, {300, 7, 0, 260}), causal(), bottom_right()}));
    }
    // Key tiles whose queries are divided among CTAs: fewer than a large GPU runs at once, or the last of many. If heads share
    // keys, in more slices than two, whose sums depend on their order.
    out.push_back(make(kBackward, dtype, {1, 1100, 300, 3, 3, 64, 64}));
    out.push_back(make(kBackward, dtype, {1, 1100, 300, 3, 3, 128, 128}, {dlse(), deterministic()}));
    if (dtype == DType::kBFloat16) {
      out.push_back(make(kBackward, dtype, {1, 1100, 300, 2, 2, 96, 64}, {softcap(2)}));
      out.push_back(make(kBackward, dtype, {1, 1100, 300, 6, 2, 64, 64}));
      out.push_back(make(kBackward, dtype, {1, 1100, 300, 6, 2, 80, 80}, {deterministic()}));
      out.push_back(make(kBackward, dtype, {1, 1100, 130, 70, 70, 64, 64}));
      out.push_back(make(kBackward, dtype, {1, 2600, 130, 132, 132, 8, 8}, {causal(), top_left(), deterministic()}));
    }
    // Groups whose query heads are divided among CTAs, not evenly.
    out.push_back(make(kBackward, dtype, {1, 500, 700, 7, 1, 64, 64}, {causal(), bottom_right()}));
    out.push_back(make(kBackward, dtype, {2, 150, 200, 7, 1, 128, 128}));
    out.push_back(make(kBackward, dtype, {1, 500, 700, 7, 1, 64, 64}, {causal(), bottom_right(), deterministic()}));
    // Groups that are not divided, in turns.
    if (dtype == DType::kBFloat16) {
      out.push_back(make(kBackward, dtype, {1, 70, 200, 132, 66, 64, 64}, {causal(), bottom_right(), deterministic()}));
      out.push_back(make(kBackward, dtype, {1, 70, 130, 132, 66, 136, 136}, {deterministic()}));
    }
    out.push_back(make(kBackward, dtype, {1, 100, 200, 2, 1, 64, 256}, {causal(), bottom_right()}));
    out.push_back(make(kBackward, dtype, {1, 200, 100, 2, 1, 256, 128}, {causal(), bottom_right()}));
    // Several times as many tiles as a large GPU runs at once.
    for (std::int64_t d : {56, 64, 96, 128, 256}) {
      out.push_back(make(kForward, dtype, {3, 100, 130, 240, 80, d, d}, {causal(), bottom_right()}));
      out.push_back(make(kForward, dtype, {2, 330, 90, 300, 300, d, d}));
    }
    out.push_back(make(kForward, dtype, {3, 100, 130, 240, 80, 80, 80}, {window(40, 9), bottom_right(), softcap(5)}));
    // Keys of one tile, which heads share, and which some queries or whole sequences do not have.
    out.push_back(make(kForward, dtype, {2, 330, 64, 300, 300, 64, 64}));
    out.push_back(make(kForward, dtype, {3, 200, 40, 240, 80, 64, 64}, {causal(), bottom_right()}));
    out.push_back(make(kForward, dtype, {2, 150, 17, 300, 100, 40, 56}, {window(20, 5), top_left()}));
    out.push_back(make(kForward, dtype, {1, 700, 3, 160, 160, 8, 8}));
    out.push_back(make(kForward, dtype, {7, 200, 64, 48, 16, 64, 64},
                       {varlen({170, 9, 200, 1, 0, 65, 130}, {0, 64, 33, 0, 7, 64, 50}), causal(), bottom_right()}));
    // A tile of queries for each head, so that the keys of the head after the next are loaded meanwhile.
    out.push_back(make(kForward, dtype, {8, 170, 64, 300, 300, 64, 64},
                       {varlen({9, 64, 170, 1, 33, 40, 64, 20}, {64, 33, 60, 64, 7, 64, 50, 64})}));
    // Few queries of many keys, and heads that share them.
    out.push_back(make(kForward, dtype, {33, 64, 300, 8, 8, 128, 128}));
    out.push_back(make(kForward, dtype, {33, 64, 300, 8, 8, 64, 64}, {causal(), bottom_right()}));
    out.push_back(make(kForward, dtype, {2, 4, 500, 32, 4, 128, 128}, {causal(), bottom_right()}));
    out.push_back(make(kForward, dtype, {2, 5, 300, 24, 4, 64, 64}, {window(100, 0), bottom_right()}));
    out.push_back(make(kForward, dtype, {1, 8, 8, 8, 1, 80, 80}, {varlen({4, 0, 7, 1}, {300, 9, 0, 65}, 8)}));
  }
  add_full_fp8(out);
  return out;
}

std::vector<Case> hostile() {
  std::vector<Case> out;
  for (DType dtype : kAllTypes) {
    for (AttentionOp op : {kForward, kBackward}) {
      for (Distribution d : {Distribution::kLogits120, Distribution::kLogits1e4, Distribution::kLogitsMinus120,
                             Distribution::kOneHot, Distribution::kConstant, Distribution::kHugeValues}) {
        // dS of huge values leaves fp16's range, whatever computes it.
        if (d == Distribution::kHugeValues && op == kBackward && dtype == DType::kFloat16) continue;
        out.push_back(make(op, dtype, {1, 130, 150, 2, 1, 64, 64}, {values(d)}));
        out.push_back(make(op, dtype, {1, 130, 150, 2, 1, 64, 64}, {values(d), causal(), bottom_right()}));
        out.push_back(make(op, dtype, {1, 1, 128, 1, 1, 128, 128}, {values(d)}));
        if (op == kForward) out.push_back(make(op, dtype, {1, 150, 40, 2, 1, 64, 64}, {values(d)}));
        out.push_back(make(op, dtype, {1, 90, 90, 2, 2, 80, 80}, {values(d), softcap(30), dlse()}));
        out.push_back(make(op, dtype, {1, 90, 90, 2, 2, 80, 80}, {values(d), window(5, 2), alibi()}));
      }
      for (Distribution d : {Distribution::kSteps, Distribution::kSink}) {
        out.push_back(make(op, dtype, {1, 130, 700, 2, 1, 64, 64}, {values(d)}));
        out.push_back(make(op, dtype, {1, 270, 700, 2, 2, 64, 64}, {values(d), causal(), bottom_right()}));
        out.push_back(make(op, dtype, {1, 90, 300, 2, 1, 80, 80}, {values(d), window(150, 20), bottom_right()}));
      }
      // All queries alike: the error of a row of dK is one random number. Several seeds.
      for (std::uint64_t number : {2, 3, 4}) {
        out.push_back(make(op, dtype, {1, 90, 300, 2, 1, 80, 80},
                           {values(Distribution::kSink), window(150, 20), bottom_right(), seed(number)}));
      }
      out.push_back(make(op, dtype, {1, 704, 704, 1, 1, 64, 64}, {values(Distribution::kLogitsMinus120)}));
      out.push_back(make(op, dtype, {1, 64, 8, 2, 1, 64, 64}, {causal(), bottom_right(), dlse()}));
      out.push_back(make(op, dtype, {1, 64, 16, 2, 1, 64, 64}, {window(3, 0), top_left(), dlse()}));
      out.push_back(make(op, dtype, {1, 8, 8, 2, 1, 64, 64}, {varlen({5, 9, 3}, {0, 0, 0}, 8), dlse()}));
      out.push_back(make(op, dtype, {1, 8, 8, 2, 1, 64, 64}, {varlen({0, 0}, {7, 9})}));
      out.push_back(make(op, dtype, {1, 300, 200, 1, 1, 64, 64}, {causal(), bottom_right(), softcap(0.001F)}));
    }
    // Keys behind the sequence are zeros, whose scores are far above logits of -120.
    if (dtype != DType::kFloat32) {
      out.push_back(make(kBackward, dtype, {1, 70, 100, 2, 1, 192, 192}, {values(Distribution::kLogitsMinus120)}));
    }
    // No gradients here: fp32 cannot hold an LSE of this size to within one.
    out.push_back(make(kForward, dtype, {1, 130, 150, 2, 1, 64, 64}, {values(Distribution::kLogits1e10)}));
    out.push_back(make(kForward, dtype, {1, 150, 40, 2, 1, 64, 64}, {values(Distribution::kLogits1e10)}));
    out.push_back(make(kForward, dtype, {1, 90, 90, 2, 2, 80, 80}, {values(Distribution::kLogits1e10), causal()}));
    out.push_back(make(kForward, dtype, {1, 90, 90, 2, 2, 80, 80}, {values(Distribution::kLogits1e10), softcap(30)}));
    add_hostile_decode(out, dtype);
  }
  add_hostile_fp8(out);
  return out;
}

// For compute-sanitizer, under which a case takes a hundred times as long: each path through the kernels once, small.
std::vector<Case> sanitize() {
  std::vector<Case> out;
  for (AttentionOp op : {kForward, kBackward}) {
    for (const bool in_order : {false, true}) {
      if (in_order && op == kForward) continue;
      const Change mode = in_order ? deterministic() : [](Case&) {};
      const DType bf16 = DType::kBFloat16;
      out.push_back(make(op, bf16, {1, 97, 131, 2, 1, 64, 64}, {mode}));
      out.push_back(make(op, bf16, {1, 40, 200, 2, 1, 64, 64}, {values(Distribution::kSink), mode}));
      out.push_back(make(op, bf16, {1, 131, 97, 2, 2, 80, 80}, {causal(), bottom_right(), dlse(), mode}));
      out.push_back(make(op, DType::kFloat16, {2, 70, 150, 2, 1, 128, 128}, {window(31, 8), bottom_right(), mode}));
      out.push_back(make(op, bf16, {1, 65, 65, 1, 1, 256, 256}, {causal(), mode}));
      out.push_back(make(op, bf16, {1, 65, 70, 2, 1, 40, 64}, {softcap(2), alibi(), bottom_right(), mode}));
      out.push_back(make(op, bf16, {1, 65, 70, 2, 1, 64, 64}, {layout(Layout::kUnaligned), mode}));
      out.push_back(make(op, DType::kFloat16, {1, 1, 1, 2, 1, 64, 64},
                         {varlen({17, 0, 1, 70}, {20, 5, 0, 80}, 3), causal(), bottom_right(), mode}));
    }
  }
  // Several times as many tiles as a large GPU runs at once.
  out.push_back(make(kForward, DType::kBFloat16, {1, 24, 24, 640, 640, 72, 72}, {causal()}));
  out.push_back(make(kForward, DType::kBFloat16, {1, 65, 70, 200, 200, 96, 96}));
  out.push_back(make(kForward, DType::kBFloat16, {1, 140, 40, 200, 100, 64, 64}));  // keys of one tile
  add_sanitize_decode(out);
  add_sanitize_fp8(out);
  return out;
}

// Too long for the whole oracle: some rows and keys of each head are checked. The first is short enough to
// test the method on a CPU.
std::vector<Case> long_sequences() {
  std::vector<Case> out;
  const auto add = [&](AttentionOp op, DType dtype, const Shape& s, std::int64_t sample,
                       std::initializer_list<Change> changes) {
    out.push_back(make(op, dtype, s, changes));
    out.back().sample = sample;
  };
  for (AttentionOp op : {kForward, kBackward}) {
    add(op, DType::kBFloat16, {1, 2048, 2048, 2, 1, 80, 80}, 32, {causal(), dlse()});
    add(op, DType::kBFloat16, {1, 131072, 131072, 2, 1, 80, 80}, 32, {causal()});
    add(op, DType::kFloat16, {1, 131072, 131072, 1, 1, 80, 80}, 32, {});
    add(op, DType::kBFloat16, {1, 205000, 200000, 2, 2, 64, 64}, 32, {});
    // On an H200, the key tiles of each head are one wave.
    add(op, DType::kBFloat16, {1, 66000, 16896, 2, 2, 128, 128}, 32, {});
    add(op, DType::kFloat16, {1, 66000, 16896, 2, 2, 64, 64}, 32, {softcap(2), alibi(), bottom_right()});
    add(op, DType::kFloat16, {1, 131072, 131072, 1, 1, 80, 80}, 32, {causal(), deterministic()});
    add(op, DType::kBFloat16, {1, 1024, 131072, 4, 2, 128, 128}, 32, {causal(), bottom_right(), dlse()});
    add(op, DType::kBFloat16, {1, 65536, 131072, 2, 2, 64, 64}, 32, {window(4096, 128), bottom_right(), alibi()});
  }
  return out;
}

// The shapes of the published tables.
std::vector<Case> bench(std::initializer_list<std::int64_t> lengths) {
  std::vector<Case> out;
  for (AttentionOp op : {kForward, kBackward}) {
    for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      for (std::int64_t d : {64, 80, 128}) {
        for (std::int64_t s : lengths) {
          out.push_back(make(op, dtype, {1, s, s, 8, 8, d, d}));
          out.push_back(make(op, dtype, {1, s, s, 8, 8, d, d}, {causal()}));
        }
      }
    }
  }
  for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (std::int64_t s : lengths) {
      out.push_back(make(kDecode, dtype, {8, 1, s, 8, 8, 64, 64}, {no_lse()}));
      out.push_back(make(kDecode, dtype, {8, 1, s, 32, 8, 128, 128}, {no_lse()}));
    }
  }
  return out;
}

// A model's shapes, each to be run hundreds of times: LLaMA's heads, with and without groups, and a small one.
std::vector<Case> evidence() {
  std::vector<Case> out;
  for (std::int64_t s : {128, 256, 512, 1024, 2048, 4096}) {
    for (AttentionOp op : {kForward, kBackward}) {
      out.push_back(make(op, DType::kBFloat16, {2, s, s, 8, 8, 64, 64}, {causal()}));
      out.push_back(make(op, DType::kBFloat16, {1, s, s, 32, 8, 128, 128}, {causal()}));
    }
    out.push_back(make(kForward, DType::kBFloat16, {1, s, s, 96, 96, 128, 128}, {causal()}));
    out.push_back(make(kForward, DType::kFloat16, {2, s, s, 8, 8, 64, 64}, {}));
    for (std::int64_t b : {1, 16}) out.push_back(make(kDecode, DType::kBFloat16, {b, 1, s, 32, 8, 128, 128}));
  }
  out.push_back(make(kForward, DType::kBFloat16, {1, 512, 512, 8, 8, 64, 64}, {causal()}));
  for (std::int64_t s : {128, 512})
    out.push_back(make(kForward, DType::kBFloat16, {32, s, s, 8, 8, 64, 64}, {causal()}));
  for (Case& c : out) {
    if (c.problem.op != kDecode && c.problem.seq_k > 256) c.sample = 16;
  }
  return out;
}

// 16,384 tokens of width 2,048 (2,000 for D = 80), as the field's tables have it.
std::vector<Case> bench_gpu() {
  std::vector<Case> out;
  for (AttentionOp op : {kForward, kBackward}) {
    for (DType dtype : {DType::kBFloat16, DType::kFloat16}) {
      for (std::int64_t d : {64, 80, 128, 256}) {
        const std::int64_t h = 2048 / d;  // 25 for D = 80
        for (std::int64_t s : {512, 2048, 8192, 16384}) {
          out.push_back(make(op, dtype, {16384 / s, s, s, h, h, d, d}));
          out.push_back(make(op, dtype, {16384 / s, s, s, h, h, d, d}, {causal()}));
        }
      }
    }
  }
  // Modified scores.
  out.push_back(make(kBackward, DType::kBFloat16, {2, 8192, 8192, 16, 16, 128, 128}, {causal(), softcap(30)}));
  // Heads that share keys.
  out.push_back(make(kBackward, DType::kBFloat16, {1, 8192, 8192, 56, 8, 128, 128}, {causal()}));
  // Many queries of few keys.
  for (AttentionOp op : {kForward, kBackward}) out.push_back(make(op, DType::kBFloat16, {64, 564, 64, 8, 8, 64, 64}));
  for (DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    for (std::int64_t b : {1, 16, 64}) {
      for (std::int64_t s : {2048, 8192}) {
        out.push_back(make(kDecode, dtype, {b, 1, s, 32, 8, 128, 128}, {no_lse()}));
        out.push_back(make(kDecode, dtype, {b, 1, s, 32, 8, 128, 128}, {no_lse(), paged(16)}));
      }
    }
  }
  add_bench_fp8(out);
  // Chunked prefill, beside a forward of the same lengths.
  for (const std::int64_t sq : {512, 2048}) {
    const Shape s{1, sq, 16 * sq, 32, 8, 128, 128};
    out.push_back(make(kForward, DType::kBFloat16, s, {no_lse(), causal(), bottom_right()}));
    out.push_back(make(kDecode, DType::kBFloat16, s, {no_lse(), causal()}));
    for (const std::int64_t page : {16, 64, 256}) {
      out.push_back(make(kDecode, DType::kBFloat16, s, {no_lse(), causal(), paged(page)}));
    }
  }
  const auto decode = [&](const Shape& shape, std::initializer_list<Change> changes) {
    out.push_back(make(kDecode, DType::kBFloat16, shape, changes));
  };
  for (std::int64_t d : {64, 80, 256}) decode({16, 1, 8192, 32, 8, d, d}, {no_lse()});
  decode({16, 1, 8192, 32, 32, 128, 128}, {no_lse()});
  decode({1, 1, 4160, 32, 32, 128, 128}, {no_lse()});
  decode({16, 1, 8192, 32, 8, 128, 128}, {no_lse(), batch_invariant()});
  const std::int64_t caches[][2] = {{1, 1024}, {1, 8192}, {1, 131072}, {16, 8192}, {64, 4096}};
  for (const auto& [b, s] : caches) {
    decode({b, 1, s, 32, 8, 128, 128}, {no_lse(), e4m3_cache()});
    decode({b, 1, s, 32, 8, 128, 128}, {no_lse(), e4m3_cache(), paged(16)});
    decode({b, 1, s, 32, 8, 128, 128}, {no_lse(), scales_per_token()});
    decode({b, 1, s, 32, 8, 128, 128}, {no_lse(), scales_per_token(), paged(16)});
  }
  for (std::int64_t d : {64, 256}) decode({16, 1, 8192, 32, 8, d, d}, {no_lse(), e4m3_cache()});
  // Lengths of 1 to 16,384 in a geometric series, in an order that mixes them, beside equal ones with the same sum.
  std::vector<std::int32_t> ragged;
  std::int64_t keys = 0;
  for (int i = 0; i < 64; ++i) {
    ragged.push_back(static_cast<std::int32_t>(std::lround(std::pow(16384.0, i * 37 % 64 / 63.0))));
    keys += ragged.back();
  }
  decode({64, 1, 16384, 32, 8, 128, 128}, {no_lse(), cache_lengths(ragged)});
  decode({64, 1, keys / 64, 32, 8, 128, 128}, {no_lse()});
  return out;
}

// A shape that other libraries are compared at. Its name is that of the comparison's cell behind the op.
Case peer(AttentionOp op, const Shape& s, bool is_causal, std::vector<std::string> tags) {
  const DType dtype = DType::kBFloat16;
  Case c = op == kDecode ? make(op, dtype, s, {no_lse()})
           : is_causal   ? make(op, dtype, s, {causal()})
                         : make(op, dtype, s);
  c.tags = std::move(tags);
  const std::string heads = s.hq == s.hkv ? format("{}", s.hq) : format("{}:{}", s.hq, s.hkv);
  c.name = format("{}/{}/b{}_s{}_h{}_d{}{}",
                  op == kForward    ? "forward"
                  : op == kBackward ? "backward"
                                    : "decode",
                  name_of(dtype), s.b, s.sk, heads, s.dqk, is_causal ? "/causal" : "");
  return c;
}

// What the comparison with other libraries times (python/tessera/bench/cells.json is made from it).
std::vector<Case> peers() {
  std::vector<Case> out;
  const auto add = [&](std::int64_t b, std::int64_t s, std::int64_t h, std::int64_t d, bool is_causal,
                       const std::vector<std::string>& tags) {
    for (const AttentionOp op : {kForward, kBackward}) out.push_back(peer(op, {b, s, s, h, h, d, d}, is_causal, tags));
  };
  // 16,384 tokens of width 2,048 (2,000 for D = 80): the 32 shapes of the published tables.
  for (const std::int64_t d : {64, 80, 128, 256}) {
    for (const std::int64_t s : {512, 2048, 8192, 16384}) {
      for (const bool is_causal : {false, true}) add(16384 / s, s, 2048 / d, d, is_causal, {"table"});
    }
  }
  // Outside that grid: heads that share keys, other head dims, lengths that are no multiple of a tile.
  const Shape odd[] = {{2, 4096, 4096, 32, 8, 96, 96},    {1, 8192, 8192, 56, 8, 128, 128},
                       {1, 2048, 2048, 32, 8, 128, 128},  {1, 8192, 8192, 8, 8, 192, 192},
                       {1, 8192, 8192, 12, 12, 176, 176}, {2, 4096, 4096, 16, 16, 32, 32},
                       {8, 1500, 1500, 20, 20, 64, 64}};
  for (const Shape& s : odd) {
    for (const AttentionOp op : {kForward, kBackward}) out.push_back(peer(op, s, s.sq % 64 == 0, {"odd"}));
  }
  // So short that the host's part counts.
  add(32, 128, 8, 64, true, {"small"});
  add(32, 512, 8, 64, true, {"small"});
  add(2, 512, 8, 64, true, {"small"});
  add(1, 512, 8, 64, true, {"small"});
  add(1, 2048, 32, 128, true, {"small"});
  // A step of generation with the heads of an 8-billion model, from one short sequence to a full cache.
  const std::int64_t caches[][2] = {{1, 1024}, {1, 8192}, {1, 131072}, {16, 8192}, {64, 4096}};
  for (const auto& [b, s] : caches) out.push_back(peer(kDecode, {b, 1, s, 32, 8, 128, 128}, false, {"decode"}));
  for (const std::int64_t d : {64, 80, 256})
    out.push_back(peer(kDecode, {16, 1, 8192, 32, 8, d, d}, false, {"decode"}));
  out.push_back(peer(kDecode, {16, 1, 8192, 32, 32, 128, 128}, false, {"decode"}));
  // To try the harness itself without a GPU.
  add(1, 64, 2, 64, false, {"toy"});
  add(2, 96, 2, 80, true, {"toy", "small"});
  out.push_back(peer(kDecode, {2, 1, 150, 4, 2, 64, 64}, false, {"toy", "decode"}));
  return out;
}

}  // namespace

const std::vector<std::string>& suite_names() {
  static const std::vector<std::string> names{"quick", "full",       "hostile",   "sanitize", "long",
                                              "bench", "bench-long", "bench-gpu", "evidence", "peers"};
  return names;
}

std::vector<Case> suite(std::string_view name) {
  std::vector<Case> all;
  if (name == "quick") all = quick();
  if (name == "full") all = full();
  if (name == "hostile") all = hostile();
  if (name == "sanitize") all = sanitize();
  if (name == "long") all = long_sequences();
  if (name == "evidence") all = evidence();
  if (name == "bench") all = bench({512, 2048});
  if (name == "bench-long") all = bench({512, 2048, 4096});
  if (name == "bench-gpu") all = bench_gpu();
  if (name == "peers") all = peers();
  return verify::once_each(std::move(all));
}

}  // namespace tessera::cases
