#include "attention/check.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <optional>
#include <span>
#include <utility>

#include "attention/check_data.h"
#include "attention/check_options.h"
#include "attention/params.h"
#include "base/arguments.h"
#include "base/format.h"
#include "base/tensor.h"

namespace tessera::attention {
namespace {

constexpr unsigned on(tessera_attention_op op) { return 1u << op; }
constexpr unsigned kForward = on(TESSERA_ATTENTION_FORWARD);
constexpr unsigned kBackward = on(TESSERA_ATTENTION_BACKWARD);
constexpr unsigned kDecode = on(TESSERA_ATTENTION_DECODE);

AttentionOp op_of(tessera_attention_op op) {
  return op == TESSERA_ATTENTION_FORWARD    ? AttentionOp::kForward
         : op == TESSERA_ATTENTION_BACKWARD ? AttentionOp::kBackward
                                            : AttentionOp::kDecode;
}

// Lengths as the caller counts them: a dim's name, and the tensor that gave it, for messages.
Status must_match(const char* tensor, const char* dim, std::int64_t got, std::int64_t want, const char* giver) {
  if (got == want) return {};
  return invalid(format("{} has {} = {}, but {} gives {}", tensor, dim, got, giver, want));
}

class Checker {
 public:
  Checker(tessera_attention_op op, const tessera_attention& in, Look look, CheckedAttention& out)
      : op_(op), in_(in), look_(look), out_(out), problem_(out.args.problem) {}

  Status run() {
    problem_.op = op_of(op_);
    TESSERA_CHECK(check_presence());
    TESSERA_CHECK(check_device());
    TESSERA_CHECK(read_tensors());
    TESSERA_CHECK(check_dims());
    TESSERA_CHECK(check_options(in_, problem_));
    TESSERA_CHECK(check_lengths());
    TESSERA_CHECK(check_scales());
    TESSERA_CHECK(check_alignment());
    canonicalise_window();
    fill_views();
    return can_read_host_data() ? check_cache(out_.args) : Status();
  }

 private:
  struct Slot {
    const char* name;
    const tessera_tensor* tessera_attention::*given;
    unsigned used_by;    // ops that take it
    unsigned needed_by;  // ops that cannot do without
    unsigned written_by;
    Element element;
    std::optional<CheckedTensor> Checker::*checked;
  };

  static constexpr unsigned kAll = kForward | kBackward | kDecode;
  static constexpr unsigned kWriters = kForward | kDecode;
  static constexpr unsigned kNoCache = kForward | kBackward;
  static const std::array<Slot, 26> kSlots;

  Status check_presence() {
    for (const Slot& slot : kSlots) {
      const tessera_tensor* given = in_.*slot.given;
      if (given == nullptr && (slot.needed_by & on(op_)) != 0) {
        return invalid(format("{} is null; {} needs it", slot.name, name_of(problem_.op)));
      }
      if (given == nullptr) continue;
      if ((slot.used_by & on(op_)) == 0) {
        return invalid(format("{} is given, but {} does not take it", slot.name, name_of(problem_.op)));
      }
      given_[num_given_++] = &slot;
    }
    if (op_ != TESSERA_ATTENTION_DECODE && (in_.cu_seqlens_q == nullptr) != (in_.cu_seqlens_k == nullptr)) {
      return invalid(format("{} is null, but {} is given; packed sequences need both",
                            in_.cu_seqlens_q == nullptr ? "cu_seqlens_q" : "cu_seqlens_k",
                            in_.cu_seqlens_q == nullptr ? "cu_seqlens_k" : "cu_seqlens_q"));
    }
    TESSERA_CHECK(check_append_presence());
    problem_.varlen = in_.cu_seqlens_q != nullptr;
    problem_.paged = in_.page_table != nullptr;
    problem_.leftpad = in_.leftpad_k != nullptr;
    problem_.with_lse = in_.lse != nullptr;
    problem_.with_dlse = in_.dlse != nullptr;
    problem_.alibi = in_.alibi_slopes != nullptr;
    return {};
  }

