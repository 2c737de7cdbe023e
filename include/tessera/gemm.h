/* GEMM: matrix products with fused epilogues. */
#ifndef TESSERA_GEMM_H_
#define TESSERA_GEMM_H_

#include "tessera/tessera.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum tessera_gemm_op {
  TESSERA_GEMM_DENSE = 0,  /* one product */
  TESSERA_GEMM_GROUPED = 1 /* one product per group */
} tessera_gemm_op;

typedef enum tessera_activation {
  TESSERA_ACTIVATION_NONE = 0,
  TESSERA_ACTIVATION_RELU = 1,
  TESSERA_ACTIVATION_SILU = 2,
  TESSERA_ACTIVATION_GELU_TANH = 3,
  TESSERA_ACTIVATION_GELU_ERF = 4
} tessera_activation;

enum {
  TESSERA_GEMM_A_TRANSPOSED = 1u << 0, /* a is [K, M] */
  TESSERA_GEMM_B_TRANSPOSED = 1u << 1, /* b and gate are [K, N] */

  /* The padding after each row of out and preactivation, up to the next multiple of 16 bytes, may be overwritten, that after
   * the last row included. Rows must start at multiples of 16 bytes, and out has two dims. */
  TESSERA_GEMM_OUT_PADDED = 1u << 2
};

/* With f the activation:
 *
 *   x = A B + bias                                       written to preactivation, if given
 *   y = f(x), or x f'(saved) if saved is given, or x f(A G + gate_bias) if gate is given
 *   out = y + residual
 *
 * Set it up with TESSERA_GEMM_INIT, then the fields you need. a, b, gate, bias, gate_bias, saved and preactivation have
 * one dtype: fp16, bf16 or (CPU) fp32; out and residual have that one or fp32. Sums are fp32. The last dim of every
 * tensor is contiguous. */
typedef struct tessera_gemm {
  size_t struct_size;

  const tessera_tensor* a;   /* [M, K] */
  const tessera_tensor* b;   /* [N, K], as the weight of a linear layer is stored */
  const tessera_tensor* out; /* [M, N], written */

  const tessera_tensor* bias;          /* [N], optional */
  const tessera_tensor* gate;          /* like b, optional: SwiGLU, GEGLU, ReGLU; not with saved or preactivation */
  const tessera_tensor* gate_bias;     /* [N], with gate and bias */
  const tessera_tensor* saved;         /* [M, N], optional: the preactivation of a forward */
  const tessera_tensor* preactivation; /* [M, N], written, optional; not with saved */
  const tessera_tensor* residual;      /* [M, N], optional; may be out itself, which is then added to */

  tessera_activation activation;
  uint32_t flags; /* TESSERA_GEMM_A_TRANSPOSED, ... */

  const tessera_tensor* offsets; /* int32 [G + 1], on the tensors' device, TESSERA_GEMM_GROUPED only: see below */
} tessera_gemm;

/* TESSERA_GEMM_GROUPED: G products, each with its own b, and the epilogue of each. bias and gate_bias are [G, N]. Tensors
 * that have a matrix per group begin with that dim. Which dims are the groups' follows from what is given:
 *
 *   offsets, b [G, N, K]   Group g has rows offsets[g] to offsets[g + 1] of a [M, K], out [M, N] and all that is like out.
 *                          Rows from offsets[G] on are not written. a is not transposed.
 *   offsets, b [K, N]      Group g has rows offsets[g] to offsets[g + 1] of a [K, M] and b, and out is [G, M, N]: gradients
 *                          of weights. a and b are transposed.
 *   no offsets             a is [G, M, K], or [M, K] if all groups share it; b [G, N, K]; out [G, M, N].
 *
 * offsets[0] is 0 and entries do not decrease; groups may be empty. On a GPU, offsets are read by the device alone; an
 * entry that breaks the rule selects other rows, but none outside of the tensors. */

#define TESSERA_GEMM_INIT \
  { sizeof(tessera_gemm), NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, TESSERA_ACTIVATION_NONE, 0u, NULL }

TESSERA_API tessera_status tessera_gemm_plan_create(tessera_gemm_op op, const tessera_gemm* args, tessera_plan** plan);

/* Runs the plan on tensors of the same shapes, types and options as it was made for. Data and strides may differ, but
 * on a GPU, rows that were planned as 16-byte aligned must stay so. workspace: tessera_plan_workspace bytes.
 * stream: a CUstream or cudaStream_t; the CPU ignores it, and returns when the result is complete. */
TESSERA_API tessera_status tessera_gemm_plan_run(const tessera_plan* plan, const tessera_gemm* args, void* workspace,
                                                 size_t workspace_bytes, void* stream);

/* Plan and run in one call. If workspace is NULL and workspace_bytes 0, the library allocates what it needs for the
 * duration of the call: on a GPU in the order of the stream (cuMemAllocAsync). tessera_gemm_workspace says how much that
 * is. */
TESSERA_API tessera_status tessera_gemm_run(tessera_gemm_op op, const tessera_gemm* args, void* workspace,
                                            size_t workspace_bytes, void* stream);
TESSERA_API tessera_status tessera_gemm_workspace(tessera_gemm_op op, const tessera_gemm* args, size_t* bytes);

/* Which kernel would serve these arguments, and why the others would not. arch: "cpu", "sm_75" ... "sm_121" for a
 * device that need not be present, or NULL for the tensors' own. Data pointers are not read and may be NULL.
 * Writes at most capacity bytes, always terminated; *needed (optional) gets the full size, terminator included. */
TESSERA_API tessera_status tessera_gemm_explain(tessera_gemm_op op, const tessera_gemm* args, const char* arch,
                                                tessera_explain_format format, char* text, size_t capacity,
                                                size_t* needed);

#ifdef __cplusplus
}
#endif

#endif /* TESSERA_GEMM_H_ */
