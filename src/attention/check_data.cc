#include "attention/check_data.h"

#include <algorithm>
#include <cmath>

#include "attention/params.h"
#include "base/arguments.h"
#include "base/arithmetic.h"
#include "base/format.h"

namespace tessera::attention {
namespace {

// Whether keys can be counted through all rows or pages of a cache, in 31 bits.
bool cache_extents_fit(const TensorView& view, std::int64_t batch, std::int64_t rows) {
  if (rows <= 1 || batch < 1) return false;
  const std::int64_t pitch = view.batch_stride / view.seq_stride;
  return batch == 1 || (view.batch_stride % view.seq_stride == 0 && saturating_product(batch, pitch) < kUnbounded);
}

// Of the keys that sequence b has, and of the pages that it appends to.
Status check_key_scales(const char* name, const ScaleView& scales, const AttentionArgs& a, std::int64_t b,
                        std::int64_t length) {
  const AttentionProblem& p = a.problem;
  const bool per_page = p.cache_scales == CacheScales::kPerPage;
  const std::int64_t end = per_page ? length + p.seq_new : length;
  for (std::int64_t key = a.leftpad_k != nullptr ? a.leftpad_k[b] : 0; key < end; ++key) {
    std::int64_t row = a.cache_batch_idx != nullptr ? a.cache_batch_idx[b] : b;
    if (p.paged) row = a.page_table[b * a.page_table_stride + key / p.page_size];
    const std::int64_t in_row = per_page ? 0 : p.paged ? key % p.page_size : key;
    for (std::int64_t h = 0; h < (scales.head_stride == 0 ? 1 : p.heads_kv); ++h) {
      const float value = scales.data[row * scales.batch_stride + h * scales.head_stride + in_row];
      if (std::isfinite(value) && value > 0) continue;
      return invalid(format("{}[{}, {}, {}] is {}; a finite number above 0 is accepted", name, row, h, in_row, value));
    }
    if (per_page) key = (key / p.page_size + 1) * p.page_size - 1;  // all keys of a page have the same
  }
  return {};
}

}  // namespace

Result<std::int64_t> longest_sequence(const PackedNames& names, const std::int32_t* cu, std::int64_t batch,
                                      std::int64_t rows, std::int64_t given_max) {
  if (cu[0] != 0) return invalid(format("{}[0] is {}; it must be 0", names.cu_seqlens, cu[0]));
  std::int64_t longest = 0;
  for (std::int64_t b = 0; b < batch; ++b) {
    if (cu[b + 1] < cu[b]) {
      return invalid(format("{}[{}] is {}, below {}[{}] = {}; it must never fall", names.cu_seqlens, b + 1, cu[b + 1],
                            names.cu_seqlens, b, cu[b]));
    }
    longest = std::max<std::int64_t>(longest, cu[b + 1] - cu[b]);
  }
  if (cu[batch] > rows) {
    return invalid(format("{} ends at {}, past the {} rows of {}", names.cu_seqlens, cu[batch], rows, names.tensor));
  }
  if (given_max != 0 && longest > given_max) {
    return invalid(
        format("{} is {}, but {} has a sequence of {}", names.max_seqlen, given_max, names.cu_seqlens, longest));
  }
  return longest;
}

Status check_cache(const AttentionArgs& a) {
  const AttentionProblem& p = a.problem;
  if (p.op != AttentionOp::kDecode) return {};
  const std::int64_t added = std::max(p.seq_new, p.seq_q);
  for (std::int64_t b = 0; b < p.batch; ++b) {
    const std::int64_t length = a.cache_seqlens != nullptr ? a.cache_seqlens[b] : p.seq_k;
    if (length < 0 || length > p.seq_k) {
      return invalid(format("cache_seqlens[{}] is {}; 0 to {}, what the cache holds, is accepted", b, length, p.seq_k));
    }
    if (a.cache_seqlens != nullptr && p.seq_new > p.seq_k - length) {
      return invalid(
          format("cache_seqlens[{}] is {} and k_new has {} more; the cache holds {}", b, length, p.seq_new, p.seq_k));
    }
    const std::int64_t position = a.rotary_seqlens != nullptr ? a.rotary_seqlens[b] : length;
    if (p.rotary_dim > 0 && (position < 0 || position > p.rotary_rows - added)) {
      return invalid(format("{}[{}] is {}, but rotary_cos has {} positions for it and the {} that follow",
                            a.rotary_seqlens != nullptr ? "rotary_seqlens" : "cache_seqlens", b, position,
                            p.rotary_rows, added - 1));
    }
    if (a.cache_batch_idx != nullptr && (a.cache_batch_idx[b] < 0 || a.cache_batch_idx[b] >= p.cache_rows)) {
      return invalid(
          format("cache_batch_idx[{}] is {}; 0 to {} is accepted", b, a.cache_batch_idx[b], p.cache_rows - 1));
    }
    if (a.leftpad_k != nullptr && a.leftpad_k[b] < 0) {
      return invalid(format("leftpad_k[{}] is {}; it must not be negative", b, a.leftpad_k[b]));
    }
    if (p.paged) {
      const std::int32_t* pages = a.page_table + b * a.page_table_stride;
      for (std::int64_t page = 0; page * p.page_size < length + p.seq_new; ++page) {
        if (pages[page] < 0 || pages[page] >= p.num_pages) {
          return invalid(
              format("page_table[{}, {}] is {}; 0 to {} is accepted", b, page, pages[page], p.num_pages - 1));
        }
      }
    }
    if (has_key_scales(p)) {
      TESSERA_CHECK(check_key_scales("k_scale", a.k_scale, a, b, length));
      TESSERA_CHECK(check_key_scales("v_scale", a.v_scale, a, b, length));
    }
  }
  return {};
}

bool rows_allow_vectors(const AttentionArgs& a) {
  // Strides that do not matter are 0 by now.
  constexpr std::int64_t kAny = 2, kBytes = 16;
  for (const TensorView* view : {&a.q, &a.k, &a.v, &a.o, &a.d_o, &a.dq, &a.dk, &a.dv, &a.k_new, &a.v_new}) {
    if (view->data == nullptr) continue;
    const bool cache = view == &a.k || view == &a.v;
    const bool e4m3 = a.problem.fp8 ? view != &a.o : a.problem.fp8_cache && cache;
    const std::int64_t element = e4m3 ? 1 : sizeof(std::uint16_t);
    if (!allows_vectors(*view, kAny, kAny, kAny, element, kBytes / element)) return false;
  }
  return true;
}

bool strides_allow_tensor_maps(const AttentionArgs& a) {
  constexpr std::int64_t kEnd = std::int64_t{1} << 39;  // elements: 2^40 bytes
  const auto fits = [](std::int64_t extent, std::int64_t stride) {
    return extent <= 1 || (stride > 0 && stride < kEnd);
  };
  const auto allows = [&](const TensorView& view, std::int64_t batch, std::int64_t rows, std::int64_t heads) {
    return fits(batch, view.batch_stride) && fits(rows, view.seq_stride) && fits(heads, view.head_stride);
  };
  const AttentionProblem& p = a.problem;
  const std::int64_t batch_q = p.varlen ? 1 : p.batch, rows_q = p.varlen ? p.total_q : p.seq_q;
  // Batch-invariant decode has maps of k and v alone, and a q that the batch shares must not change its kernel.
  if (!p.batch_invariant && !allows(a.q, batch_q, rows_q, p.heads_q)) return false;
  if (p.op == AttentionOp::kDecode) {
    const std::int64_t batch_k = p.paged ? p.num_pages : p.cache_rows, rows_k = p.paged ? p.page_size : p.seq_k;
    for (const TensorView* view : {&a.k, &a.v}) {
      if (!allows(*view, batch_k, rows_k, p.heads_kv) || !cache_extents_fit(*view, batch_k, rows_k)) return false;
    }
    return true;
  }
  const std::int64_t batch_k = p.varlen ? 1 : p.batch, rows_k = p.varlen ? p.total_k : p.seq_k;
  return allows(a.k, batch_k, rows_k, p.heads_kv) && allows(a.v, batch_k, rows_k, p.heads_kv) &&
         (p.op != AttentionOp::kBackward || allows(a.d_o, batch_q, rows_q, p.heads_q));
}

}  // namespace tessera::attention
