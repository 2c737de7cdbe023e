#include "plan.h"

#include <cstring>
#include <memory>
#include <type_traits>

#include "plan_cache.h"

namespace tessera::python {
namespace {

std::int64_t dim(const tessera_tensor& t, int i) { return i < t.ndim ? t.shape[i] : 0; }

// A plan holds the result of a problem's first call (arguments checked, kernel chosen and compiled, workspace size), so
// that later calls only run. Its key is everything that a plan depends on, compared as bytes.

struct Key {
  std::int32_t op, threads;
  tessera_device device;
  tessera_dtype dtype;
  // Bits: which optional tensors are given; which tensors have all rows 16-byte aligned; which of q, k, v and dout TMA
  // can read; of k and v also as a cache.
  std::uint32_t given;
  std::int32_t ndims[4];  // q, k, v, slopes
  std::int64_t shapes[3][4];
  std::int64_t batch, pages;  // of cu_seqlens or the page table
  std::int64_t seq_new, rotary_rows, rotary_columns;
  std::int64_t scales[3][3];  // shapes of e4m3's scales
  tessera_dtype out_dtype;
  std::uint32_t unused;
  float scale, softcap;
  std::uint32_t flags;
  std::int32_t alignment;
  std::int64_t window_left, window_right, max_q, max_k, chunk;
};

static_assert(std::has_unique_object_representations_v<tessera_device>);

bool aligned(const tessera_tensor* t) {
  constexpr std::uint64_t kVector = 16;
  const std::uint64_t bytes = t->dtype.bits / 8;
  std::uint64_t all = reinterpret_cast<std::uintptr_t>(t->data) + t->byte_offset;
  for (int i = 0; i + 1 < t->ndim && t->strides != nullptr; ++i) {
    // The stride of a dim of size 1 is never used, and DLPack puts a 1 there.
    if (t->shape[i] > 1) all |= static_cast<std::uint64_t>(t->strides[i]) * bytes;
  }
  return all % kVector == 0;
}

// Must agree with strides_allow_tensor_maps in src/attention/check.cc.
bool mappable(const tessera_tensor* t) {
  constexpr std::int64_t kEnd = std::int64_t{1} << 39;
  for (int i = 0; i + 1 < t->ndim && t->strides != nullptr; ++i) {
    if (t->shape[i] > 1 && (t->strides[i] <= 0 || t->strides[i] >= kEnd)) return false;
  }
  return true;
}

// Likewise with cache_extents_fit there.
bool mappable_cache(const tessera_tensor* t) {
  if (t->ndim != 4 || t->shape[1] <= 1) return false;
  if (t->shape[0] <= 1 || t->strides == nullptr) return true;
  return t->strides[1] > 0 && t->strides[0] % t->strides[1] == 0;
}

Key key_of(tessera_attention_op op, const tessera_attention& a) {
  Key key;
  std::memset(&key, 0, sizeof key);
  key.op = op;
  key.threads = a.q->device.type == TESSERA_CPU ? tessera_num_threads() : 0;
  key.device = a.q->device;
  key.dtype = a.q->dtype;
  std::uint32_t bit = 1;
  for (const tessera_tensor* t : {a.lse, a.dlse, a.alibi_slopes, a.cu_seqlens_q, a.cache_seqlens, a.page_table,
                                  a.cache_batch_idx, a.leftpad_k, a.k_new, a.rotary_cos}) {
    if (t != nullptr) key.given |= bit;
    bit <<= 1;
  }
  for (const tessera_tensor* t : {a.q, a.k, a.v, a.out, a.dout, a.dq, a.dk, a.dv, a.k_new, a.v_new}) {
    if (t != nullptr && aligned(t)) key.given |= bit;
    bit <<= 1;
  }
  for (const tessera_tensor* t : {a.q, a.k, a.v, a.dout}) {
    if (t != nullptr && mappable(t)) key.given |= bit;
    bit <<= 1;
  }
  for (const tessera_tensor* t : {a.k, a.v}) {
    if (op == TESSERA_ATTENTION_DECODE && mappable_cache(t)) key.given |= bit;
    bit <<= 1;
  }
  const tessera_tensor* inputs[] = {a.q, a.k, a.v};
  for (int i = 0; i < 3; ++i) {
    key.ndims[i] = inputs[i]->ndim;
    for (int d = 0; d < 4; ++d) key.shapes[i][d] = dim(*inputs[i], d);
  }
  if (a.alibi_slopes != nullptr) key.ndims[3] = a.alibi_slopes->ndim;
  if (a.cu_seqlens_q != nullptr) key.batch = dim(*a.cu_seqlens_q, 0);
  if (a.page_table != nullptr) key.batch = dim(*a.page_table, 0), key.pages = dim(*a.page_table, 1);
  if (a.k_new != nullptr) key.seq_new = dim(*a.k_new, 1);
  if (a.rotary_cos != nullptr) key.rotary_rows = dim(*a.rotary_cos, 0), key.rotary_columns = dim(*a.rotary_cos, 1);
  const tessera_tensor* scales[] = {a.q_scale, a.k_scale, a.v_scale};
  for (int i = 0; i < 3; ++i) {
    for (int d = 0; d < 3 && scales[i] != nullptr; ++d) key.scales[i][d] = dim(*scales[i], d);
  }
  key.out_dtype = a.out->dtype;
  key.scale = a.scale;
  key.softcap = a.softcap;
  key.flags = a.flags;
  key.alignment = a.alignment;
  key.window_left = a.window_left;
  key.window_right = a.window_right;
  key.max_q = a.max_seqlen_q;
  key.max_k = a.max_seqlen_k;
  key.chunk = a.attention_chunk;
  return key;
}

// Lengths in host memory are part of the problem, so a plan made for one call may not cover the next.
bool lengths_matter(const tessera_attention& a) { return a.cu_seqlens_q != nullptr && a.q->device.type == TESSERA_CPU; }

SharedPlan plan_for(tessera_attention_op op, const tessera_attention& args) {
  static auto* plans = new PlanCache<Key>;
  const auto create = [&](tessera_plan** made) { return tessera_attention_plan_create(op, &args, made); };
  return lengths_matter(args) ? make_plan(create) : plans->find(key_of(op, args), create);
}

// Each thread keeps a workspace of this size, which saves small calls on the CPU an allocation.
constexpr std::size_t kSmall = 1 << 18;

void* small_workspace() {
  thread_local const std::unique_ptr<unsigned char[]> kept(new unsigned char[kSmall]);
  return kept.get();
}

}  // namespace

bool expect(const char* function, Py_ssize_t given, Py_ssize_t wanted) {
  if (given == wanted) return true;
  PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, not %zd", function, wanted, given);
  return false;
}

bool succeeded(tessera_status status) {
  if (status == TESSERA_OK) return true;
  fail(tessera_last_error(), status);
  return false;
}

bool follow_threads() {
  static long set = 0;
  const Ref number(PyObject_CallNoArgs(torch.get_num_threads));
  if (!number) return false;
  const long threads = PyLong_AsLong(number.get());
  if (threads == set) return true;
  if (!succeeded(tessera_set_num_threads(static_cast<std::int32_t>(threads)))) return false;
  set = threads;
  return true;
}

bool current_stream(tessera_device device, void** stream) {
  *stream = nullptr;
  if (device.type == TESSERA_CPU) return true;
  if (torch.exchange != nullptr && torch.exchange->current_stream(device.type, device.index, stream) == 0) return true;
  PyErr_Clear();
  const Ref index(PyLong_FromLong(device.index));
  const Ref handle(index ? PyObject_CallFunctionObjArgs(torch.current_stream, index.get(), nullptr) : nullptr);
  if (!handle) return false;
  *stream = PyLong_AsVoidPtr(handle.get());
  return true;
}

bool run_plan(const tessera_plan* plan, const View& like,
              const std::function<tessera_status(void* workspace, std::size_t bytes, void* stream)>& run) {
  const tessera_device device = like.tensor.device;
  const bool cpu = device.type == TESSERA_CPU;
  const std::size_t bytes = tessera_plan_workspace(plan);
  void* workspace = nullptr;
  Ref scratch;
  View scratch_view;
  if (bytes > 0 && cpu && bytes <= kSmall) {
    workspace = small_workspace();
  } else if (bytes > 0) {
    const auto size = static_cast<std::int64_t>(bytes);
    scratch = allocate(like, torch.uint8, &size, 1, Fill::kNone, &scratch_view);
    if (!scratch) return false;
    workspace = scratch_view.tensor.data;
  }
  void* stream = nullptr;
  if (!current_stream(device, &stream)) return false;
  tessera_status status;
  {
    const WithoutGil without;
    status = run(workspace, bytes, stream);
  }
  return succeeded(status);
}

bool run(tessera_attention_op op, const tessera_attention& args, const View& q) {
  if (args.q->device.type == TESSERA_CPU && !follow_threads()) return false;
  const SharedPlan plan = plan_for(op, args);
  if (!plan) return false;
  return run_plan(plan.get(), q, [&](void* workspace, std::size_t bytes, void* stream) {
    return tessera_attention_plan_run(plan.get(), &args, workspace, bytes, stream);
  });
}

}  // namespace tessera::python
