#include "verify/attention/buffers.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/format.h"

namespace tessera::cases {
namespace {

using verify::HostTensor;

// unit: elements of 8 columns of a 16-bit type.
void lay_out(Buffer& b, const HostTensor& values, Layout layout, std::int64_t unit = 8) {
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
      const std::int64_t head = n[3] + (layout == Layout::kPadded ? unit : 3);
      const std::int64_t row = n[2] * head + 2 * unit;
      b.strides = {n[1] * row + 3 * unit, row, head, 1};
      break;
    }
  }
}

void set(Buffer& b, const HostTensor& values, DType dtype, Layout layout, int rank, bool written) {
  lay_out(b, values, layout);
  b.fill(dtype, rank, values, written);
}

void set_e4m3(Buffer& b, const HostTensor& values, Layout layout, int rank) {
  lay_out(b, values, layout, 16);
  b.fill_e4m3(rank, values);
}

}  // namespace

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

  const int rank_k = p.op == AttentionOp::kDecode ? 4 : rank;
  if (p.fp8) {
    set_e4m3(q_, in.q_e4m3, c.layout, rank);
    set_e4m3(k_, in.k_e4m3, c.layout, rank);
    set_e4m3(v_, in.v_e4m3, c.layout, rank);
    set(q_scale_, in.q_scale, DType::kFloat32, Layout::kCompact, 3, false);
    set(k_scale_, in.k_scale, DType::kFloat32, Layout::kCompact, 3, false);
    set(v_scale_, in.v_scale, DType::kFloat32, Layout::kCompact, 3, false);
  } else if (p.rounds_to_fp8) {
    set(q_, in.q_given, p.dtype, c.layout, rank, false);
    set(k_, in.k_given, p.dtype, c.layout, rank, false);
    set(v_, in.v_given, p.dtype, c.layout, rank, false);
  } else {
    set(q_, in.q, p.dtype, c.layout, rank, false);
    if (p.fp8_cache) {
      set_e4m3(k_, in.k_e4m3, c.layout, rank_k);
      set_e4m3(v_, in.v_e4m3, c.layout, rank_k);
      set(k_scale_, in.k_scale, DType::kFloat32, Layout::kCompact, 3, false);
      set(v_scale_, in.v_scale, DType::kFloat32, Layout::kCompact, 3, false);
    } else {
      set(k_, in.k, p.dtype, c.layout, rank_k, false);
      set(v_, in.v, p.dtype, c.layout, rank_k, false);
    }
  }
  set(o_, o, p.dtype, c.layout, rank, !backward);
  if (backward || p.with_lse) {
    set(lse_, lse, DType::kFloat32, rows, 3, !backward);
    if (p.varlen) lse_.show(2, 2);
  }
  if (backward) {
    set(d_o_, in.d_o, p.dtype, c.layout, rank, false);
    if (p.with_dlse) {
      HostTensor d_lse = in.d_lse;
      d_lse.shape = lse.shape;
      set(d_lse_, d_lse, DType::kFloat32, rows, 3, false);
      if (p.varlen) d_lse_.show(2, 2);
    }
    set(dq_, in.q, p.dtype, c.layout, rank, true);
    set(dk_, in.k, p.dtype, c.layout, rank, true);
    set(dv_, in.v, p.dtype, c.layout, rank, true);
  }
  if (p.alibi) {
    HostTensor slopes(1, 1, c.slopes_per_batch ? p.batch : 1, p.heads_q);
    slopes.data = in.alibi_slopes;
    set(slopes_, slopes, DType::kFloat32, Layout::kCompact, 3, false);
    slopes_.show(c.slopes_per_batch ? 2 : 3, c.slopes_per_batch ? 2 : 1);
  }
  if (!in.cu_seqlens_q.empty()) cu_q_.fill(in.cu_seqlens_q, 1, 1);
  if (!in.cu_seqlens_k.empty()) cu_k_.fill(in.cu_seqlens_k, 1, 1);
  if (!in.cache_seqlens.empty()) cache_lengths_.fill(in.cache_seqlens, 1, 1);
  if (!in.page_table.empty()) page_table_.fill(in.page_table, p.batch, 2);
  if (p.op == AttentionOp::kDecode) set_append();
  fill_args();
}

