// A cuBLASLt that computes on the host, for the stand-in driver (../emulated/driver.cc), whose memory is the host's. Column-major, bf16
// and fp32. An algorithm takes a bias at the multiples that it was chosen for. FAKE_CUBLASLT_FAILS: products return this status.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#define FAKE extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kR32F = 0, kInvalid = 7, kNotSupported = 15;

struct Description {
  std::int32_t transposes_a = 0, transposes_b = 0;
  std::uint32_t epilogue = 1;
  const void* bias = nullptr;
};
struct Layout {
  int type;
  std::uint64_t rows, columns;
  std::int64_t stride;
};
struct Preference {
  std::uint64_t workspace = 0;
};
struct Heuristic {
  std::uint64_t algorithm[8];
  std::size_t workspace;
  int state;
  float waves;
  int reserved[4];
};

// The largest power of two that an address is a multiple of, at most 16.
std::uint64_t alignment_of(const void* address) {
  const auto bits = reinterpret_cast<std::uintptr_t>(address) | 16;
  return bits & (~bits + 1);
}

float load(const Layout& layout, const void* data, std::uint64_t at) {
  if (layout.type == kR32F) return static_cast<const float*>(data)[at];
  const std::uint32_t bits = std::uint32_t{static_cast<const std::uint16_t*>(data)[at]} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
void store(const Layout& layout, void* data, std::uint64_t at, float value) {
  if (layout.type == kR32F) {
    static_cast<float*>(data)[at] = value;
    return;
  }
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  static_cast<std::uint16_t*>(data)[at] = static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace

FAKE std::size_t cublasLtGetVersion() { return 130102; }
FAKE int cublasLtCreate(void** handle) {
  *handle = new int;
  return 0;
}
FAKE int cublasLtMatmulDescCreate(Description** made, int, int) {
  *made = new Description;
  return 0;
}
FAKE int cublasLtMatmulDescDestroy(Description* description) {
  delete description;
  return 0;
}
FAKE int cublasLtMatmulDescSetAttribute(Description* d, int attribute, const void* value, std::size_t bytes) {
  const auto set = [&](auto& field) {
    if (bytes != sizeof field) return kInvalid;
    std::memcpy(&field, value, bytes);
    return 0;
  };
  switch (attribute) {
    case 3:
      return set(d->transposes_a);
    case 4:
      return set(d->transposes_b);
    case 7:
      return set(d->epilogue);
    case 8:
      return set(d->bias);
    default:
      return kInvalid;
  }
}
FAKE int cublasLtMatrixLayoutCreate(Layout** made, int type, std::uint64_t rows, std::uint64_t columns,
                                    std::int64_t stride) {
  if (stride < static_cast<std::int64_t>(rows)) return kInvalid;
  *made = new Layout{type, rows, columns, stride};
  return 0;
}
FAKE int cublasLtMatrixLayoutDestroy(Layout* layout) {
  delete layout;
  return 0;
}
FAKE int cublasLtMatmulPreferenceCreate(Preference** made) {
  *made = new Preference;
  return 0;
}
FAKE int cublasLtMatmulPreferenceDestroy(Preference* preference) {
  delete preference;
  return 0;
}
FAKE int cublasLtMatmulPreferenceSetAttribute(Preference* preference, int attribute, const void* value, std::size_t) {
  if (attribute == 1) std::memcpy(&preference->workspace, value, sizeof preference->workspace);
  return 0;
}
FAKE int cublasLtMatmulAlgoGetHeuristic(void*, Description* product, Layout*, Layout*, Layout*, Layout* d, Preference*,
                                        int count, Heuristic* results, int* returned) {
  if (d->rows == 13) return kNotSupported;
  *returned = std::min(count, 2);
  for (int i = 0; i < *returned; ++i) {
    results[i] = {};
    results[i].algorithm[0] = 77 + static_cast<std::uint64_t>(i);
    results[i].algorithm[1] = alignment_of(product->bias);
    results[i].workspace = 512;
  }
  return 0;
}
FAKE int cublasLtMatmul(void*, const Description* product, const float* alpha, const void* a, const Layout* of_a,
                        const void* b, const Layout* of_b, const float* beta, const void* c, const Layout* of_c,
                        void* d, const Layout* of_d, const std::uint64_t* algorithm, void* workspace, std::size_t bytes,
                        void*) {
  if (const char* status = std::getenv("FAKE_CUBLASLT_FAILS"); status != nullptr) return std::atoi(status);
  if (algorithm[0] != 77 || workspace == nullptr || bytes != 512) return kInvalid;
  if (alignment_of(product->bias) < algorithm[1]) return kInvalid;
  const std::uint64_t terms = product->transposes_a != 0 ? of_a->rows : of_a->columns;
  for (std::uint64_t column = 0; column < of_d->columns; ++column) {
    for (std::uint64_t row = 0; row < of_d->rows; ++row) {
      float sum = 0;
      for (std::uint64_t k = 0; k < terms; ++k) {
        const std::uint64_t at_a = product->transposes_a != 0 ? k + row * of_a->stride : row + k * of_a->stride;
        const std::uint64_t at_b = product->transposes_b != 0 ? column + k * of_b->stride : k + column * of_b->stride;
        sum += load(*of_a, a, at_a) * load(*of_b, b, at_b);
      }
      sum *= *alpha;
      if (*beta != 0) sum += *beta * load(*of_c, c, row + column * of_c->stride);
      if ((product->epilogue & 4) != 0) sum += load(*of_d, product->bias, row);
      if ((product->epilogue & 2) != 0) sum = std::max(sum, 0.0f);
      store(*of_d, d, row + column * of_d->stride, sum);
    }
  }
  return 0;
}