  Status check_append_presence() const {
    const auto both = [](const char* a, const tessera_tensor* has_a, const char* b, const tessera_tensor* has_b) {
      if ((has_a == nullptr) == (has_b == nullptr)) return Status();
      return invalid(format("{} is null, but {} is given; both or neither is accepted", has_a == nullptr ? a : b,
                            has_a == nullptr ? b : a));
    };
    TESSERA_CHECK(both("k_new", in_.k_new, "v_new", in_.v_new));
    TESSERA_CHECK(both("rotary_cos", in_.rotary_cos, "rotary_sin", in_.rotary_sin));
    if (in_.k_new != nullptr && in_.cache_seqlens == nullptr) {
      return invalid("cache_seqlens is null, which means a full cache; k_new cannot be appended to it");
    }
    if (in_.k_new != nullptr && in_.cu_seqlens_q != nullptr) {
      return invalid("k_new and cu_seqlens_q are both given; keys are appended with queries of one length");
    }
    if (in_.rotary_cos != nullptr && in_.k_new == nullptr) {
      return invalid("rotary_cos is given, but k_new is null; rotary embedding is of new keys and their queries");
    }
    if (in_.rotary_seqlens != nullptr && in_.rotary_cos == nullptr) {
      return invalid("rotary_seqlens is given, but rotary_cos is null");
    }
    if (in_.cache_batch_idx != nullptr && in_.page_table != nullptr) {
      return invalid("cache_batch_idx and page_table are both given; a page table has a row for each sequence");
    }
    return {};
  }

  Status check_device() {
    out_.device = in_.q->device;
    TESSERA_CHECK(tessera::check_device("q", out_.device));
    for (const Slot* slot : std::span(given_).first(num_given_)) {
      TESSERA_CHECK(check_same_device(slot->name, (in_.*slot->given)->device, "q", out_.device));
    }
    return {};
  }

  Status read_tensors() {
    const int activation_rank = problem_.varlen ? 3 : 4;
    const int row_rank = problem_.varlen ? 2 : 3;
    for (const Slot* each : std::span(given_).first(num_given_)) {
      const Slot& slot = *each;
      const tessera_tensor* given = in_.*slot.given;
      const bool appended_to = in_.k_new != nullptr && (slot.checked == &Checker::k_ || slot.checked == &Checker::v_);
      const bool scales_written = is_scale(slot) && (in_.flags & TESSERA_SCALE_PER_TOKEN) != 0 && in_.k_new != nullptr;
      const bool written = (slot.written_by & on(op_)) != 0 || appended_to || scales_written;
      const Access access = written ? Access::kWrite : Access::kRead;
      const bool rows = slot.checked == &Checker::lse_ || slot.checked == &Checker::dlse_;
      int rank = activation_rank;
      if (op_ == TESSERA_ATTENTION_DECODE && slot.checked != &Checker::q_ && slot.checked != &Checker::out_tensor_) {
        rank = 4;  // a cache is not packed
      }
      if (rows) rank = row_rank;
      if (slot.checked == &Checker::rotary_cos_ || slot.checked == &Checker::rotary_sin_) rank = 2;
      if (slot.element == Element::kInt32) rank = slot.checked == &Checker::page_table_ ? 2 : 1;
      TensorRule rule{slot.name, slot.element, access, rank, rank};
      if (slot.checked == &Checker::alibi_) rule.min_rank = 1, rule.max_rank = 2;
      if (is_scale(slot)) rule.min_rank = rule.max_rank = 3;
      CheckedTensor& checked = (this->*slot.checked).emplace();
      TESSERA_CHECK(check_tensor(*given, rule, look_ == Look::kEverything, checked));
      const CheckedTensor& scaled = op_ == TESSERA_ATTENTION_DECODE ? *k_ : *q_;
      if (is_scale(slot) && !is_e4m3(scaled.dtype)) {
        return invalid(format("{} is given, but {} is {}; scales are for e4m3", slot.name,
                              op_ == TESSERA_ATTENTION_DECODE ? "k" : "q", describe(scaled.dtype)));
      }
      const bool activation = slot.element == Element::kFloating || slot.element == Element::kFloatingOrE4m3;
      const bool out_of_e4m3 = slot.checked == &Checker::out_tensor_ && is_e4m3(q_->dtype);
      if (activation && !out_of_e4m3 && !is_e4m3_cache(slot) &&
          (checked.dtype.code != q_->dtype.code || checked.dtype.bits != q_->dtype.bits)) {
        return invalid(format("{} is {}, but q is {}; they must be the same", slot.name, describe(checked.dtype),
                              describe(q_->dtype)));
      }
    }
    problem_.fp8 = is_e4m3(q_->dtype);
    problem_.fp8_cache = op_ == TESSERA_ATTENTION_DECODE && is_e4m3(k_->dtype);
    if (problem_.fp8 && op_ != TESSERA_ATTENTION_FORWARD) {
      return invalid(
          format("q is e4m3, which attention_forward takes; {} takes fp16, bf16 and fp32", name_of(problem_.op)));
    }
    if (is_e4m3(k_->dtype) != is_e4m3(v_->dtype)) {
      return invalid(format("v is {}, but k is {}; they must be the same", describe(v_->dtype), describe(k_->dtype)));
    }
    problem_.dtype = dtype_of(problem_.fp8 ? out_tensor_->dtype : q_->dtype);
    return {};
  }