void Buffers::set_append() {
  const AttentionProblem& p = case_.problem;
  const oracle::Inputs& in = inputs_;
  if (p.seq_new > 0) {
    set(k_new_, in.k_new, p.dtype, case_.layout, 4, false);
    set(v_new_, in.v_new, p.dtype, case_.layout, 4, false);
    k_.update_in_place();
    v_.update_in_place();
    if (p.cache_scales == CacheScales::kPerToken) {
      k_scale_.update_in_place();
      v_scale_.update_in_place();
    }
  }
  if (p.rotary_dim > 0) {
    const Layout rows = case_.layout == Layout::kHeadsMajor ? Layout::kCompact : case_.layout;
    set(rotary_cos_, in.rotary_cos, p.dtype, rows, 2, false);
    set(rotary_sin_, in.rotary_sin, p.dtype, rows, 2, false);
  }
  if (!in.rotary_seqlens.empty()) rotary_lengths_.fill(in.rotary_seqlens, 1, 1);
  if (!in.cache_batch_idx.empty()) cache_batch_idx_.fill(in.cache_batch_idx, 1, 1);
  if (!in.leftpad_k.empty()) leftpad_.fill(in.leftpad_k, 1, 1);
  if (case_.with_status) {
    status_.fill(std::vector<std::int32_t>(static_cast<std::size_t>(p.batch)), 1, 1);
    status_.written = true;
    status_.poison();
  }
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

void Buffers::fill_args() {
  const AttentionProblem& p = case_.problem;
  tessera_attention& a = args_;
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
  if (p.rotary_interleaved) a.flags |= TESSERA_ROTARY_INTERLEAVED;
  if (p.batch_invariant) a.flags |= TESSERA_BATCH_INVARIANT;
  if (p.rounds_to_fp8) a.flags |= TESSERA_FP8;
  if (p.rotates) a.flags |= TESSERA_FP8_ROTATE;
  if (p.residuals) a.flags |= TESSERA_FP8_RESIDUAL;
  if (p.fp8_fast) a.flags |= TESSERA_FP8_FAST;
  if (p.cache_scales == CacheScales::kPerPage) a.flags |= TESSERA_SCALE_PER_PAGE;
  if (p.cache_scales == CacheScales::kPerToken) a.flags |= TESSERA_SCALE_PER_TOKEN;
  if (p.op != AttentionOp::kDecode) {
    a.alignment = p.alignment == Alignment::kBottomRight ? TESSERA_ALIGN_BOTTOM_RIGHT : TESSERA_ALIGN_TOP_LEFT;
  }
  a.window_left = p.window_left;
  a.window_right = p.window_right;
  a.attention_chunk = p.chunk;
  a.cu_seqlens_q = cu_q_.view();
  a.cu_seqlens_k = cu_k_.view();
  a.max_seqlen_q = p.varlen ? p.seq_q : 0;
  a.max_seqlen_k = p.varlen && p.op != AttentionOp::kDecode ? p.seq_k : 0;
  a.cache_seqlens = cache_lengths_.view();
  a.page_table = page_table_.view();
  a.k_new = k_new_.view();
  a.v_new = v_new_.view();
  a.rotary_cos = rotary_cos_.view();
  a.rotary_sin = rotary_sin_.view();
  a.rotary_seqlens = rotary_lengths_.view();
  a.cache_batch_idx = cache_batch_idx_.view();
  a.leftpad_k = leftpad_.view();
  a.status = status_.view();
  a.q_scale = q_scale_.view();
  a.k_scale = k_scale_.view();
  a.v_scale = v_scale_.view();
}

std::vector<Buffer*> Buffers::buffers() {
  return verify::used_of({&q_,
                          &k_,
                          &v_,
                          &o_,
                          &lse_,
                          &d_o_,
                          &d_lse_,
                          &dq_,
                          &dk_,
                          &dv_,
                          &slopes_,
                          &cu_q_,
                          &cu_k_,
                          &cache_lengths_,
                          &page_table_,
                          &k_new_,
                          &v_new_,
                          &rotary_cos_,
                          &rotary_sin_,
                          &rotary_lengths_,
                          &cache_batch_idx_,
                          &leftpad_,
                          &status_,
                          &q_scale_,
                          &k_scale_,
                          &v_scale_});
}

tessera_status Buffers::plan(tessera_plan** plan) { return tessera_attention_plan_create(op(), &args_, plan); }

tessera_status Buffers::run(const tessera_plan* plan, void* workspace, std::size_t bytes, void* stream) {
  return tessera_attention_plan_run(plan, &args_, workspace, bytes, stream);
}

void Buffers::take_saved(const Buffers& forward) {
  o_.storage = forward.o_.storage;
  lse_.storage = forward.lse_.storage;
  o_.tensor.data = o_.storage.data();
  lse_.tensor.data = lse_.storage.data();
}

oracle::Outputs Buffers::results(const oracle::Outputs& expected) const {
  oracle::Outputs out = expected;
  const auto read = [&](const Buffer& b, HostTensor& to) {
    if (b.used() && b.written) b.read(to);
  };
  read(o_, out.o);
  read(lse_, out.lse);
  read(dq_, out.dq);
  read(dk_, out.dk);
  read(dv_, out.dv);
  if (!out.k.empty()) read(k_, out.k);
  if (!out.v.empty()) read(v_, out.v);
  excuse_unused_rows(out, expected);
  return out;
}

std::string Buffers::cache_damage(const oracle::Outputs& expected) const {
  const AttentionProblem& p = case_.problem;
  if (p.seq_new > 0) {
    for (const auto& [got, values] : {std::pair{&k_, &expected.k},
                                      {&v_, &expected.v},
                                      {&k_scale_, &expected.k_scale},
                                      {&v_scale_, &expected.v_scale}}) {
      if (values->empty()) continue;
      Buffer want(got->name);
      if (values == &expected.k_scale || values == &expected.v_scale) {
        set(want, *values, DType::kFloat32, Layout::kCompact, 3, false);
      } else if (p.fp8_cache) {
        set_e4m3(want, *values, case_.layout, 4);
      } else {
        set(want, *values, p.dtype, case_.layout, 4, false);
      }
      if (want.storage == got->storage) continue;
      HostTensor read = *values;
      got->read(read);
      for (std::size_t n = 0; n < read.data.size(); ++n) {
        const double x = read.data[n], y = values->data[n];
        if (x == y || (std::isnan(x) && std::isnan(y))) continue;
        const auto at = static_cast<std::int64_t>(n);
        const std::int64_t head = at / read.shape[3] % read.shape[2], row = at / read.shape[3] / read.shape[2];
        return format("{}: [{}, {}, {}, {}] of the cache is {} after the append and must be {}", got->name,
                      row / read.shape[1], row % read.shape[1], head, at % read.shape[3], x, y);
      }
      return format("{}: the cache after the append differs in bits that are no values", got->name);
    }
  }
  if (!status_.used()) return {};
  std::vector<std::int32_t> status(static_cast<std::size_t>(p.batch));
  std::memcpy(status.data(), status_.storage.data(), status_.storage.size());
  if (status == expected.status) return {};
  return format("status: [{}] must be [{}]", join(status, ", "), join(expected.status, ", "));
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
  if (inputs_.cu_seqlens_k.empty()) return;
  restore(out.dk, expected.dk, inputs_.cu_seqlens_k.back(), p.total_k, false);
  restore(out.dv, expected.dv, inputs_.cu_seqlens_k.back(), p.total_k, false);
}

}  // namespace tessera::cases
