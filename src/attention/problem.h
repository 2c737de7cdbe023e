// What is asked of attention, as plain values. check.cc checks the caller's tensors and fills these; every backend, the
// selector and `explain` read them and nothing else.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"

namespace tessera {

enum class AttentionOp : std::uint8_t { kForward, kBackward, kDecode };

constexpr const char* name_of(AttentionOp op) {
  return op == AttentionOp::kForward    ? "attention_forward"
         : op == AttentionOp::kBackward ? "attention_backward"
                                        : "attention_decode";
}

// The position of query 0 on the keys' axis if there are fewer or more queries than keys. Query i is at key position
// i + offset; causal, window and ALiBi all measure distance from there.
enum class Alignment : std::uint8_t {
  kTopLeft,      // offset = 0
  kBottomRight,  // offset = Sk - Sq, per sequence: the last query sees the last key
};

// What has a scale of its own in a cache of e4m3.
enum class CacheScales : std::uint8_t {
  kPerHead,   // a key head of a sequence, or of all
  kPerPage,   // and page
  kPerToken,  // and key
};

constexpr const char* name_of(CacheScales scales) {
  return scales == CacheScales::kPerHead ? "head" : scales == CacheScales::kPerPage ? "page" : "token";
}

struct AttentionProblem {
  AttentionOp op = AttentionOp::kForward;
  DType dtype = DType::kFloat32;  // of o if fp8, else of all activations
  bool fp8 = false;               // forward: q, k and v are e4m3, with scales
  bool fp8_cache = false;         // decode: k and v are, with scales
  CacheScales cache_scales = CacheScales::kPerHead;
  bool rounds_to_fp8 = false;      // forward: q, k and v are rounded to e4m3 first, with a scale for each head or less
  bool rotates = false;            // and q and k rotated before that
  bool residuals = false;          // or what rounding takes from their largest channels kept in more columns
  bool fp8_fast = false;           // forward of e4m3: sums of many keys may be truncated
  std::int64_t q_scale_block = 0;  // rows of a sequence that share a scale: 64, 128, or 0 for all
  std::int64_t k_scale_block = 0;
  std::int64_t v_scale_block = 0;

  std::int64_t batch = 0;  // sequences
  std::int64_t seq_q = 0;  // the longest sequence's, if lengths vary
  std::int64_t seq_k = 0;  // likewise; the cache's capacity for decode
  std::int64_t heads_q = 0;
  std::int64_t heads_kv = 0;
  std::int64_t dim_qk = 0;
  std::int64_t dim_v = 0;

  float scale = 0;  // finite, the default already resolved
  bool causal = false;
  Alignment alignment = Alignment::kTopLeft;
  std::int64_t window_left = -1;   // keys visible to the left of the query's position; -1: all
  std::int64_t window_right = -1;  // likewise to the right
  std::int64_t chunk = 0;          // a query sees keys of its own chunk only, each of so many positions; 0: all
  float softcap = 0;               // 0: none, else s -> softcap * tanh(s / softcap), before ALiBi
  bool alibi = false;              // s -> s - slope * |i + offset - j|

  bool varlen = false;       // packed: batch rows of q and k are slices given by cu_seqlens; decode: of q alone
  std::int64_t total_q = 0;  // rows of q, if varlen
  std::int64_t total_k = 0;  // likewise of k; not decode

  bool paged = false;  // decode: k and v are [pages, page_size, Hkv, D], found through a page table
  std::int64_t page_size = 0;
  std::int64_t num_pages = 0;
  std::int64_t max_pages_per_seq = 0;

  bool leftpad = false;          // decode: sequences may begin behind padding
  std::int64_t cache_rows = 0;   // decode, not paged: batch dim of k and v; not the batch if cache_batch_idx is given
  std::int64_t seq_new = 0;      // decode: keys appended to each sequence
  std::int64_t rotary_dim = 0;   // leading columns of q and the new keys that are rotated; 0: none
  std::int64_t rotary_rows = 0;  // positions that cos and sin have
  bool rotary_interleaved = false;  // pairs are columns 2i and 2i + 1, else i and i + rotary_dim / 2
  bool batch_invariant = false;     // decode: bitwise the same whatever else is in the batch

  bool with_lse = false;       // forward and decode: LSE is written
  bool with_dlse = false;      // backward: a gradient of LSE is given
  bool deterministic = false;  // backward: bitwise equal from run to run

  bool vectors = true;      // GPU: every row of every activation starts at a multiple of 16 bytes
  bool tensor_maps = true;  // GPU: and q's, k's, v's and dO's strides are positive, as TMA requires; a cache's rows or
                            // pages are a whole number of keys apart

  bool operator==(const AttentionProblem&) const = default;
};

// Scales lie beside the keys of the cache.
constexpr bool has_key_scales(const AttentionProblem& p) { return p.cache_scales != CacheScales::kPerHead; }

// [batch, seq, head, dim] with a contiguous last dim; strides count elements. batch_stride is 0 if varlen, and the
// stride of a page if paged.
struct TensorView {
  void* data = nullptr;
  std::int64_t batch_stride = 0;
  std::int64_t seq_stride = 0;
  std::int64_t head_stride = 0;
};

// float [batch, head, seq] with a contiguous last dim; [head, total_q] (batch_stride 0) if varlen.
struct RowView {
  float* data = nullptr;
  std::int64_t batch_stride = 0;
  std::int64_t head_stride = 0;
};

// float [batch, head, block]; a stride is 0 if all share a scale. Of a cache with scales per token or page: [row or page,
// head, key], with batch_stride between rows or pages.
struct ScaleView {
  float* data = nullptr;  // read, but scales per token are written by an append
  std::int64_t batch_stride = 0;
  std::int64_t head_stride = 0;
};

struct AttentionArgs {
  AttentionProblem problem;
  TensorView q, k, v;  // read
  TensorView o;        // written by forward and decode, read by backward
  RowView lse;         // natural log; written by forward and decode (may be null), read by backward

  ScaleView q_scale, k_scale, v_scale;  // if fp8; if fp8_cache, k's and v's

  TensorView d_o;         // backward: read
  RowView d_lse;          // backward: read, null if !with_dlse
  TensorView dq, dk, dv;  // backward: written

  const float* alibi_slopes = nullptr;  // [Hq], or [B, Hq]
  std::int64_t alibi_batch_stride = 0;  // 0 if shared by the batch

  const std::int32_t* cu_seqlens_q = nullptr;  // [B + 1], if varlen
  const std::int32_t* cu_seqlens_k = nullptr;
  const std::int32_t* cache_seqlens = nullptr;  // [B], decode: keys in use, before an append; null: all seq_k
  const std::int32_t* page_table = nullptr;     // [B, max_pages_per_seq], if paged
  std::int64_t page_table_stride = 0;

  TensorView k_new, v_new;           // decode: read, then written to k and v; null if !seq_new
  const void* rotary_cos = nullptr;  // [rotary_rows, rotary_dim / 2], of the problem's dtype
  const void* rotary_sin = nullptr;
  std::int64_t rotary_cos_stride = 0;
  std::int64_t rotary_sin_stride = 0;
  const std::int32_t* rotary_seqlens = nullptr;   // [B], position of the first new key; null: cache_seqlens
  const std::int32_t* cache_batch_idx = nullptr;  // [B], rows of k and v; null: b
  const std::int32_t* leftpad_k = nullptr;        // [B], keys at the start that are not seen
  std::int32_t* status = nullptr;                 // [B], written: 0, or 1 if the sequence was refused on the device
};

}  // namespace tessera
