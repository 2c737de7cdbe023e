/* Tessera's C ABI: the one binary boundary. C99, no dependency but the C library's headers.
 *
 * This header has what every family of kernels shares: status, tensors, plans. Each family has a header of its own:
 * tessera/attention.h. A call is: fill the family's argument struct, then either
 *   tessera_<family>_run(op, &args, workspace, bytes, stream)         check, choose, run; or
 *   tessera_<family>_plan_create(op, &args, &plan)                    check, choose, compile; then, any number of times,
 *   tessera_<family>_plan_run(plan, &args, workspace, bytes, stream)  run; nothing is compiled or allocated.
 *
 * Every function that can fail returns a status, and tessera_last_error() has the message. If a call fails because of
 * its arguments, nothing has been written. All functions may be called from any thread. docs/contract.md has the full
 * contract: what is computed, and what is accepted.
 *
 * Argument structs begin with struct_size and grow at their end. A caller compiled against an older header passes a
 * smaller struct_size; the fields it does not know take their defaults. A caller compiled against a newer header passes
 * a larger one, which is accepted if all bytes that this library does not know are zero. */
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
#define TESSERA_VERSION_MINOR 2
#define TESSERA_VERSION_PATCH 0

typedef enum tessera_status {
  TESSERA_OK = 0,
  TESSERA_INVALID_ARGUMENT = 1, /* the arguments break the contract; the message says which and what is accepted */
  TESSERA_UNSUPPORTED = 2,      /* the contract allows it, no kernel on this device serves it; explain says why */
  TESSERA_OUT_OF_MEMORY = 3,
  TESSERA_NO_DEVICE = 4,      /* the driver or the requested device is not present */
  TESSERA_COMPILE_FAILED = 5, /* no NVRTC, compiling forbidden, or the compiler refused */
  TESSERA_CUDA_FAILED = 6,    /* the driver refused a load or a launch */
  TESSERA_INTERNAL = 7        /* a defect of Tessera */
} tessera_status;

TESSERA_API const char* tessera_version(void);                      /* "0.2.0" */
TESSERA_API const char* tessera_status_name(tessera_status status); /* "invalid_argument" */

/* The calling thread's last error message; "" after a success. Valid until the thread's next call. */
TESSERA_API const char* tessera_last_error(void);

/* Threads the CPU backend uses, process-wide. 0 restores the default: TESSERA_NUM_THREADS, else the cores this process
 * may run on. */
TESSERA_API tessera_status tessera_set_num_threads(int32_t threads);
TESSERA_API int32_t tessera_num_threads(void);

/* Runs the CPU backend's work on another pool of threads, so that two do not compete for the cores. `loop` calls
 * body(first, last, context) for ranges that together are [begin, end), none shorter than `grain` if it can, from several
 * threads at once if it has them. It returns when all calls have returned: 0, or another number if it did not make all of
 * them, whose work is then done by the caller. It may be called from several threads and from within a body, and body throws
 * nothing. PyTorch's torch_parallel_for is such a function. The setting is for all threads of the process that use this
 * library; null: threads of Tessera's own. After fork(), a child uses its own until it sets a loop itself. */
typedef int32_t (*tessera_parallel_loop)(int64_t begin, int64_t end, int64_t grain,
                                         void (*body)(int64_t first, int64_t last, void* context), void* context);
TESSERA_API tessera_status tessera_set_parallel_loop(tessera_parallel_loop loop);

/* ---- Tensors: the layout of DLPack's DLTensor, so a DLTensor* may be passed as a tessera_tensor*. ---- */

enum { TESSERA_CPU = 1, TESSERA_CUDA = 2 }; /* DLDeviceType */
enum {                                      /* DLDataTypeCode */
       TESSERA_INT = 0,
       TESSERA_UINT = 1,
       TESSERA_FLOAT = 2,
       TESSERA_BFLOAT = 4,
       TESSERA_FLOAT8_E4M3FN = 10
};

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

/* ---- Plans: arguments checked, a kernel chosen and compiled. ---- */

/* Immutable: any number of threads may run one plan, each with its own workspace. A plan belongs to the family that
 * made it; the plan_run of another family refuses it. */
typedef struct tessera_plan tessera_plan;

TESSERA_API void tessera_plan_destroy(tessera_plan* plan);

/* Bytes of scratch memory that a run needs, on the tensors' device, at any alignment. */
TESSERA_API size_t tessera_plan_workspace(const tessera_plan* plan);

typedef enum tessera_explain_format {
  TESSERA_EXPLAIN_TEXT = 0, /* for people */
  TESSERA_EXPLAIN_JSON = 1  /* for programs: docs/explain.md has the fields */
} tessera_explain_format;

/* Which kernel was chosen and why, and why the others were not. Lives as long as the plan. "" if plan is NULL. */
TESSERA_API const char* tessera_plan_explain(const tessera_plan* plan, tessera_explain_format format);

#ifdef __cplusplus
}
#endif

#endif /* TESSERA_TESSERA_H_ */
