/* Tessera's C ABI: the one binary boundary. C99, no dependency but the C library's headers.
 *
 * A call is: fill a tessera_attention, then either
 *   tessera_attention_run(op, &args, workspace, bytes, stream)            check, choose, run; or
 *   tessera_plan_create(op, &args, &plan)                                 check, choose, compile; then, as often as
 * wanted, tessera_plan_run(plan, &args, workspace, bytes, stream)               run: nothing is compiled or allocated
 * here.
 *
 * Every function that can fail returns a status; tessera_last_error() has the sentence. Where a call fails for its
 * arguments, nothing has been written. All functions may be called from any thread. docs/contract.md has the full
 * contract: what is computed, and what is accepted. */
#ifndef TESSERA_TESSERA_H_
#define TESSERA_TESSERA_H_

#include <stddef.h>
#include <stdint.h>

#if defined(TESSERA_BUILDING)
#define TESSERA_API __attribute__((visibility("default")))
#else
#define TESSERA_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define TESSERA_VERSION_MAJOR 0
#define TESSERA_VERSION_MINOR 1
#define TESSERA_VERSION_PATCH 0

typedef enum tessera_status {
  TESSERA_OK = 0,
  TESSERA_INVALID_ARGUMENT = 1, /* the arguments break the contract; the sentence names which and what is accepted */
  TESSERA_UNSUPPORTED = 2,      /* the contract allows it, no kernel on this device serves it; explain says why */
  TESSERA_OUT_OF_MEMORY = 3,
  TESSERA_NO_DEVICE = 4,      /* the driver or the device asked for is not there */
  TESSERA_COMPILE_FAILED = 5, /* no NVRTC, compiling forbidden, or the compiler refused */
  TESSERA_CUDA_FAILED = 6,    /* the driver refused a load or a launch */
  TESSERA_INTERNAL = 7        /* a defect of Tessera */
} tessera_status;

TESSERA_API const char* tessera_version(void);                      /* "0.1.0" */
TESSERA_API const char* tessera_status_name(tessera_status status); /* "invalid_argument" */

/* The calling thread's last failure, as a sentence; "" after a success. Valid until the thread's next call. */
TESSERA_API const char* tessera_last_error(void);

/* Threads the CPU backend uses, process-wide. 0 restores the default: TESSERA_NUM_THREADS, else the cores this process
 * may run on. */
TESSERA_API tessera_status tessera_set_num_threads(int32_t threads);
TESSERA_API int32_t tessera_num_threads(void);

/* ---- Tensors: the layout of DLPack's DLTensor, so a DLTensor* may be passed as a tessera_tensor*. ---- */

enum { TESSERA_CPU = 1, TESSERA_CUDA = 2 };                                        /* DLDeviceType */
enum { TESSERA_INT = 0, TESSERA_UINT = 1, TESSERA_FLOAT = 2, TESSERA_BFLOAT = 4 }; /* DLDataTypeCode */

typedef struct tessera_device {
  int32_t type; /* TESSERA_CPU, TESSERA_CUDA */
  int32_t index;
} tessera_device;

typedef struct tessera_dtype {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes; /* 1 */
} tessera_dtype;

typedef struct tessera_tensor {
  void* data;
  tessera_device device;
  int32_t ndim;
  tessera_dtype dtype;
  int64_t* shape;
  int64_t* strides; /* in elements; NULL: row-major and compact */
  uint64_t byte_offset;
} tessera_tensor;

/* ---- Attention: softmax(scale * Q K^T, masked) V. ---- */

typedef enum tessera_attention_op {
  TESSERA_ATTENTION_FORWARD = 0,
  TESSERA_ATTENTION_BACKWARD = 1,
  TESSERA_ATTENTION_DECODE = 2 /* few queries, at the end of each sequence, against a KV cache */
} tessera_attention_op;

/* Where query 0 stands on the keys' axis. Needed when Sq != Sk and anything depends on position (causal, window,
 * ALiBi). Decode is always bottom-right. */
typedef enum tessera_alignment {
  TESSERA_ALIGN_UNSPECIFIED = 0,
  TESSERA_ALIGN_TOP_LEFT = 1,    /* query i stands at key i */
  TESSERA_ALIGN_BOTTOM_RIGHT = 2 /* query i stands at key i + Sk - Sq */
} tessera_alignment;

enum {
  TESSERA_CAUSAL = 1u << 0,       /* a query sees no key beyond its own position */
  TESSERA_DETERMINISTIC = 1u << 1 /* backward: bitwise equal gradients from run to run */
};

/* All three ops take this. Set it up with TESSERA_ATTENTION_INIT, then the fields you need; a tensor that the op does
 * not use must stay NULL. B sequences; Hq a multiple of Hkv; dtype fp16, bf16 or (CPU) fp32, the same for all but lse,
 * dlse and slopes (fp32) and lengths and tables (int32). The last dim of every tensor is contiguous. */
