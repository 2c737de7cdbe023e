/* RMSNorm and LayerNorm with a residual, forward and backward, and rotary position embedding. */
#ifndef TESSERA_NORM_H_
#define TESSERA_NORM_H_

#include "tessera/tessera.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum tessera_norm_op {
  TESSERA_NORM_FORWARD = 0,
  TESSERA_NORM_BACKWARD = 1,
  TESSERA_NORM_ROTARY = 2 /* rotary embedding; its backward is the same with TESSERA_NORM_INVERSE */
} tessera_norm_op;

enum {
  TESSERA_NORM_CENTERED = 1u << 0,    /* forward, backward: LayerNorm; else RMSNorm */
  TESSERA_NORM_INTERLEAVED = 1u << 1, /* rotary: pairs are dims 2 i and 2 i + 1; else i and i + R / 2 */
  TESSERA_NORM_INVERSE = 1u << 2      /* rotary: by the negative angle */
};

/* Forward, for each row:
 *
 *   h = x + residual, rounded to its type             written to sum; without a residual, h = x
 *   mean = the mean of h (LayerNorm) or 0 (RMSNorm)
 *   rstd = 1 / sqrt(the mean of (h - mean)^2 + eps)
 *   out = (h - mean) rstd weight + bias
 *
 * Backward, with x the h of the forward, n = (x - mean) rstd and g = dout weight:
 *
 *   dx = rstd (g - n mean(g n) - mean(g)) + dsum      the gradient of x and of residual; RMSNorm: without mean(g)
 *   dweight = sum of dout n, dbias = sum of dout      over the rows, in a fixed order
 *
 * Rotary, for each token at position t and each head, with c = cos[t, i] and s = sin[t, i]:
 *
 *   (out_a, out_b) = (x_a c - x_b s, x_b c + x_a s)   for the R / 2 pairs (a, b); dims from R on are copied
 *
 * Set it up with TESSERA_NORM_INIT, then the fields you need. All tensors have x's type (fp16, bf16 or fp32) if nothing
 * else is said; arithmetic is fp32. The last dim of every tensor is contiguous. A tensor that is written overlaps no
 * other, except that out may be x itself (rotary). */
typedef struct tessera_norm {
  size_t struct_size;

  const tessera_tensor* x;      /* [rows, N]; rotary: [B, S, H, D] */
  const tessera_tensor* out;    /* forward, rotary: like x, written */
  const tessera_tensor* weight; /* forward, backward: [N], optional; without it, ones */
  const tessera_tensor* bias;   /* forward of LayerNorm: [N], optional */

  const tessera_tensor* residual; /* forward: like x, optional; with sum */
  const tessera_tensor* sum;      /* forward: like x, written; with residual */
  const tessera_tensor* rstd;     /* fp32 [rows]. forward: written, optional; backward: read */
  const tessera_tensor* mean;     /* fp32 [rows], of LayerNorm, with rstd */

  const tessera_tensor* dout;    /* backward: like x */
  const tessera_tensor* dsum;    /* backward: like x, optional: the gradient that reaches sum by other ways */
  const tessera_tensor* dx;      /* backward: like x, written */
  const tessera_tensor* dweight; /* backward: [N], written, optional */
  const tessera_tensor* dbias;   /* backward of LayerNorm: [N], written, optional */

  const tessera_tensor* cos;       /* rotary: [T, R / 2], of x's type or fp32; R is at most D */
  const tessera_tensor* sin;       /* rotary: like cos, of the same type */
  const tessera_tensor* positions; /* rotary: int32 [S] or [B, S], optional; without it, token s is at position s. A
                                    * position outside of the tables gives NaN. */

  float eps; /* forward: not negative */
  uint32_t flags;
} tessera_norm;

#define TESSERA_NORM_INIT                                                                                           \
  {                                                                                                                 \
    sizeof(tessera_norm), NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, \
        NULL, 1e-5f, 0u                                                                                             \
  }

/* As for the functions of the same names in tessera/gemm.h. */
TESSERA_API tessera_status tessera_norm_plan_create(tessera_norm_op op, const tessera_norm* args, tessera_plan** plan);
TESSERA_API tessera_status tessera_norm_plan_run(const tessera_plan* plan, const tessera_norm* args, void* workspace,
                                                 size_t workspace_bytes, void* stream);
TESSERA_API tessera_status tessera_norm_run(tessera_norm_op op, const tessera_norm* args, void* workspace,
                                            size_t workspace_bytes, void* stream);
TESSERA_API tessera_status tessera_norm_workspace(tessera_norm_op op, const tessera_norm* args, size_t* bytes);
TESSERA_API tessera_status tessera_norm_explain(tessera_norm_op op, const tessera_norm* args, const char* arch,
                                                tessera_explain_format format, char* text, size_t capacity,
                                                size_t* needed);

#ifdef __cplusplus
}
#endif

#endif /* TESSERA_NORM_H_ */
