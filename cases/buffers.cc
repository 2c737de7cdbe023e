#include "cases/buffers.h"

#include <algorithm>
#include <cstring>

#include "tests/oracle/parallel.h"

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

// Calls f(index in a compact tensor, byte offset in the storage) for every element, of large tensors from several
// threads.
template <class F>
void for_each_element(const Buffer& b, F f) {
  const auto size = static_cast<std::int64_t>(b.tensor.dtype.bits / 8);
  over_range(b.shape[0] * b.shape[1] * b.shape[2] * b.shape[3], [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t n = begin; n < end; ++n) {
      const std::int64_t z = n % b.shape[3], rest = n / b.shape[3];
      const std::int64_t y = rest % b.shape[2], x = rest / b.shape[2] % b.shape[1], w = rest / b.shape[2] / b.shape[1];
      const std::int64_t at = w * b.strides[0] + x * b.strides[1] + y * b.strides[2] + z * b.strides[3];
      f(static_cast<std::size_t>(n), static_cast<std::size_t>(at * size));
    }
  });
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

Bytes some_values_as(DType dtype) {
  const std::vector<double> values = some_values(1048573);
  Bytes block(values.size() * size_of(dtype));
  for (std::size_t n = 0; n < values.size(); ++n) store(block.data() + n * size_of(dtype), dtype, values[n]);
  return block;
}

// A block whose length is prime, over and over, so that no two rows are the same in step. Made once for each type:
// rounding takes longer than all else that is done for a benchmark's inputs.
void repeat_values(Bytes& storage, DType dtype) {
  static const Bytes fp32 = some_values_as(DType::kFloat32), fp16 = some_values_as(DType::kFloat16),
                     bf16 = some_values_as(DType::kBFloat16);
  const Bytes& block = dtype == DType::kFloat32 ? fp32 : dtype == DType::kFloat16 ? fp16 : bf16;
  over_range(static_cast<std::int64_t>(storage.size()), [&](std::int64_t begin, std::int64_t end) {
    for (auto at = static_cast<std::size_t>(begin); at < static_cast<std::size_t>(end);) {
      const std::size_t from = at % block.size();
      const std::size_t count = std::min(block.size() - from, static_cast<std::size_t>(end) - at);
      std::memcpy(storage.data() + at, block.data() + from, count);
      at += count;
    }
  });
}

void fill_with_poison(Bytes& storage) {
  over_range(static_cast<std::int64_t>(storage.size()), [&](std::int64_t begin, std::int64_t end) {
    std::memset(storage.data() + begin, static_cast<int>(kPoison), static_cast<std::size_t>(end - begin));
  });
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
    case Layout::kPadded:
    case Layout::kUnaligned: {
      const std::int64_t head = n[3] + (layout == Layout::kPadded ? 8 : 3);
      const std::int64_t row = n[2] * head + 16;
      b.strides = {n[1] * row + 24, row, head, 1};
      break;
    }
  }
  const std::size_t elements =
      static_cast<std::size_t>(n[0] * n[1] * n[2] * n[3]) == 0 ? 0 : static_cast<std::size_t>(n[0] * b.strides[0] + 64);
  b.storage.resize(std::max<std::size_t>(elements, 1) * size_of(dtype));
  describe(b, dtype_of(dtype), rank == 4 ? 0 : 1, rank);
  b.written = written;
  if (!written && values.empty() && elements > 0) return repeat_values(b.storage, dtype);
  fill_with_poison(b.storage);
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
  HostTensor o, lse;
  if (saved != nullptr) {
    o = saved->o;
    lse = saved->lse;
  } else {
    o.shape = {in.q.shape[0], in.q.shape[1], p.heads_q, p.dim_v};
    lse.shape = {in.q.shape[0], p.heads_q, in.q.shape[1], 1};
  }
  lse.shape = {1, lse.shape[0], lse.shape[1], lse.shape[2]};  // as [B, H, S]
  const Layout rows = c.layout == Layout::kHeadsMajor ? Layout::kCompact : c.layout;

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

void Buffers::take_saved(const Buffers& forward) {
  o_.storage = forward.o_.storage;
  lse_.storage = forward.lse_.storage;
  o_.tensor.data = o_.storage.data();
  lse_.tensor.data = lse_.storage.data();
}

void Buffers::poison() {
  for (Buffer* b : all()) {
    if (b->written) fill_with_poison(b->storage);
  }
}

oracle::Outputs Buffers::results(const oracle::Outputs& expected) const {
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
  excuse_unused_rows(out, expected);
  return out;
}

void Buffers::excuse_unused_rows(oracle::Outputs& out, const oracle::Outputs& expected) const {
  const AttentionProblem& p = case_.problem;
  if (!p.varlen) return;
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
}

std::string Buffers::damage() const {
  const std::pair<const char*, const Buffer*> named[] = {
      {"out", &o_}, {"lse", &lse_}, {"dq", &dq_}, {"dk", &dk_}, {"dv", &dv_}};
  for (const auto& [name, b] : named) {
    if (!b->used() || !b->written) continue;
    std::vector<char> element(b->storage.size(), 0);
    const std::size_t size = b->tensor.dtype.bits / 8;
    for_each_element(*b, [&](std::size_t, std::size_t byte) { std::memset(element.data() + byte, 1, size); });
    for (std::size_t n = 0; n < element.size(); ++n) {
      if (element[n] == 0 && b->storage[n] != kPoison) {
        return std::string(name) + " was written outside its elements, at byte " + std::to_string(n);
      }
    }
  }
  return {};
}

}  // namespace tessera::cases
