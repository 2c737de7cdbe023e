/* Losses with their gradients, in one pass. */
#ifndef TESSERA_LOSS_H_
#define TESSERA_LOSS_H_

#include "tessera/gemm.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum tessera_loss_op {
  TESSERA_LOSS_GMM_NLL = 0,              /* the negative log-likelihood of Gaussian mixtures */
  TESSERA_LOSS_LINEAR_CROSS_ENTROPY = 1, /* cross-entropy of a linear layer's logits, which are never all in memory */
  TESSERA_LOSS_MLP_GMM_NLL = 2           /* the likelihood of mixtures whose parameters are the result of an MLP */
} tessera_loss_op;

typedef enum tessera_reduction {
  TESSERA_REDUCTION_NONE = 0,
  TESSERA_REDUCTION_MEAN = 1, /* of at least one row */
  TESSERA_REDUCTION_SUM = 2
} tessera_reduction;

/* TESSERA_LOSS_GMM_NLL takes params, target, out and dparams. For each row, with K components of (logit, mu, log sigma):
 *
 *   z = (target - mu) / sigma,  a = logit - z^2 / 2 - log sigma
 *   loss = LSE(logit) - LSE(a) + log(2 pi) / 2
 *
 * that is, -log of the sum over k of softmax(logit)_k N(target; mu_k, sigma_k). dparams gets the gradient of each row's own
 * loss, whatever the reduction: with r = softmax(a), softmax(logit) - r, -r z / sigma and r (1 - z^2).
 *
 * Arithmetic is fp32. 1 / sigma is at most e^87 and |z| at most 2^60: beyond, loss and gradient are those of the limit.
 * A gradient beyond the largest finite number of its type is that number. So finite inputs give finite losses, and a mean
 * of them is finite. Sums over rows are in a fixed order.
 *
 * TESSERA_LOSS_LINEAR_CROSS_ENTROPY takes hidden, weight, target, out, dhidden, dweight and dout. For each row:
 *
 *   logits = hidden weight^T,  loss = LSE(logits) - logits[target]
 *
 * A target outside of 0 to V - 1 is ignored: its loss is 0, it has no gradient, and the mean is over the others (0 if there
 * are none). dhidden and dweight get the gradients of the sum of all losses, each times its dout, whatever the reduction: with
 * dlogits = (softmax(logits) - onehot(target)) dout, dlogits weight and dlogits^T hidden.
 *
 * Logits and dlogits are rounded to hidden's type; sums are fp32. Rows are processed in chunks, at most eight if dweight is
 * given, which is rounded once for each.
 *
 * TESSERA_LOSS_MLP_GMM_NLL takes x, up, down, activation, target, out and dparams: it is TESSERA_LOSS_GMM_NLL of
 *
 *   params = f(x up^T) down^T, row 3 k + i of down for value i of component k
 *
 * K MLPs with the same input, one per component, are one MLP whose down is block-diagonal. The parameters are rounded to x's
 * type, or fp32 where they stay in registers (docs/kernels/loss_mlp_gmm_nll_sm90.md). dparams, times the gradient of each row's loss, is the dout of a TESSERA_MLP_BACKWARD.
 *
 * Set it up with TESSERA_LOSS_INIT, then the fields you need. The last dim of every tensor is contiguous. */
typedef struct tessera_loss {
  size_t struct_size;

  const tessera_tensor* params;  /* [rows, K, 3], fp16, bf16 or fp32; K is at least 1 */
  const tessera_tensor* target;  /* [rows], of params' or x's type or fp32; of a linear layer's logits, int32 */
  const tessera_tensor* out;     /* fp32, written: [rows], or [1] if reduced */
  const tessera_tensor* dparams; /* [rows, K, 3], of params' or x's type, written, optional */

  tessera_reduction reduction;
  uint32_t flags; /* 0 */

  const tessera_tensor* hidden;  /* [rows, C], fp16, bf16 or, on the CPU, fp32 */
  const tessera_tensor* weight;  /* [V, C], of the same type; V is at least 1 */
  const tessera_tensor* dout;    /* [rows], fp32, optional: the gradient of each row's loss, else 1 */
  const tessera_tensor* dhidden; /* like hidden, written, optional */
  const tessera_tensor* dweight; /* like weight, written, optional */

  const tessera_tensor* x;       /* [rows, C], fp16, bf16 or, on the CPU, fp32 */
  const tessera_tensor* up;      /* [H, C], of the same type */
  const tessera_tensor* down;    /* [3 K, H], of the same type; K is at least 1 */
  tessera_activation activation; /* f; other ops ignore it */
  uint32_t reserved;             /* 0 */
} tessera_loss;

#define TESSERA_LOSS_INIT                                                                                         \
  {                                                                                                               \
    sizeof(tessera_loss), NULL, NULL, NULL, NULL, TESSERA_REDUCTION_MEAN, 0u, NULL, NULL, NULL, NULL, NULL, NULL, \
        NULL, NULL, TESSERA_ACTIVATION_SILU, 0u                                                                   \
  }

/* As for the functions of the same names in tessera/gemm.h. */
TESSERA_API tessera_status tessera_loss_plan_create(tessera_loss_op op, const tessera_loss* args, tessera_plan** plan);
TESSERA_API tessera_status tessera_loss_plan_run(const tessera_plan* plan, const tessera_loss* args, void* workspace,
                                                 size_t workspace_bytes, void* stream);
TESSERA_API tessera_status tessera_loss_run(tessera_loss_op op, const tessera_loss* args, void* workspace,
                                            size_t workspace_bytes, void* stream);
TESSERA_API tessera_status tessera_loss_workspace(tessera_loss_op op, const tessera_loss* args, size_t* bytes);
TESSERA_API tessera_status tessera_loss_explain(tessera_loss_op op, const tessera_loss* args, const char* arch,
                                                tessera_explain_format format, char* text, size_t capacity,
                                                size_t* needed);

#ifdef __cplusplus
}
#endif

#endif /* TESSERA_LOSS_H_ */