  static bool is_scale(const Slot& slot) {
    return slot.checked == &Checker::q_scale_ || slot.checked == &Checker::k_scale_ ||
           slot.checked == &Checker::v_scale_;
  }

  // Decode reads a cache of e4m3 with queries of another type.
  bool is_e4m3_cache(const Slot& slot) const {
    return op_ == TESSERA_ATTENTION_DECODE && (slot.checked == &Checker::k_ || slot.checked == &Checker::v_) &&
           is_e4m3((this->*slot.checked)->dtype) && !is_e4m3(q_->dtype);
  }

  // Scales of each block of rows, head and sequence, or of all of them.
  Status check_scales() {
    AttentionProblem& p = problem_;
    if (p.chunk > 0 && (p.fp8 || p.rounds_to_fp8)) {
      return invalid(format("attention_chunk is {}, which is not taken with e4m3", p.chunk));
    }
    if (!p.fp8 && !p.fp8_cache) return {};
    struct Scales {
      const char* name;
      const std::optional<CheckedTensor>& tensor;
      std::int64_t heads, rows;
      std::int64_t& block;
    };
    for (const Scales& of : {Scales{"q_scale", q_scale_, p.heads_q, p.seq_q, p.q_scale_block},
                             Scales{"k_scale", k_scale_, p.heads_kv, p.seq_k, p.k_scale_block},
                             Scales{"v_scale", v_scale_, p.heads_kv, p.seq_k, p.v_scale_block}}) {
      if (p.fp8_cache && &of.tensor == &q_scale_) continue;
      if (!of.tensor) return invalid(format("{} is null; e4m3 needs it", of.name));
      const std::int64_t batch = of.tensor->shape[0], heads = of.tensor->shape[1], blocks = of.tensor->shape[2];
      if (has_key_scales(p)) {
        TESSERA_CHECK(check_key_scales(of.name, *of.tensor));
        continue;
      }
      if (batch != 1 && batch != p.batch) {
        return invalid(format("{} has batch = {}; 1 or {} is accepted", of.name, batch, p.batch));
      }
      if (heads != 1 && heads != of.heads) {
        return invalid(format("{} has heads = {}; 1 or {} is accepted", of.name, heads, of.heads));
      }
      if (p.fp8_cache) {
        if (blocks != 1) {
          return invalid(format("{} has {} blocks; decode takes 1, or TESSERA_SCALE_PER_TOKEN and one for each key",
                                of.name, blocks));
        }
        if (can_read_host_data()) TESSERA_CHECK(check_scale_values(of.name, *of.tensor));
        continue;
      }
      const std::int64_t by_64 = ceil_div(of.rows, std::int64_t{64}), by_128 = ceil_div(of.rows, std::int64_t{128});
      of.block = blocks == 1 ? 0 : blocks == by_64 ? 64 : blocks == by_128 ? 128 : -1;
      if (of.block < 0) {
        return invalid(format("{} has {} blocks; 1, {} of 64 rows or {} of 128 are accepted for {} rows", of.name,
                              blocks, by_64, by_128, of.rows));
      }
      if (can_read_host_data()) TESSERA_CHECK(check_scale_values(of.name, *of.tensor));
    }
    return {};
  }

