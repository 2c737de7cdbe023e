/* Attention: softmax(scale * Q K^T, masked) V, forward, backward and decode. */
#ifndef TESSERA_ATTENTION_H_
#define TESSERA_ATTENTION_H_

#include "tessera/tessera.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum tessera_attention_op {
  TESSERA_ATTENTION_FORWARD = 0,
  TESSERA_ATTENTION_BACKWARD = 1,
  TESSERA_ATTENTION_DECODE = 2 /* queries at the end of each sequence, against a KV cache */
} tessera_attention_op;

/* The position of query 0 on the keys' axis. Required if Sq != Sk and anything depends on position (causal, window,
 * chunks, ALiBi). Decode is always bottom-right. */
typedef enum tessera_alignment {
  TESSERA_ALIGN_UNSPECIFIED = 0,
  TESSERA_ALIGN_TOP_LEFT = 1,    /* query i is at key i */
  TESSERA_ALIGN_BOTTOM_RIGHT = 2 /* query i is at key i + Sk - Sq */
} tessera_alignment;

enum {
  TESSERA_CAUSAL = 1u << 0,             /* a query sees no key beyond its own position */
  TESSERA_DETERMINISTIC = 1u << 1,      /* backward: bitwise equal gradients from run to run */
  TESSERA_ROTARY_INTERLEAVED = 1u << 2, /* rotary pairs are columns 2i and 2i + 1; else i and i + R / 2 */
  TESSERA_BATCH_INVARIANT = 1u << 3,    /* decode: a sequence's result does not depend on the rest of the batch */
  TESSERA_FP8 =
      1u << 4, /* forward: q, k and v are first rounded to e4m3; a head, or a block of its rows, has one scale */
  TESSERA_FP8_ROTATE = 1u << 5,   /* and rows of q and k multiplied by a random-sign Hadamard matrix before that */
  TESSERA_FP8_RESIDUAL = 1u << 6, /* or what rounding takes from the 8 largest key channels of a head is kept */
  TESSERA_FP8_FAST = 1u << 7, /* forward of e4m3: sums of many keys may be truncated, 1 % at 1,024 keys and growing */
  TESSERA_SCALE_PER_PAGE = 1u << 8, /* decode with a cache of e4m3 in pages: each page of a head has a scale */
  TESSERA_SCALE_PER_TOKEN = 1u << 9 /* decode with a cache of e4m3: each key of a head has one; an append writes it */
};

/* All three ops take this. Set it up with TESSERA_ATTENTION_INIT, then the fields you need; a tensor that the op does
 * not use must stay NULL. B sequences; Hq a multiple of Hkv; dtype fp16, bf16 or (CPU) fp32, the same for all but lse,
 * dlse, slopes and scales (fp32) and lengths and tables (int32). The last dim of every tensor is contiguous. Forward also
 * takes q, k and v of e4m3, with their scales; out is then of any of the other types. Decode also takes a cache of e4m3: k
 * and v, with theirs. */
typedef struct tessera_attention {
  size_t struct_size;

  const tessera_tensor* q;   /* [B, Sq, Hq, Dqk]; varlen: [total_q, Hq, Dqk] */
  const tessera_tensor* k;   /* [B, Sk, Hkv, Dqk]; varlen: [total_k, Hkv, Dqk]; paged: [pages, page_size, Hkv, Dqk] */
  const tessera_tensor* v;   /* likewise, with Dv */
  const tessera_tensor* out; /* [B, Sq, Hq, Dv]; written by forward and decode, read by backward */
  const tessera_tensor* lse; /* float [B, Hq, Sq]; varlen: [Hq, total_q]; optional, but backward needs it */

  const tessera_tensor* dout; /* backward: read */
  const tessera_tensor* dlse; /* backward: read, optional; the gradient of lse */
  const tessera_tensor* dq;   /* backward: written */
  const tessera_tensor* dk;
  const tessera_tensor* dv;

  float scale;                        /* of the scores; 0: 1 / sqrt(Dqk) */
  float softcap;                      /* scores become softcap * tanh(score / softcap); 0: off */
  const tessera_tensor* alibi_slopes; /* float [Hq] or [B, Hq], optional: score -= slope * |position(i) - j| */
  uint32_t flags;                     /* TESSERA_CAUSAL | ... */
  tessera_alignment alignment;
  int64_t window_left;  /* keys visible left of the query's position, which is not counted; -1: all */
  int64_t window_right; /* likewise to the right */

  /* Variable length: int32 [B + 1], starting at 0, never decreasing, and ending at most at the rows of q or k. Forward
   * and backward take both or neither; decode takes cu_seqlens_q alone, not with k_new. max_seqlen bounds every length; 0: the CPU backend reads it from cu_seqlens,
   * on a GPU the rows of q or k are taken instead, which launches more CTAs than are needed. */
  const tessera_tensor* cu_seqlens_q;
  const tessera_tensor* cu_seqlens_k;
  int64_t max_seqlen_q;
  int64_t max_seqlen_k;

  /* Decode: int32 [B], keys in use per sequence, those of the queries included; NULL: the whole cache. With k_new: keys
   * in use before the append; required. */
  const tessera_tensor* cache_seqlens;
  const tessera_tensor* page_table; /* decode: int32 [B, max_pages_per_seq], optional; k and v are then paged */

  /* Decode, all optional. k_new and v_new are written to the cache, behind the keys in use, and are attended to. Rotary
   * embedding rotates the first R columns of k_new and q before anything else: new key i is at position p + i, query i
   * too if there is a mask (causal, a window, chunks) and else at p, with p = rotary_seqlens or cache_seqlens.
   * On a GPU lengths are known to the device alone. A sequence whose lengths or indices do not fit the cache (an append
   * to a full one) is refused there: its out is 0, its lse -inf, its cache is not touched and its status is 1. */
  const tessera_tensor* k_new;           /* [B, Sn, Hkv, Dqk] */
  const tessera_tensor* v_new;           /* [B, Sn, Hkv, Dv] */
  const tessera_tensor* rotary_cos;      /* of q's type, [positions, R / 2]; needs k_new */
  const tessera_tensor* rotary_sin;      /* likewise */
  const tessera_tensor* rotary_seqlens;  /* int32 [B] */
  const tessera_tensor* cache_batch_idx; /* int32 [B]: each sequence's row of k and v; NULL: b; not with page_table */
  const tessera_tensor* leftpad_k;       /* int32 [B]: keys at the start of each sequence that no query sees */
  const tessera_tensor* status;          /* int32 [B], written: 0, or 1 if the sequence was refused */

  /* Forward and decode: a query at position x sees only keys of its chunk, floor(x / attention_chunk); 0: no chunks. Not
   * with leftpad_k. */
  int64_t attention_chunk;

  /* Forward, required if q, k and v are e4m3: the factors that they were divided by, fp32 [B or 1, heads or 1, blocks],
   * positive. blocks: 1, or Sq or Sk (the longest sequence's: max_seqlen) over 64 or 128, rounded up; a block's rows are
   * counted from the start of each sequence. Not with attention_chunk. Decode, required if the cache is e4m3: k_scale and
   * v_scale, with one block. k_new and v_new are divided by them in fp32 and rounded, to at most 448, after rotary
   * embedding; they are attended to as the cache then has them.
   * TESSERA_SCALE_PER_PAGE: both are [pages, Hkv or 1, 1]. The caller sets a page's scale before the first key is appended to it.
   * TESSERA_SCALE_PER_TOKEN: both are [batch of k, Hkv, Sk], paged [pages, Hkv, page_size]. Those of new keys are written: the
   * least power of two that brings the key, or value, within e4m3's range, between 2^-60 and 2^60. Of keys that are not in
   * use, scales are not read. */
  const tessera_tensor* q_scale;
  const tessera_tensor* k_scale;
  const tessera_tensor* v_scale;
} tessera_attention;

