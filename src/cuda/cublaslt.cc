#include "cuda/cublaslt.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>

#include "base/format.h"
#include "cuda/device.h"
#include "jit/nvrtc.h"

namespace tessera::cuda {
namespace {

// The part of cublasLt.h that is used.
using LtStatus = int;
using LtHandle = struct LtHandleTag*;
using LtDescription = struct LtDescriptionTag*;
using LtLayout = struct LtLayoutTag*;
using LtPreference = struct LtPreferenceTag*;
constexpr LtStatus kLtSuccess = 0;
constexpr int kCompute32F = 68, kR32F = 0, kR16F = 2, kR16BF = 14;        // cublasComputeType_t, cudaDataType
constexpr std::int32_t kOpT = 1;                                          // cublasOperation_t
constexpr int kTransA = 3, kTransB = 4, kEpilogue = 7, kBiasPointer = 8;  // cublasLtMatmulDescAttributes_t
// cublasLtMatmulPreferenceAttributes_t
constexpr int kMaxWorkspace = 1, kReductionScheme = 3, kAlignmentA = 5, kAlignmentB = 6, kAlignmentC = 7,
              kAlignmentD = 8;
constexpr std::uint32_t kReduceInFp32 = 2;  // cublasLtReductionScheme_t: not in place, which has no fixed order
constexpr std::uint32_t kEpilogueDefault = 1, kEpilogueRelu = 2, kEpilogueBias = 4, kEpilogueGelu = 32;

struct LtHeuristic {  // cublasLtMatmulHeuristicResult_t
  std::uint64_t algorithm[8];
  std::size_t workspace;
  LtStatus state;
  float waves;
  int reserved[4];
};
static_assert(sizeof(LtHeuristic) == 96);

struct Library {
  std::size_t (*version)() = nullptr;
  LtStatus (*create)(LtHandle*) = nullptr;
  LtStatus (*description_create)(LtDescription*, int, int) = nullptr;
  LtStatus (*description_destroy)(LtDescription) = nullptr;
  LtStatus (*description_set)(LtDescription, int, const void*, std::size_t) = nullptr;
  LtStatus (*layout_create)(LtLayout*, int, std::uint64_t, std::uint64_t, std::int64_t) = nullptr;
  LtStatus (*layout_destroy)(LtLayout) = nullptr;
  LtStatus (*preference_create)(LtPreference*) = nullptr;
  LtStatus (*preference_destroy)(LtPreference) = nullptr;
  LtStatus (*preference_set)(LtPreference, int, const void*, std::size_t) = nullptr;
  LtStatus (*heuristic)(LtHandle, LtDescription, LtLayout, LtLayout, LtLayout, LtLayout, LtPreference, int,
                        LtHeuristic*, int*) = nullptr;
  LtStatus (*matmul)(LtHandle, LtDescription, const void*, const void*, LtLayout, const void*, LtLayout, const void*,
                     const void*, LtLayout, void*, LtLayout, const void*, void*, std::size_t, CUstream) = nullptr;
  std::string version_text;
};

bool resolve(void* library, Library& lt) {
  bool complete = true;
  const auto find = [&](const char* name, auto& function) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    complete &= function != nullptr;
  };
  find("cublasLtGetVersion", lt.version);
  find("cublasLtCreate", lt.create);
  find("cublasLtMatmulDescCreate", lt.description_create);
  find("cublasLtMatmulDescDestroy", lt.description_destroy);
  find("cublasLtMatmulDescSetAttribute", lt.description_set);
  find("cublasLtMatrixLayoutCreate", lt.layout_create);
  find("cublasLtMatrixLayoutDestroy", lt.layout_destroy);
  find("cublasLtMatmulPreferenceCreate", lt.preference_create);
  find("cublasLtMatmulPreferenceDestroy", lt.preference_destroy);
  find("cublasLtMatmulPreferenceSetAttribute", lt.preference_set);
  find("cublasLtMatmulAlgoGetHeuristic", lt.heuristic);
  find("cublasLtMatmul", lt.matmul);
  return complete;
}

bool forbidden() {
  const char* value = std::getenv("TESSERA_NO_CUBLASLT");
  return value != nullptr && *value != '\0' && std::string(value) != "0";
}

// By the loader's names, which find a library that PyTorch has opened, then beside NVRTC: wheels put both into one folder, or
// into folders side by side.
std::vector<std::string> places() {
  std::vector<std::string> list;
  const int driver = jit::driver_version() / 1000;
  for (const int major : {13, 12}) {
    if (major > driver) continue;  // it needs a newer driver
    const std::string name = format("libcublasLt.so.{}", major);
    list.push_back(name);
    const auto nvrtc = jit::nvrtc_info(false);
    if (!nvrtc.ok()) continue;
    const std::string folder = nvrtc->path.substr(0, nvrtc->path.rfind('/'));
    list.push_back(format("{}/{}", folder, name));
    list.push_back(format("{}/../../cublas/lib/{}", folder, name));
  }
  return list;
}

Result<const Library*> open() {
  for (const std::string& place : places()) {
    void* const opened = dlopen(place.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (opened == nullptr) continue;
    auto lt = std::make_unique<Library>();
    if (resolve(opened, *lt)) {
      const std::size_t v = lt->version();  // 130002; 120805
      lt->version_text = format("{}.{}.{}", v / 10000, v / 100 % 100, v % 100);
      return lt.release();  // never closed: work may be under way until the process exits
    }
    dlclose(opened);
  }
  return Status(TESSERA_UNSUPPORTED, "cuBLASLt was not found");
}

Result<const Library*> library() {
  static std::mutex mutex;
  static auto* known = new Result<const Library*>(Status(TESSERA_UNSUPPORTED, ""));
  static bool tried = false;
  const std::lock_guard lock(mutex);
  if (!tried) *known = open();
  tried = true;
  return *known;
}

// For plans; one that is there goes on.
Result<const Library*> allowed_library() {
  if (forbidden()) return Status(TESSERA_UNSUPPORTED, "TESSERA_NO_CUBLASLT is set");
  return library();
}

Status failed(const char* what, LtStatus status) {
  return {TESSERA_CUDA_FAILED, format("{}: cuBLAS status {}", what, status)};
}

// One handle per device, for all threads.
Result<LtHandle> handle_of(const Library& lt, int device) {
  static std::mutex mutex;
  static auto* handles = new std::map<int, LtHandle>;
  const std::lock_guard lock(mutex);
  LtHandle& handle = (*handles)[device];
  if (handle != nullptr) return handle;
  if (const LtStatus s = lt.create(&handle); s != kLtSuccess) {
    handle = nullptr;
    return failed("cublasLtCreate", s);
  }
  return handle;
}

int type_of(DType dtype) { return dtype == DType::kFloat32 ? kR32F : dtype == DType::kFloat16 ? kR16F : kR16BF; }

// The descriptions of one product. cuBLASLt's matrices are column-major: ours are their transposes, so D^T = B^T A^T, and
// their A is our B.
class Descriptions {
 public:
  explicit Descriptions(const Library& lt) : lt_(lt) {}
  Descriptions(const Descriptions&) = delete;
  ~Descriptions() {
    for (LtLayout layout : {a, b, c, d}) {
      if (layout != nullptr) lt_.layout_destroy(layout);
    }
    if (product != nullptr) lt_.description_destroy(product);
  }

  Status fill(const LtProduct& p, const void* bias) {
    if (const LtStatus s = lt_.description_create(&product, kCompute32F, kR32F); s != kLtSuccess) {
      return failed("cublasLtMatmulDescCreate", s);
    }
    LtStatus worst = kLtSuccess;
    const auto set = [&](int attribute, const auto& value) {
      if (const LtStatus s = lt_.description_set(product, attribute, &value, sizeof value); s != kLtSuccess) worst = s;
    };
    if (!p.b_transposed) set(kTransA, kOpT);
    if (p.a_transposed) set(kTransB, kOpT);
    std::uint32_t epilogue = p.bias ? kEpilogueBias : 0;
    if (p.activation == LtProduct::Activation::kRelu) epilogue |= kEpilogueRelu;
    if (p.activation == LtProduct::Activation::kGeluTanh) epilogue |= kEpilogueGelu;
    if (epilogue == 0) epilogue = kEpilogueDefault;
    set(kEpilogue, epilogue);
    if (p.bias) set(kBiasPointer, bias);
    const auto layout = [&](LtLayout& to, DType dtype, std::int64_t rows, std::int64_t columns, std::int64_t stride) {
      const LtStatus s = lt_.layout_create(&to, type_of(dtype), static_cast<std::uint64_t>(columns),
                                           static_cast<std::uint64_t>(rows), std::max(stride, columns));
      if (s != kLtSuccess) worst = s;
    };
    layout(a, p.dtype, p.b_transposed ? p.k : p.n, p.b_transposed ? p.n : p.k, p.b_stride);
    layout(b, p.dtype, p.a_transposed ? p.k : p.m, p.a_transposed ? p.m : p.k, p.a_stride);
    layout(c, p.out_dtype, p.m, p.n, p.residual ? p.c_stride : p.out_stride);
    layout(d, p.out_dtype, p.m, p.n, p.out_stride);
    return worst == kLtSuccess ? Status() : failed("cuBLASLt's descriptions", worst);
  }

  LtDescription product = nullptr;
  LtLayout a = nullptr, b = nullptr, c = nullptr, d = nullptr;

 private:
  const Library& lt_;
};

}  // namespace

Result<std::string> cublaslt_version() {
  const auto lt = allowed_library();
  if (!lt.ok()) return lt.status();
  return (*lt)->version_text;
}

Result<std::vector<LtAlgorithm>> lt_algorithms(int device, const LtProduct& p, int count) {
  constexpr std::uint64_t kMostWorkspace = std::uint64_t{32} << 20;  // what NVIDIA recommends for Hopper
  const auto found = allowed_library();
  if (!found.ok()) return found.status();
  const Library& lt = **found;
  const auto scope = ContextScope::enter(device);
  if (!scope.ok()) return scope.status();
  const auto handle = handle_of(lt, device);
  if (!handle.ok()) return handle.status();
  Descriptions descriptions(lt);
  // Of the bias, the heuristic looks at the address's alignment alone.
  if (Status s = descriptions.fill(p, reinterpret_cast<const void*>(std::uintptr_t{p.out_alignment})); !s.ok())
    return s;
  LtPreference preference = nullptr;
  if (const LtStatus s = lt.preference_create(&preference); s != kLtSuccess) {
    return failed("cublasLtMatmulPreferenceCreate", s);
  }
  const auto set = [&](int attribute, auto value) { lt.preference_set(preference, attribute, &value, sizeof value); };
  set(kMaxWorkspace, kMostWorkspace);
  set(kReductionScheme, kReduceInFp32);
  set(kAlignmentA, std::uint32_t{p.b_alignment});
  set(kAlignmentB, std::uint32_t{p.a_alignment});
  set(kAlignmentC, std::uint32_t{p.out_alignment});
  set(kAlignmentD, std::uint32_t{p.out_alignment});
  std::vector<LtHeuristic> results(static_cast<std::size_t>(count));
  int returned = 0;
  const LtStatus s = lt.heuristic(*handle, descriptions.product, descriptions.a, descriptions.b, descriptions.c,
                                  descriptions.d, preference, count, results.data(), &returned);
  lt.preference_destroy(preference);
  std::vector<LtAlgorithm> algorithms;
  if (s != kLtSuccess) return algorithms;  // it has none for this product
  for (int i = 0; i < returned; ++i) {
    const LtHeuristic& one = results[static_cast<std::size_t>(i)];
    if (one.state != kLtSuccess) continue;
    LtAlgorithm& kept = algorithms.emplace_back();
    std::copy(std::begin(one.algorithm), std::end(one.algorithm), kept.data);
    kept.workspace = one.workspace;
  }
  return algorithms;
}

Status lt_enqueue(int device, const LtProduct& p, const LtPointers& at, const LtAlgorithm& algorithm, void* workspace,
                  CUstream stream) {
  const auto found = library();
  if (!found.ok()) return found.status();
  const Library& lt = **found;
  const auto scope = ContextScope::enter(device);
  if (!scope.ok()) return scope.status();
  const auto handle = handle_of(lt, device);
  if (!handle.ok()) return handle.status();
  Descriptions descriptions(lt);
  if (Status s = descriptions.fill(p, at.bias); !s.ok()) return s;
  const float alpha = 1.0f, beta = p.residual ? 1.0f : 0.0f;
  const LtStatus s = lt.matmul(*handle, descriptions.product, &alpha, at.b, descriptions.a, at.a, descriptions.b, &beta,
                               p.residual ? at.c : at.out, descriptions.c, at.out, descriptions.d, algorithm.data,
                               workspace, algorithm.workspace, stream);
  return s == kLtSuccess ? Status() : failed("cublasLtMatmul", s);
}

}  // namespace tessera::cuda