  // Scales beside the keys of a cache. Their values are checked where the keys in use are known.
  Status check_key_scales(const char* name, const CheckedTensor& scales) const {
    const AttentionProblem& p = problem_;
    const bool per_page = p.cache_scales == CacheScales::kPerPage;
    if (!per_page || scales.shape[1] != 1) {
      TESSERA_CHECK(must_match(name, "heads", scales.shape[1], p.heads_kv, "k"));
    }
    TESSERA_CHECK(must_match(name, p.paged ? "pages" : "batch", scales.shape[0], k_->shape[0], "k"));
    return must_match(name, "keys", scales.shape[2], per_page ? 1 : k_->shape[1],
                      per_page ? "TESSERA_SCALE_PER_PAGE" : "k");
  }

  // What a GPU cannot check before it runs.
  static Status check_scale_values(const char* name, const CheckedTensor& t) {
    for (std::int64_t b = 0; b < t.shape[0]; ++b) {
      for (std::int64_t h = 0; h < t.shape[1]; ++h) {
        for (std::int64_t i = 0; i < t.shape[2]; ++i) {
          const float value = static_cast<const float*>(t.data)[b * t.strides[0] + h * t.strides[1] + i];
          if (std::isfinite(value) && value > 0) continue;
          return invalid(format("{}[{}, {}, {}] is {}; a finite number above 0 is accepted", name, b, h, i, value));
        }
      }
    }
    return {};
  }

  // Dims of an activation [B, S, H, D] or, packed, [total, H, D].
  struct Dims {
    std::int64_t batch, seq, heads, dim;
  };
  Dims dims(const CheckedTensor& t) const {
    if (t.rank == 3) return {0, t.shape[0], t.shape[1], t.shape[2]};
    return {t.shape[0], t.shape[1], t.shape[2], t.shape[3]};
  }

  Status match_activation(const char* name, const std::optional<CheckedTensor>& tensor, const Dims& want,
                          const char* giver) {
    if (!tensor) return {};
    const Dims got = dims(*tensor);
    const bool packed = tensor->rank == 3;
    if (!packed) TESSERA_CHECK(must_match(name, "batch", got.batch, want.batch, giver));
    TESSERA_CHECK(must_match(name, packed ? "rows" : "length", got.seq, want.seq, giver));
    TESSERA_CHECK(must_match(name, "heads", got.heads, want.heads, giver));
    return must_match(name, "head dim", got.dim, want.dim, giver);
  }

  Status check_dims() {
    const Dims q = dims(*q_);
    const Dims k = dims(*k_);
    const Dims v = dims(*v_);
    AttentionProblem& p = problem_;
    p.heads_q = q.heads;
    p.heads_kv = k.heads;
    p.dim_qk = q.dim;
    p.dim_v = v.dim;
    if (q.heads < 1) return invalid("q has 0 heads; at least 1 is accepted");
    if (k.heads < 1) return invalid("k has 0 heads; at least 1 is accepted");
    if (q.dim < 1) return invalid("q has head dim 0; at least 1 is accepted");
    if (v.dim < 1) return invalid("v has head dim 0; at least 1 is accepted");
    TESSERA_CHECK(must_match("k", "head dim", k.dim, q.dim, "q"));
    TESSERA_CHECK(match_activation("v", v_, {k.batch, k.seq, k.heads, v.dim}, "k"));
    if (q.heads % k.heads != 0) {
      return invalid(format("q has {} heads and k has {}; q's must be a multiple of k's", q.heads, k.heads));
    }

    if (p.varlen) {
      p.batch = cu_q_->shape[0] - 1;
      if (p.batch < 0) return invalid("cu_seqlens_q has 0 entries; one more than there are sequences is accepted");
      p.total_q = q.seq;
    } else {
      p.batch = q.batch;
      p.seq_q = q.seq;
    }
    if (cu_k_) {
      TESSERA_CHECK(must_match("cu_seqlens_k", "entries", cu_k_->shape[0], cu_q_->shape[0], "cu_seqlens_q"));
      p.total_k = k.seq;
    } else {
      p.seq_k = k.seq;
    }
    const char* const batch_giver = p.varlen ? "cu_seqlens_q" : "q's batch";
    if (p.paged) {
      TESSERA_CHECK(must_match("page_table", "rows", page_table_->shape[0], p.batch, batch_giver));
      p.num_pages = k.batch;
      p.page_size = k.seq;
      p.max_pages_per_seq = page_table_->shape[1];
      if (p.page_size < 1) return invalid("k has page size 0; at least 1 is accepted");
      if (__builtin_mul_overflow(p.max_pages_per_seq, p.page_size, &p.seq_k) || p.seq_k > kMostElements) {
        return invalid(format("page_table has {} pages of {} keys a sequence, more than any memory holds",
                              p.max_pages_per_seq, p.page_size));
      }
    } else if (!cu_k_) {
      if (!cache_batch_idx_) TESSERA_CHECK(must_match("k", "batch", k.batch, p.batch, p.varlen ? batch_giver : "q"));
      if (p.op == AttentionOp::kDecode) p.cache_rows = k.batch;
    }
    for (const auto& [name, tensor] : {std::pair{"cache_seqlens", &cache_seqlens_},
                                       {"rotary_seqlens", &rotary_seqlens_},
                                       {"cache_batch_idx", &cache_batch_idx_},
                                       {"leftpad_k", &leftpad_k_},
                                       {"status", &status_}}) {
      if (*tensor) TESSERA_CHECK(must_match(name, "entries", (*tensor)->shape[0], p.batch, batch_giver));
    }
    TESSERA_CHECK(check_append_dims(q.batch));

    const Dims out{q.batch, q.seq, q.heads, v.dim};
    TESSERA_CHECK(match_activation("out", out_tensor_, out, "q and v"));
    TESSERA_CHECK(match_activation("dout", dout_, out, "q and v"));
    TESSERA_CHECK(match_activation("dq", dq_, q, "q"));
    TESSERA_CHECK(match_activation("dk", dk_, k, "k"));
    TESSERA_CHECK(match_activation("dv", dv_, v, "v"));
    TESSERA_CHECK(match_rows("lse", lse_));
    TESSERA_CHECK(match_rows("dlse", dlse_));
    if (alibi_) {
      TESSERA_CHECK(must_match("alibi_slopes", "heads", alibi_->shape[alibi_->rank - 1], q.heads, "q"));
      if (alibi_->rank == 2) {
        TESSERA_CHECK(must_match("alibi_slopes", "batch", alibi_->shape[0], p.batch, p.varlen ? "cu_seqlens_q" : "q"));
      }
    }
    return {};
  }

