#include "cases/buffers.h"

#include <algorithm>
#include <cstring>

namespace tessera::cases {
namespace {

using oracle::HostTensor;

constexpr std::byte kPoison{0xff};  // all ones is a NaN in every floating type here

tessera_dtype dtype_of(DType dtype) {
  if (dtype == DType::kFloat32) return {TESSERA_FLOAT, 32, 1};
  if (dtype == DType::kFloat16) return {TESSERA_FLOAT, 16, 1};
  return {TESSERA_BFLOAT, 16, 1};
}

DType dtype_of(tessera_dtype dtype) {
  if (dtype.bits == 32) return DType::kFloat32;
  return dtype.code == TESSERA_BFLOAT ? DType::kBFloat16 : DType::kFloat16;
}

void store(std::byte* at, DType dtype, double value) {
  if (dtype == DType::kFloat32) {
    const auto x = static_cast<float>(value);
    std::memcpy(at, &x, sizeof x);
  } else {
    const std::uint16_t x = oracle::to_bits16(dtype, value);
    std::memcpy(at, &x, sizeof x);
  }
}

double load(const std::byte* at, DType dtype) {
  if (dtype == DType::kFloat32) {
    float x = 0;
    std::memcpy(&x, at, sizeof x);
    return x;
  }
  std::uint16_t x = 0;
  std::memcpy(&x, at, sizeof x);
  return oracle::from_bits16(dtype, x);
}

// Calls f(index in a compact tensor, byte offset in the storage) for every element.
template <class F>
void for_each_element(const Buffer& b, F f) {
  const auto size = static_cast<std::int64_t>(b.tensor.dtype.bits / 8);
  std::size_t n = 0;
  for (std::int64_t w = 0; w < b.shape[0]; ++w) {
    for (std::int64_t x = 0; x < b.shape[1]; ++x) {
      for (std::int64_t y = 0; y < b.shape[2]; ++y) {
        const std::int64_t row = w * b.strides[0] + x * b.strides[1] + y * b.strides[2];
        for (std::int64_t z = 0; z < b.shape[3]; ++z) f(n++, static_cast<std::size_t>((row + z * b.strides[3]) * size));
      }
    }
  }
}

// Points the tensor at the storage. rank 4: [a, b, c, d]; 3: the same without a (of size 1); 2: [b, c].
void describe(Buffer& b, tessera_dtype dtype, int first_dim, int rank) {
  b.tensor.data = b.storage.data();
  b.tensor.device = {TESSERA_CPU, 0};
  b.tensor.ndim = rank;
  b.tensor.dtype = dtype;
  b.tensor.shape = b.shape.data() + first_dim;
  b.tensor.strides = b.strides.data() + first_dim;
}

}  // namespace

void Buffers::add(Buffer& b, const HostTensor& values, DType dtype, Layout layout, int rank, bool written) {
  b.shape = values.shape;
  const auto& n = b.shape;
  switch (layout) {
    case Layout::kCompact:
      b.strides = {n[1] * n[2] * n[3], n[2] * n[3], n[3], 1};
      break;
    case Layout::kHeadsMajor:
      b.strides = {n[1] * n[2] * n[3], n[3], n[1] * n[3], 1};
      break;
    case Layout::kPadded: {
      const std::int64_t head = n[3] + 8;
      const std::int64_t row = n[2] * head + 16;
      b.strides = {n[1] * row + 24, row, head, 1};
      break;
    }
  }
  const std::size_t elements =
      static_cast<std::size_t>(n[0] * n[1] * n[2] * n[3]) == 0 ? 0 : static_cast<std::size_t>(n[0] * b.strides[0] + 64);
  b.storage.assign(std::max<std::size_t>(elements, 1) * size_of(dtype), kPoison);
  describe(b, dtype_of(dtype), rank == 4 ? 0 : 1, rank);
  b.written = written;
  if (written) return;
  for_each_element(b,
                   [&](std::size_t at, std::size_t byte) { store(b.storage.data() + byte, dtype, values.data[at]); });
}

void Buffers::add(Buffer& b, const std::vector<std::int32_t>& values, std::int64_t rows) {
  if (values.empty()) return;
  const auto total = static_cast<std::int64_t>(values.size());
  b.shape = {1, 1, rows, total / rows};
  b.strides = {total, total, total / rows, 1};
  b.storage.resize(values.size() * sizeof(std::int32_t));
  std::memcpy(b.storage.data(), values.data(), b.storage.size());
  const bool matrix = &b == &page_table_;
  describe(b, {TESSERA_INT, 32, 1}, matrix ? 2 : 3, matrix ? 2 : 1);
}

Buffers::Buffers(const Case& c, const oracle::Inputs& in, const oracle::Outputs* saved) : case_(c), inputs_(in) {
  const AttentionProblem& p = c.problem;
  const int rank = p.varlen ? 3 : 4;
  const bool backward = p.op == AttentionOp::kBackward;
  // Shapes of what is written come from empty tensors where there is no oracle's result to copy.
  const HostTensor o = saved != nullptr ? saved->o : HostTensor(in.q.shape[0], in.q.shape[1], p.heads_q, p.dim_v);
  HostTensor lse = saved != nullptr ? saved->lse : HostTensor(in.q.shape[0], p.heads_q, in.q.shape[1], 1);
  lse.shape = {1, lse.shape[0], lse.shape[1], lse.shape[2]};  // as [B, H, S]
  const Layout rows = c.layout == Layout::kPadded ? Layout::kPadded : Layout::kCompact;

  add(q_, in.q, p.dtype, c.layout, rank, false);
  add(k_, in.k, p.dtype, c.layout, rank, false);
  add(v_, in.v, p.dtype, c.layout, rank, false);
  add(o_, o, p.dtype, c.layout, rank, !backward);
  if (backward || p.with_lse) {
    add(lse_, lse, DType::kFloat32, rows, 3, !backward);
    if (p.varlen) describe(lse_, dtype_of(DType::kFloat32), 2, 2);
  }
  if (backward) {
    add(d_o_, in.d_o, p.dtype, c.layout, rank, false);
    if (p.with_dlse) {
      HostTensor d_lse = in.d_lse;
      d_lse.shape = lse.shape;
      add(d_lse_, d_lse, DType::kFloat32, rows, 3, false);
      if (p.varlen) describe(d_lse_, dtype_of(DType::kFloat32), 2, 2);
    }
    add(dq_, in.q, p.dtype, c.layout, rank, true);
    add(dk_, in.k, p.dtype, c.layout, rank, true);
    add(dv_, in.v, p.dtype, c.layout, rank, true);
  }
  if (p.alibi) {
    HostTensor slopes(1, 1, c.slopes_per_batch ? p.batch : 1, p.heads_q);
    slopes.data = in.alibi_slopes;
    add(slopes_, slopes, DType::kFloat32, Layout::kCompact, 3, false);
    describe(slopes_, dtype_of(DType::kFloat32), c.slopes_per_batch ? 2 : 3, c.slopes_per_batch ? 2 : 1);
  }
  add(cu_q_, in.cu_seqlens_q, 1);
  add(cu_k_, in.cu_seqlens_k, 1);
  add(cache_lengths_, in.cache_seqlens, 1);
  add(page_table_, in.page_table, p.batch);
}

tessera_attention_op Buffers::op() const {
  switch (case_.problem.op) {
    case AttentionOp::kBackward:
      return TESSERA_ATTENTION_BACKWARD;
    case AttentionOp::kDecode:
      return TESSERA_ATTENTION_DECODE;
    case AttentionOp::kForward:
      break;
  }
  return TESSERA_ATTENTION_FORWARD;
}

tessera_attention Buffers::args() const {
  const AttentionProblem& p = case_.problem;
  tessera_attention a = TESSERA_ATTENTION_INIT;
  a.q = q_.view();
  a.k = k_.view();
  a.v = v_.view();
  a.out = o_.view();
  a.lse = lse_.view();
  a.dout = d_o_.view();
  a.dlse = d_lse_.view();
  a.dq = dq_.view();
  a.dk = dk_.view();
  a.dv = dv_.view();
  a.scale = p.scale;
  a.softcap = p.softcap;
  a.alibi_slopes = slopes_.view();
  if (p.causal) a.flags |= TESSERA_CAUSAL;
  if (p.deterministic) a.flags |= TESSERA_DETERMINISTIC;
  if (p.op != AttentionOp::kDecode) {
    a.alignment = p.alignment == Alignment::kBottomRight ? TESSERA_ALIGN_BOTTOM_RIGHT : TESSERA_ALIGN_TOP_LEFT;
  }
  a.window_left = p.window_left;
  a.window_right = p.window_right;
  a.cu_seqlens_q = cu_q_.view();
  a.cu_seqlens_k = cu_k_.view();
  a.max_seqlen_q = p.varlen ? p.seq_q : 0;
  a.max_seqlen_k = p.varlen ? p.seq_k : 0;
  a.cache_seqlens = cache_lengths_.view();
  a.page_table = page_table_.view();
  return a;
}

std::vector<Buffer*> Buffers::all() {
  std::vector<Buffer*> used;
  for (Buffer* b : {&q_, &k_, &v_, &o_, &lse_, &d_o_, &d_lse_, &dq_, &dk_, &dv_, &slopes_, &cu_q_, &cu_k_,
                    &cache_lengths_, &page_table_}) {
    if (b->used()) used.push_back(b);
  }
  return used;
}

void Buffers::poison() {
  for (Buffer* b : all()) {
    if (b->written) std::fill(b->storage.begin(), b->storage.end(), kPoison);
  }
}

oracle::Outputs Buffers::results(const oracle::Outputs& expected) const {
  const AttentionProblem& p = case_.problem;
  oracle::Outputs out = expected;
  const auto read = [&](const Buffer& b, HostTensor& to) {
    if (!b.used() || !b.written) return;
    const DType dtype = dtype_of(b.tensor.dtype);
    for_each_element(b, [&](std::size_t at, std::size_t byte) { to.data[at] = load(b.storage.data() + byte, dtype); });
  };
  read(o_, out.o);
  read(lse_, out.lse);
  read(dq_, out.dq);
  read(dk_, out.dk);
  read(dv_, out.dv);
  if (!p.varlen) return out;
  const auto restore = [](HostTensor& t, const HostTensor& from, std::int64_t first, std::int64_t rows, bool by_head) {
    if (t.empty()) return;
    for (std::int64_t row = first; row < rows; ++row) {
      for (std::int64_t h = 0; h < t.shape[by_head ? 1 : 2]; ++h) {
        for (std::int64_t d = 0; d < t.shape[3]; ++d) {
          if (by_head) {
            t.at(0, h, row, d) = from.at(0, h, row, d);
          } else {
            t.at(0, row, h, d) = from.at(0, row, h, d);
          }
        }
      }
    }
  };
  restore(out.o, expected.o, inputs_.cu_seqlens_q.back(), p.total_q, false);
  restore(out.lse, expected.lse, inputs_.cu_seqlens_q.back(), p.total_q, true);
  restore(out.dq, expected.dq, inputs_.cu_seqlens_q.back(), p.total_q, false);
  restore(out.dk, expected.dk, inputs_.cu_seqlens_k.back(), p.total_k, false);
  restore(out.dv, expected.dv, inputs_.cu_seqlens_k.back(), p.total_k, false);
  return out;
}

std::string Buffers::damage() const {
  const std::pair<const char*, const Buffer*> named[] = {
      {"out", &o_}, {"lse", &lse_}, {"dq", &dq_}, {"dk", &dk_}, {"dv", &dv_}};
  for (const auto& [name, b] : named) {
    if (!b->used() || !b->written) continue;
    std::vector<bool> element(b->storage.size(), false);
    const std::size_t size = b->tensor.dtype.bits / 8;
    for_each_element(*b, [&](std::size_t, std::size_t byte) {
      for (std::size_t n = 0; n < size; ++n) element[byte + n] = true;
    });
    for (std::size_t n = 0; n < element.size(); ++n) {
      if (!element[n] && b->storage[n] != kPoison) {
        return std::string(name) + " was written outside its elements, at byte " + std::to_string(n);
      }
    }
  }
  return {};
}

}  // namespace tessera::cases
