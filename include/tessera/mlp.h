/* MLP: two linear layers with an activation, or a gated pair, between them. */
#ifndef TESSERA_MLP_H_
#define TESSERA_MLP_H_

#include "tessera/gemm.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
  /* Those of before, before_gate, hidden, dbefore and dbefore_gate that are written have rows that start at multiples of 16
   * bytes, and what is behind each row, up to the next multiple, may be overwritten: faster on Hopper if H is no multiple of
   * 8. */
  TESSERA_MLP_HIDDEN_PADDED = 1u << 0
};

typedef enum tessera_mlp_op { TESSERA_MLP_FORWARD = 0, TESSERA_MLP_BACKWARD = 1 } tessera_mlp_op;

/* With f the activation:
 *
 *   before = x up^T + up_bias           before_gate = x gate^T + gate_bias, if gate is given
 *   hidden = f(before), or before f(before_gate) if gate is given
 *   out    = hidden down^T + down_bias + residual
 *
 * What a backward needs of these is kept by the caller, or is computed again: without a gate before and hidden, with one
 * before and before_gate; both or neither. The forward writes them, and the backward reads them.
 *
 * The backward takes dout and writes the gradients that are given: dx, dup, dgate, ddown. dbefore and dbefore_gate are those
 * of before and before_gate; their sums over the rows are the gradients of the biases.
 *
 * Set it up with TESSERA_MLP_INIT, then the fields you need. All tensors have one dtype: fp16, bf16 or (CPU) fp32. Sums are
 * fp32. The last dim of every tensor is contiguous; rows may start at any element, but hidden rows at multiples of 16 bytes
 * are faster. */
typedef struct tessera_mlp {
  size_t struct_size;

  const tessera_tensor* x;    /* [M, K] */
  const tessera_tensor* up;   /* [H, K] */
  const tessera_tensor* down; /* [N, H] */
  const tessera_tensor* out;  /* [M, N], written: forward */
  const tessera_tensor* dout; /* [M, N]: backward */

  const tessera_tensor* gate;      /* [H, K], optional */
  const tessera_tensor* up_bias;   /* [H], optional */
  const tessera_tensor* gate_bias; /* [H], with gate and up_bias */
  const tessera_tensor* down_bias; /* [N], optional: forward */
  const tessera_tensor* residual;  /* [M, N], optional: forward */

  const tessera_tensor* before;      /* [M, H], optional: see above */
  const tessera_tensor* before_gate; /* [M, H], with before and gate */
  const tessera_tensor* hidden;      /* [M, H], with before, not with gate */

  const tessera_tensor* dx;           /* [M, K], written, optional, as are the following: backward */
  const tessera_tensor* dup;          /* [H, K] */
  const tessera_tensor* ddown;        /* [N, H] */
  const tessera_tensor* dgate;        /* [H, K], with gate */
  const tessera_tensor* dbefore;      /* [M, H] */
  const tessera_tensor* dbefore_gate; /* [M, H], with gate */

  tessera_activation activation;
  uint32_t flags; /* TESSERA_MLP_HIDDEN_PADDED */
} tessera_mlp;

#define TESSERA_MLP_INIT                                                                                           \
  {                                                                                                                \
    sizeof(tessera_mlp), NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, \
        NULL, NULL, NULL, NULL, TESSERA_ACTIVATION_SILU, 0u                                                        \
  }

TESSERA_API tessera_status tessera_mlp_plan_create(tessera_mlp_op op, const tessera_mlp* args, tessera_plan** plan);

/* Runs the plan on tensors of the same shapes, types and options as it was made for. Data and strides may differ, but
 * on a GPU, rows that were planned as 16-byte aligned must stay so. workspace: tessera_plan_workspace bytes.
 * stream: a CUstream or cudaStream_t; the CPU ignores it, and returns when the result is complete. */
TESSERA_API tessera_status tessera_mlp_plan_run(const tessera_plan* plan, const tessera_mlp* args, void* workspace,
                                                size_t workspace_bytes, void* stream);

/* Plan and run in one call; tessera_gemm_run says what a null workspace means. */
TESSERA_API tessera_status tessera_mlp_run(tessera_mlp_op op, const tessera_mlp* args, void* workspace,
                                           size_t workspace_bytes, void* stream);
TESSERA_API tessera_status tessera_mlp_workspace(tessera_mlp_op op, const tessera_mlp* args, size_t* bytes);

/* Which kernels would serve these arguments, and why; as tessera_gemm_explain. */
TESSERA_API tessera_status tessera_mlp_explain(tessera_mlp_op op, const tessera_mlp* args, const char* arch,
                                               tessera_explain_format format, char* text, size_t capacity,
                                               size_t* needed);

#ifdef __cplusplus
}
#endif

#endif /* TESSERA_MLP_H_ */