  Status check_append_dims(std::int64_t batch) {
    AttentionProblem& p = problem_;
    if (!k_new_) return {};
    p.seq_new = dims(*k_new_).seq;
    if (p.seq_new < 1) return invalid("k_new has length 0; at least 1 is accepted, or null");
    if (p.seq_q < 1) return invalid("q has length 0; with k_new, at least 1 is accepted");
    TESSERA_CHECK(match_activation("k_new", k_new_, {batch, p.seq_new, p.heads_kv, p.dim_qk}, "q and k"));
    TESSERA_CHECK(match_activation("v_new", v_new_, {batch, p.seq_new, p.heads_kv, p.dim_v}, "k_new and v"));
    if (!rotary_cos_) return {};
    p.rotary_rows = rotary_cos_->shape[0];
    p.rotary_dim = 2 * rotary_cos_->shape[1];
    TESSERA_CHECK(must_match("rotary_sin", "positions", rotary_sin_->shape[0], p.rotary_rows, "rotary_cos"));
    TESSERA_CHECK(must_match("rotary_sin", "columns", rotary_sin_->shape[1], rotary_cos_->shape[1], "rotary_cos"));
    if (p.rotary_dim < 2 || p.rotary_dim > p.dim_qk) {
      return invalid(format("rotary_cos has {} columns, for {} of the {} columns of q; 2 to {} are accepted",
                            rotary_cos_->shape[1], p.rotary_dim, p.dim_qk, p.dim_qk));
    }
    return {};
  }

  Status match_rows(const char* name, const std::optional<CheckedTensor>& tensor) {
    if (!tensor) return {};
    const int heads_dim = problem_.varlen ? 0 : 1;
    if (!problem_.varlen) TESSERA_CHECK(must_match(name, "batch", tensor->shape[0], problem_.batch, "q"));
    TESSERA_CHECK(must_match(name, "heads", tensor->shape[heads_dim], problem_.heads_q, "q"));
    return must_match(name, "length", tensor->shape[heads_dim + 1], problem_.varlen ? problem_.total_q : problem_.seq_q,
                      "q");
  }

  bool can_read_host_data() const { return look_ == Look::kEverything && out_.device.type == TESSERA_CPU; }