typedef struct tessera_attention {
  size_t struct_size;

  const tessera_tensor* q;   /* [B, Sq, Hq, Dqk]; varlen: [total_q, Hq, Dqk] */
  const tessera_tensor* k;   /* [B, Sk, Hkv, Dqk]; varlen: [total_k, Hkv, Dqk]; paged: [pages, page_size, Hkv, Dqk] */
  const tessera_tensor* v;   /* likewise, with Dv */
  const tessera_tensor* out; /* [B, Sq, Hq, Dv]; written by forward and decode, read by backward */
  const tessera_tensor* lse; /* float [B, Hq, Sq]; varlen: [Hq, total_q]; optional but for backward, which reads it */

  const tessera_tensor* dout; /* backward: read */
  const tessera_tensor* dlse; /* backward: read, optional; the gradient of lse */
  const tessera_tensor* dq;   /* backward: written */
  const tessera_tensor* dk;
  const tessera_tensor* dv;

  float scale;                        /* of the scores; 0: 1 / sqrt(Dqk) */
  float softcap;                      /* scores become softcap * tanh(score / softcap); 0: off */
  const tessera_tensor* alibi_slopes; /* float [Hq] or [B, Hq], optional: score -= slope * |position(i) - j| */
  uint32_t flags;                     /* TESSERA_CAUSAL | TESSERA_DETERMINISTIC */
  tessera_alignment alignment;
  int64_t window_left;  /* keys visible left of the query's position, itself not counted; -1: all */
  int64_t window_right; /* likewise to the right */

  /* Variable length (forward and backward): int32 [B + 1], starting at 0, never falling, ending at most at the rows
   * of q or k. Both or neither. max_seqlen bounds every length; 0 lets the CPU backend read it from cu_seqlens. */
  const tessera_tensor* cu_seqlens_q;
  const tessera_tensor* cu_seqlens_k;
  int64_t max_seqlen_q;
  int64_t max_seqlen_k;

  /* Decode: int32 [B], keys in use per sequence, the new ones included; NULL: the whole cache. */
  const tessera_tensor* cache_seqlens;
  const tessera_tensor* page_table; /* decode: int32 [B, max_pages_per_seq], optional; k and v are then paged */
} tessera_attention;

#define TESSERA_ATTENTION_INIT                                                                                   \
  {                                                                                                              \
    sizeof(tessera_attention), NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 0.0f, 0.0f, NULL, 0u, \
        TESSERA_ALIGN_UNSPECIFIED, -1, -1, NULL, NULL, 0, 0, NULL, NULL                                          \
  }

/* A problem checked, a kernel chosen and compiled. Immutable: any number of threads may run one plan, each with its
 * own workspace. */
typedef struct tessera_plan tessera_plan;

TESSERA_API tessera_status tessera_plan_create(tessera_attention_op op, const tessera_attention* args,
                                               tessera_plan** plan);
TESSERA_API void tessera_plan_destroy(tessera_plan* plan);

/* Bytes of scratch that a run needs, on the tensors' device, aligned to 256. */
TESSERA_API size_t tessera_plan_workspace(const tessera_plan* plan);

/* The kernel chosen and why, for people; lives as long as the plan. */
TESSERA_API const char* tessera_plan_explain(const tessera_plan* plan);

/* Runs the plan on tensors of the same shapes, types and options as it was made for (data and strides may
 * differ; on a GPU, rows that were planned as 16-byte aligned must stay so).
 * stream: a CUstream or cudaStream_t; ignored on the CPU, where the call returns when the result is there. */
TESSERA_API tessera_status tessera_plan_run(const tessera_plan* plan, const tessera_attention* args, void* workspace,
                                            size_t workspace_bytes, void* stream);

/* Plan and run in one call; tessera_attention_workspace says how much scratch it needs. */
TESSERA_API tessera_status tessera_attention_workspace(tessera_attention_op op, const tessera_attention* args,
                                                       size_t* bytes);
TESSERA_API tessera_status tessera_attention_run(tessera_attention_op op, const tessera_attention* args,
                                                 void* workspace, size_t workspace_bytes, void* stream);

/* Which kernel would serve these arguments, and why each other one does not. arch: "cpu", "sm_75" ... "sm_90a" for a
 * device that need not be present, or NULL for the tensors' own. Data pointers are not looked at and may be NULL.
 * Writes at most capacity bytes, always terminated; *needed (optional) gets the full size, terminator included. */
TESSERA_API tessera_status tessera_attention_explain(tessera_attention_op op, const tessera_attention* args,
                                                     const char* arch, char* text, size_t capacity, size_t* needed);

#ifdef __cplusplus
}
#endif

#endif /* TESSERA_TESSERA_H_ */
