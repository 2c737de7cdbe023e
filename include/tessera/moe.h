/* Mixture of experts: a router and an MLP per expert, without limits on how many tokens an expert takes. */
#ifndef TESSERA_MOE_H_
#define TESSERA_MOE_H_

#include "tessera/gemm.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum tessera_moe_op { TESSERA_MOE_FORWARD = 0, TESSERA_MOE_BACKWARD = 1 } tessera_moe_op;

typedef enum tessera_moe_scoring { TESSERA_MOE_SOFTMAX = 0, TESSERA_MOE_SIGMOID = 1 } tessera_moe_scoring;

enum {
  TESSERA_MOE_NORMALIZE = 1u << 0 /* a token's weights are divided by their sum */
};

/* For each token, with score = softmax(logits) or sigmoid(logits):
 *
 *   experts  the top_k experts with the largest logits, the largest first; among equal ones, the lowest expert. NaN counts
 *            as the smallest.
 *   weights  their scores, divided by the sum of the top_k if TESSERA_MOE_NORMALIZE is set
 *   out      the sum over j of weights[j] MLP_experts[j](x), in this order
 *   MLP_e    f(x up_e^T) down_e^T, or (x up_e^T f(x gate_e^T)) down_e^T if gate is given
 *
 * Without logits, experts and weights are the caller's; an expert below 0 or from E on is skipped.
 *
 * Pairs of a token and an expert are sorted by expert, tokens in order: positions has the row of each pair in that order, -1
 * if it is skipped, and expert e has rows offsets[e] to offsets[e + 1]. before and before_gate are x up^T and x gate^T in that
 * order, and x_rows is x; rows from offsets[E] on are not written.
 *
 * balance_loss is E times the sum over experts of (pairs of e / M) (mean over tokens of score_e / sum of the token's scores).
 * It is top_k if all experts have the same share, and more if not; 0 if there are no tokens.
 *
 * The backward takes what the forward has written, dout, and dbalance_loss if the loss was used, and writes the gradients
 * that are given. What of before, before_gate and x_rows was not kept is made again. dx is the gradient through the experts
 * alone: that through logits is the caller's, who made them.
 *
 * Set it up with TESSERA_MOE_INIT, then the fields you need. x, up, down, gate, out, before and their gradients have one
 * dtype: fp16, bf16 or (CPU) fp32; logits that one or fp32, and dlogits that of logits. Sums and scores are fp32. The last dim
 * of every tensor is contiguous; experts, weights and positions are compact. On a GPU, E is at most 512 and top_k at most 32. */
typedef struct tessera_moe {
  size_t struct_size;

  const tessera_tensor* x;      /* [M, K] */
  const tessera_tensor* logits; /* [M, E], optional: see above */
  const tessera_tensor* up;     /* [E, H, K] */
  const tessera_tensor* down;   /* [E, K, H] */
  const tessera_tensor* gate;   /* [E, H, K], optional */
  const tessera_tensor* out;    /* [M, K], written: forward */
  const tessera_tensor* dout;   /* [M, K]: backward */

  const tessera_tensor* experts;   /* int32 [M, top_k], written by a forward with logits */
  const tessera_tensor* weights;   /* fp32 [M, top_k], likewise */
  const tessera_tensor* positions; /* int32 [M, top_k], written by the forward */
  const tessera_tensor* offsets;   /* int32 [E + 1], written by the forward */

  const tessera_tensor* balance_loss;  /* fp32 [1], written, optional: forward, with logits */
  const tessera_tensor* dbalance_loss; /* fp32 [1], optional: backward, with dlogits */
  const tessera_tensor* before;        /* [M * top_k, H], optional: written by the forward, read by the backward */
  const tessera_tensor* before_gate;   /* [M * top_k, H], with before and gate */
  const tessera_tensor* x_rows;        /* [M * top_k, K], likewise optional */

  const tessera_tensor* dx;       /* [M, K], written, optional, as are the following: backward */
  const tessera_tensor* dlogits;  /* [M, E], with logits */
  const tessera_tensor* dweights; /* fp32 [M, top_k], without logits */
  const tessera_tensor* dup;      /* [E, H, K] */
  const tessera_tensor* ddown;    /* [E, K, H] */
  const tessera_tensor* dgate;    /* [E, H, K], with gate */

  tessera_activation activation;
  tessera_moe_scoring scoring;
  uint32_t flags;    /* TESSERA_MOE_NORMALIZE */
  uint32_t reserved; /* 0 */
} tessera_moe;

#define TESSERA_MOE_INIT                                                                                           \
  {                                                                                                                \
    sizeof(tessera_moe), NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, \
        NULL, NULL, NULL, NULL, NULL, NULL, NULL, TESSERA_ACTIVATION_SILU, TESSERA_MOE_SOFTMAX, 0u, 0u             \
  }

/* As for the functions of the same names in tessera/gemm.h. */
TESSERA_API tessera_status tessera_moe_plan_create(tessera_moe_op op, const tessera_moe* args, tessera_plan** plan);
TESSERA_API tessera_status tessera_moe_plan_run(const tessera_plan* plan, const tessera_moe* args, void* workspace,
                                                size_t workspace_bytes, void* stream);
TESSERA_API tessera_status tessera_moe_run(tessera_moe_op op, const tessera_moe* args, void* workspace,
                                           size_t workspace_bytes, void* stream);
TESSERA_API tessera_status tessera_moe_workspace(tessera_moe_op op, const tessera_moe* args, size_t* bytes);
TESSERA_API tessera_status tessera_moe_explain(tessera_moe_op op, const tessera_moe* args, const char* arch,
                                               tessera_explain_format format, char* text, size_t capacity,
                                               size_t* needed);

#ifdef __cplusplus
}
#endif

#endif /* TESSERA_MOE_H_ */