  Status check_lengths() {
    if (problem_.varlen) {
      TESSERA_CHECK(check_cu_seqlens("cu_seqlens_q", *cu_q_, "q", problem_.total_q, "max_seqlen_q", in_.max_seqlen_q,
                                     &problem_.seq_q));
    }
    if (cu_k_) {
      return check_cu_seqlens("cu_seqlens_k", *cu_k_, "k", problem_.total_k, "max_seqlen_k", in_.max_seqlen_k,
                              &problem_.seq_k);
    }
    if ((in_.max_seqlen_q != 0 && !cu_q_) || in_.max_seqlen_k != 0) {
      return invalid(
          format("max_seqlen_q and max_seqlen_k are {} and {}; they are for packed sequences, with "
                 "cu_seqlens_q and cu_seqlens_k",
                 in_.max_seqlen_q, in_.max_seqlen_k));
    }
    return {};
  }

  Status check_cu_seqlens(const char* name, const CheckedTensor& tensor, const char* rows_of, std::int64_t rows,
                          const char* max_name, std::int64_t given_max, std::int64_t* max_length) {
    if (given_max < 0) return invalid(format("{} is {}; it must not be negative", max_name, given_max));
    *max_length = std::min(given_max, rows);  // no sequence is longer than all of them
    if (!can_read_host_data()) {
      if (given_max == 0) *max_length = rows;
      return {};
    }
    const auto* cu = static_cast<const std::int32_t*>(tensor.data);
    const auto longest = longest_sequence({name, rows_of, max_name}, cu, problem_.batch, rows, given_max);
    if (!longest.ok()) return longest.status();
    if (given_max == 0) *max_length = *longest;
    return {};
  }

  Status check_alignment() {
    AttentionProblem& p = problem_;
    switch (in_.alignment) {
      case TESSERA_ALIGN_UNSPECIFIED:
      case TESSERA_ALIGN_TOP_LEFT:
      case TESSERA_ALIGN_BOTTOM_RIGHT:
        break;
      default:
        return invalid(format("alignment is {}; TESSERA_ALIGN_TOP_LEFT and TESSERA_ALIGN_BOTTOM_RIGHT are known",
                              static_cast<int>(in_.alignment)));
    }
    if (p.op == AttentionOp::kDecode) {
      if (in_.alignment == TESSERA_ALIGN_TOP_LEFT) {
        return invalid("alignment is top-left; decode's queries are each sequence's last, which is bottom-right");
      }
      p.alignment = Alignment::kBottomRight;
      return {};
    }
    const bool by_position = is_masked(p) || p.alibi;
    if (by_position && in_.alignment == TESSERA_ALIGN_UNSPECIFIED && !lengths_agree()) {
      return invalid(
          format("alignment is unspecified, but {} needs one if queries and keys differ in number ({}): "
                 "top_left or bottom_right (TESSERA_ALIGN_TOP_LEFT, TESSERA_ALIGN_BOTTOM_RIGHT)",
                 p.causal      ? "causal"
                 : p.alibi     ? "alibi_slopes"
                 : p.chunk > 0 ? "attention_chunk"
                               : "a window",
                 p.varlen ? std::string("cu_seqlens_q and cu_seqlens_k are not the same")
                          : format("Sq = {}, Sk = {}", p.seq_q, p.seq_k)));
    }
    const bool bottom_right = by_position && in_.alignment == TESSERA_ALIGN_BOTTOM_RIGHT;
    p.alignment = bottom_right ? Alignment::kBottomRight : Alignment::kTopLeft;
    return {};
  }

  // Whether every sequence is known to have as many queries as keys. Without data, assumed to be so.
  bool lengths_agree() const {
    if (!problem_.varlen) return problem_.seq_q == problem_.seq_k;
    if (look_ == Look::kShapes || cu_q_->data == cu_k_->data) return true;
    if (!can_read_host_data()) return false;
    const auto* a = static_cast<const std::int32_t*>(cu_q_->data);
    const auto* b = static_cast<const std::int32_t*>(cu_k_->data);
    return std::equal(a, a + problem_.batch + 1, b);
  }