#define TESSERA_ATTENTION_INIT                                                                                     \
  {                                                                                                                \
    sizeof(tessera_attention), NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 0.0f, 0.0f, NULL, 0u,   \
        TESSERA_ALIGN_UNSPECIFIED, -1, -1, NULL, NULL, 0, 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, \
        NULL, 0, NULL, NULL, NULL                                                                                  \
  }

/* Rounds an activation to e4m3 with scales that are powers of two, as forward takes it as q, k or v. Each scale is the
 * least that brings the largest value within e4m3's range of 448, between 2^-60 and 2^60. */
typedef struct tessera_quantize_fp8 {
  size_t struct_size;
  const tessera_tensor* x;     /* [B, S, H, D], or packed [total, H, D]; fp16, bf16 or (CPU) fp32 */
  const tessera_tensor* out;   /* of the same shape, written: e4m3, or x's type: the product of e4m3 and scale */
  const tessera_tensor* scale; /* fp32 [B or 1, H or 1, 1] or [B, H, blocks of 64 or 128 rows], contiguous, written */
  const tessera_tensor* cu_seqlens; /* int32 [B + 1], optional: x is packed */
  int64_t max_seqlen;               /* with cu_seqlens: bounds every length, and gives the number of blocks */
  uint32_t flags;                   /* TESSERA_FP8_ROTATE */
  uint32_t reserved;                /* 0 */
} tessera_quantize_fp8;

#define TESSERA_QUANTIZE_FP8_INIT \
  { sizeof(tessera_quantize_fp8), NULL, NULL, NULL, NULL, 0, 0u, 0u }

TESSERA_API tessera_status tessera_attention_quantize_fp8(const tessera_quantize_fp8* args, void* stream);

TESSERA_API tessera_status tessera_attention_plan_create(tessera_attention_op op, const tessera_attention* args,
                                                         tessera_plan** plan);

/* Runs the plan on tensors of the same shapes, types and options as it was made for. Data and strides may differ, but
 * on a GPU, rows that were planned as 16-byte aligned must stay so. workspace: tessera_plan_workspace bytes.
 * stream: a CUstream or cudaStream_t; the CPU ignores it, and returns when the result is complete. */
TESSERA_API tessera_status tessera_attention_plan_run(const tessera_plan* plan, const tessera_attention* args,
                                                      void* workspace, size_t workspace_bytes, void* stream);

/* Plan and run in one call. If workspace is NULL and workspace_bytes 0, the library allocates what it needs for the
 * duration of the call: on a GPU in the order of the stream (cuMemAllocAsync). tessera_attention_workspace says how much
 * that is. */
TESSERA_API tessera_status tessera_attention_run(tessera_attention_op op, const tessera_attention* args,
                                                 void* workspace, size_t workspace_bytes, void* stream);
TESSERA_API tessera_status tessera_attention_workspace(tessera_attention_op op, const tessera_attention* args,
                                                       size_t* bytes);

/* Which kernel would serve these arguments, and why the others would not. arch: "cpu", "sm_75" ... "sm_121" for a
 * device that need not be present, or NULL for the tensors' own. Data pointers are not read and may be NULL.
 * Writes at most capacity bytes, always terminated; *needed (optional) gets the full size, terminator included. */
TESSERA_API tessera_status tessera_attention_explain(tessera_attention_op op, const tessera_attention* args,
                                                     const char* arch, tessera_explain_format format, char* text,
                                                     size_t capacity, size_t* needed);

#ifdef __cplusplus
}
#endif

#endif /* TESSERA_ATTENTION_H_ */
