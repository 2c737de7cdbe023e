// Which table serves a type on this CPU, determined once.
#include "cpu/products.h"

#include <atomic>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace tessera::cpu {
namespace {

std::atomic<Isa> highest_isa{Isa::kAvx512};
std::atomic<Bf16Isa> highest_bf16_isa{Bf16Isa::kAmx};

#if defined(__x86_64__)
// Linux grants the tile registers' state on request; without it the first tile instruction raises SIGILL.
bool amx_is_usable() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  if ((d & kAmxBf16) == 0 || (d & kAmxTile) == 0) return false;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (c & bit_OSXSAVE) == 0) return false;
  unsigned low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  constexpr unsigned kTileState = 3u << 17;
  if ((low & kTileState) != kTileState) return false;
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

Isa find_isa() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const auto avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
                    __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("f16c");
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw")) {
    return Isa::kAvx512;
  }
  if (avx2) return Isa::kAvx2;
  if (__builtin_cpu_supports("sse4.2")) return Isa::kSse4;
#endif
  return Isa::kNone;
}

Bf16Isa find_bf16_isa() {
#if defined(__x86_64__)
  if (find_isa() == Isa::kAvx512 && __builtin_cpu_supports("avx512bf16")) {
    return amx_is_usable() ? Bf16Isa::kAmx : Bf16Isa::kAvx512Bf16;
  }
#endif
  return Bf16Isa::kNone;
}

}  // namespace

Isa detect_isa() {
  static const Isa found = find_isa();
  const Isa highest = highest_isa.load(std::memory_order_relaxed);
  return found < highest ? found : highest;
}

Bf16Isa detect_bf16_isa() {
  static const Bf16Isa found = find_bf16_isa();
  const Bf16Isa highest = highest_bf16_isa.load(std::memory_order_relaxed);
  return found < highest ? found : highest;
}

void limit_isa(Isa isa, Bf16Isa bf16_isa) {
  highest_isa.store(isa, std::memory_order_relaxed);
  highest_bf16_isa.store(bf16_isa, std::memory_order_relaxed);
}

const char* name_of(Isa isa) {
  switch (isa) {
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kSse4:
      return "sse4";
    default:
      return "none";
  }
}

const char* name_of(Bf16Isa isa) {
  switch (isa) {
    case Bf16Isa::kAmx:
      return "amx-bf16";
    case Bf16Isa::kAvx512Bf16:
      return "avx512-bf16";
    default:
      return "none";
  }
}

const Products* products_for(DType dtype) {
  if (dtype == DType::kBFloat16) {
    if (const Products* found = bf16_products(detect_bf16_isa())) return found;
  }
  return fp32_products(detect_isa());
}

}  // namespace tessera::cpu