  // A bound that no key reaches is removed, and causal replaces a bound to the right: equal masks give equal Problems.
  // Packed lengths change between runs of a plan, so for those the total rows count.
  void canonicalise_window() {
    AttentionProblem& p = problem_;
    const std::int64_t q = p.varlen ? p.total_q : p.seq_q;
    const std::int64_t k = cu_k_ ? p.total_k : p.seq_k;
    std::int64_t span = 0;
    if (__builtin_add_overflow(q, k, &span)) span = std::max(q, k);
    if (p.window_left >= span) p.window_left = -1;
    if (p.window_right >= span || p.causal) p.window_right = -1;
  }

  TensorView view(const std::optional<CheckedTensor>& t) const {
    if (!t) return {};
    if (t->rank == 3) return {t->data, 0, t->strides[0], t->strides[1]};
    return {t->data, t->strides[0], t->strides[1], t->strides[2]};
  }

  RowView rows(const std::optional<CheckedTensor>& t) const {
    if (!t) return {};
    auto* data = static_cast<float*>(t->data);
    if (problem_.varlen) return {data, 0, t->strides[0]};
    return {data, t->strides[0], t->strides[1]};
  }

  static ScaleView scales(const std::optional<CheckedTensor>& t) {
    if (!t) return {};
    return {static_cast<float*>(t->data), t->strides[0], t->strides[1]};
  }

  static const std::int32_t* lengths(const std::optional<CheckedTensor>& t) {
    return t ? static_cast<const std::int32_t*>(t->data) : nullptr;
  }

  void fill_views() {
    AttentionArgs& a = out_.args;
    a.q = view(q_);
    a.k = view(k_);
    a.v = view(v_);
    a.o = view(out_tensor_);
    a.lse = rows(lse_);
    a.d_o = view(dout_);
    a.d_lse = rows(dlse_);
    a.dq = view(dq_);
    a.dk = view(dk_);
    a.dv = view(dv_);
    if (alibi_) {
      a.alibi_slopes = static_cast<const float*>(alibi_->data);
      a.alibi_batch_stride = alibi_->rank == 2 ? alibi_->strides[0] : 0;
    }
    a.cu_seqlens_q = lengths(cu_q_);
    a.cu_seqlens_k = lengths(cu_k_);
    a.cache_seqlens = lengths(cache_seqlens_);
    a.page_table = lengths(page_table_);
    if (page_table_) a.page_table_stride = page_table_->strides[0];
    a.k_new = view(k_new_);
    a.v_new = view(v_new_);
    if (rotary_cos_) {
      a.rotary_cos = rotary_cos_->data;
      a.rotary_sin = rotary_sin_->data;
      a.rotary_cos_stride = rotary_cos_->strides[0];
      a.rotary_sin_stride = rotary_sin_->strides[0];
    }
    a.rotary_seqlens = lengths(rotary_seqlens_);
    a.cache_batch_idx = lengths(cache_batch_idx_);
    a.leftpad_k = lengths(leftpad_k_);
    if (status_) a.status = static_cast<std::int32_t*>(status_->data);
    a.q_scale = scales(q_scale_);
    a.k_scale = scales(k_scale_);
    a.v_scale = scales(v_scale_);
    problem_.vectors = out_.device.type == TESSERA_CPU || rows_allow_vectors(a);
    problem_.tensor_maps = out_.device.type == TESSERA_CPU || (problem_.vectors && strides_allow_tensor_maps(a));
  }

  const tessera_attention_op op_;
  const tessera_attention& in_;
  const Look look_;
  CheckedAttention& out_;
  AttentionProblem& problem_;
  std::array<const Slot*, kSlots.size()> given_;
  std::size_t num_given_ = 0;
  std::optional<CheckedTensor> q_, k_, v_, out_tensor_, lse_, dout_, dlse_, dq_, dk_, dv_, alibi_, cu_q_, cu_k_,
      cache_seqlens_, page_table_, k_new_, v_new_, rotary_cos_, rotary_sin_, rotary_seqlens_, cache_batch_idx_,
      leftpad_k_, status_, q_scale_, k_scale_, v_scale_;
};

constexpr std::array<Checker::Slot, 26> Checker::kSlots = {{
    {"q", &tessera_attention::q, kAll, kAll, 0, Element::kFloatingOrE4m3, &Checker::q_},
    {"k", &tessera_attention::k, kAll, kAll, 0, Element::kFloatingOrE4m3, &Checker::k_},
    {"v", &tessera_attention::v, kAll, kAll, 0, Element::kFloatingOrE4m3, &Checker::v_},
    {"out", &tessera_attention::out, kAll, kAll, kWriters, Element::kFloating, &Checker::out_tensor_},
    {"lse", &tessera_attention::lse, kAll, kBackward, kWriters, Element::kFloat32, &Checker::lse_},
    {"dout", &tessera_attention::dout, kBackward, kBackward, 0, Element::kFloating, &Checker::dout_},
    {"dlse", &tessera_attention::dlse, kBackward, 0, 0, Element::kFloat32, &Checker::dlse_},
    {"dq", &tessera_attention::dq, kBackward, kBackward, kBackward, Element::kFloating, &Checker::dq_},
    {"dk", &tessera_attention::dk, kBackward, kBackward, kBackward, Element::kFloating, &Checker::dk_},
    {"dv", &tessera_attention::dv, kBackward, kBackward, kBackward, Element::kFloating, &Checker::dv_},
    {"alibi_slopes", &tessera_attention::alibi_slopes, kAll, 0, 0, Element::kFloat32, &Checker::alibi_},
    {"cu_seqlens_q", &tessera_attention::cu_seqlens_q, kAll, 0, 0, Element::kInt32, &Checker::cu_q_},
    {"cu_seqlens_k", &tessera_attention::cu_seqlens_k, kNoCache, 0, 0, Element::kInt32, &Checker::cu_k_},
    {"cache_seqlens", &tessera_attention::cache_seqlens, kDecode, 0, 0, Element::kInt32, &Checker::cache_seqlens_},
    {"page_table", &tessera_attention::page_table, kDecode, 0, 0, Element::kInt32, &Checker::page_table_},
    {"k_new", &tessera_attention::k_new, kDecode, 0, 0, Element::kFloating, &Checker::k_new_},
    {"v_new", &tessera_attention::v_new, kDecode, 0, 0, Element::kFloating, &Checker::v_new_},
    {"rotary_cos", &tessera_attention::rotary_cos, kDecode, 0, 0, Element::kFloating, &Checker::rotary_cos_},
    {"rotary_sin", &tessera_attention::rotary_sin, kDecode, 0, 0, Element::kFloating, &Checker::rotary_sin_},
    {"rotary_seqlens", &tessera_attention::rotary_seqlens, kDecode, 0, 0, Element::kInt32, &Checker::rotary_seqlens_},
    {"cache_batch_idx", &tessera_attention::cache_batch_idx, kDecode, 0, 0, Element::kInt32,
     &Checker::cache_batch_idx_},
    {"leftpad_k", &tessera_attention::leftpad_k, kDecode, 0, 0, Element::kInt32, &Checker::leftpad_k_},
    {"status", &tessera_attention::status, kDecode, 0, kDecode, Element::kInt32, &Checker::status_},
    {"q_scale", &tessera_attention::q_scale, kForward, 0, 0, Element::kFloat32, &Checker::q_scale_},
    {"k_scale", &tessera_attention::k_scale, kWriters, 0, 0, Element::kFloat32, &Checker::k_scale_},
    {"v_scale", &tessera_attention::v_scale, kWriters, 0, 0, Element::kFloat32, &Checker::v_scale_},
}};

Status check_into(tessera_attention_op op, const tessera_attention* args, Look look, CheckedAttention& out) {
  if (op != TESSERA_ATTENTION_FORWARD && op != TESSERA_ATTENTION_BACKWARD && op != TESSERA_ATTENTION_DECODE) {
    return invalid(
        format("op is {}; TESSERA_ATTENTION_FORWARD, _BACKWARD and _DECODE are known", static_cast<int>(op)));
  }
  if (args == nullptr) return invalid("args is null");
  if (args->struct_size == sizeof(tessera_attention)) return Checker(op, *args, look, out).run();
  tessera_attention known = TESSERA_ATTENTION_INIT;
  TESSERA_CHECK(read_arguments(args, offsetof(tessera_attention, lse), "TESSERA_ATTENTION_INIT", known));
  return Checker(op, known, look, out).run();
}

}  // namespace

Result<CheckedAttention> check(tessera_attention_op op, const tessera_attention* args, Look look) {
  Result<CheckedAttention> checked(std::in_place);
  if (Status s = check_into(op, args, look, *checked); !s.ok()) checked = std::move(s);
  return checked;
}

}  // namespace tessera::attention
