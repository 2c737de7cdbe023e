// Peaks by running the instruction and nothing else: independent accumulators in registers, enough of them to cover the
// instruction's latency on both ports. The best of several short runs counts, since interference can only slow a run.
#include "program/ceiling.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace tessera::tools {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

// Runs work(thread) on all threads at once and returns the seconds until the last is done.
double timed(int threads, const std::function<void(int)>& work) {
  std::vector<std::thread> pool;
  const auto begin = Clock::now();
  for (int t = 1; t < threads; ++t) pool.emplace_back(work, t);
  work(0);
  for (std::thread& t : pool) t.join();
  return seconds_since(begin);
}

// A kernel does `rounds` of its loop and returns the operations of one round.
using Kernel = double (*)(std::int64_t rounds);

double peak(Kernel kernel, int threads) {
  std::int64_t rounds = 1 << 12;
  while (timed(1, [&](int) { kernel(rounds); }) < 0.02) rounds *= 2;
  double best = 0;
  for (int repeat = 0; repeat < 7; ++repeat) {
    double per_round = 0;
    const double seconds = timed(threads, [&](int t) {
      const double operations = kernel(rounds);
      if (t == 0) per_round = operations;
    });
    best = std::max(best, per_round * static_cast<double>(rounds) * threads / seconds);
  }
  return best;
}

#if defined(__x86_64__)

// The compiler must assume that the value is read. A macro: a function would not have the caller's target.
#define TESSERA_KEEP(value) asm volatile("" : "+v"(value))

__attribute__((target("avx512f"))) double fma_avx512(std::int64_t rounds) {
  constexpr int kChains = 16;
  __m512 sum[kChains];
  for (int c = 0; c < kChains; ++c) sum[c] = _mm512_set1_ps(static_cast<float>(c));
  __m512 a = _mm512_set1_ps(0.999F), b = _mm512_set1_ps(0.001F);
  TESSERA_KEEP(a);
  TESSERA_KEEP(b);
  for (std::int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 16
    for (int c = 0; c < kChains; ++c) sum[c] = _mm512_fmadd_ps(sum[c], a, b);
  }
  for (int c = 0; c < kChains; ++c) TESSERA_KEEP(sum[c]);
  return kChains * 16 * 2;
}

__attribute__((target("avx2,fma"))) double fma_avx2(std::int64_t rounds) {
  constexpr int kChains = 12;
  __m256 sum[kChains];
  for (int c = 0; c < kChains; ++c) sum[c] = _mm256_set1_ps(static_cast<float>(c));
  __m256 a = _mm256_set1_ps(0.999F), b = _mm256_set1_ps(0.001F);
  TESSERA_KEEP(a);
  TESSERA_KEEP(b);
  for (std::int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 12
    for (int c = 0; c < kChains; ++c) sum[c] = _mm256_fmadd_ps(sum[c], a, b);
  }
  for (int c = 0; c < kChains; ++c) TESSERA_KEEP(sum[c]);
  return kChains * 8 * 2;
}

__attribute__((target("avx512f,avx512bf16"))) double dot_bf16_avx512(std::int64_t rounds) {
  constexpr int kChains = 16;
  __m512 sum[kChains];
  for (int c = 0; c < kChains; ++c) sum[c] = _mm512_setzero_ps();
  __m512i bits = _mm512_setzero_si512();
  TESSERA_KEEP(bits);
  const auto a = (__m512bh)bits;
  for (std::int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 16
    for (int c = 0; c < kChains; ++c) sum[c] = _mm512_dpbf16_ps(sum[c], a, a);
  }
  for (int c = 0; c < kChains; ++c) TESSERA_KEEP(sum[c]);
  return kChains * 32 * 2;
}

// Four accumulator tiles, two of A and two of B: the most that eight tiles allow without waiting.
__attribute__((target("amx-tile,amx-bf16"))) double dot_bf16_amx(std::int64_t rounds) {
  struct alignas(64) TileConfig {
    std::uint8_t palette = 1;
    std::uint8_t start_row = 0;
    std::uint8_t reserved[14] = {};
    std::uint16_t column_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  };
  const TileConfig config;
  asm volatile("" : : "r"(&config) : "memory");  // GCC's intrinsic declares only the first 8 bytes as its input
  _tile_loadconfig(&config);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  _tile_zero(6);
  _tile_zero(7);
  for (std::int64_t r = 0; r < rounds; ++r) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
  return 4.0 * 16 * 16 * 32 * 2;
}

// Linux grants AMX state only on request.
bool amx_allowed() {
  constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr int kTileData = 18;               // XFEATURE_XTILEDATA
  return __builtin_cpu_supports("amx-tile") != 0 && __builtin_cpu_supports("amx-bf16") != 0 &&
         syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

#endif

double multiply_add_plain(std::int64_t rounds) {
  constexpr int kChains = 64;
  float sum[kChains];
  for (int c = 0; c < kChains; ++c) sum[c] = static_cast<float>(c);
  volatile float seed = 0.999F;
  const float a = seed;
  for (std::int64_t r = 0; r < rounds; ++r) {
    for (float& x : sum) x = x * a + 0.001F;
    asm volatile("" : : "r"(sum) : "memory");
  }
  return kChains * 2;
}

inline __attribute__((always_inline)) std::uint64_t folded(const std::uint64_t* from, std::size_t words) {
  std::uint64_t all = 0;
  for (std::size_t n = 0; n < words; ++n) all ^= from[n];
  return all;
}
using Fold = std::uint64_t (*)(const std::uint64_t*, std::size_t);
std::uint64_t fold_plain(const std::uint64_t* from, std::size_t words) { return folded(from, words); }
#if defined(__x86_64__)
__attribute__((target("avx2"))) std::uint64_t fold_avx2(const std::uint64_t* from, std::size_t words) {
  return folded(from, words);
}
__attribute__((target("avx512f,prefer-vector-width=512"))) std::uint64_t fold_avx512(const std::uint64_t* from,
                                                                                     std::size_t words) {
  return folded(from, words);
}
#endif

Fold best_fold() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return fold_avx512;
  if (__builtin_cpu_supports("avx2")) return fold_avx2;
#endif
  return fold_plain;
}

void measure_memory(Ceilings& ceilings) {
  constexpr std::size_t kBytes = std::size_t{256} << 20;  // each of two; well past most last-level caches
  const std::size_t words = kBytes / sizeof(std::uint64_t);
  const std::unique_ptr<std::uint64_t[]> from(new std::uint64_t[words]), to(new std::uint64_t[words]);
  const int threads = ceilings.threads;
  const auto share = [&](int t) { return words * static_cast<std::size_t>(t) / static_cast<std::size_t>(threads); };
  timed(threads, [&](int t) {  // first touch, by the thread that will use it
    std::fill(from.get() + share(t), from.get() + share(t + 1), 1);
    std::fill(to.get() + share(t), to.get() + share(t + 1), 2);
  });
  for (int repeat = 0; repeat < 5; ++repeat) {
    const double copy = timed(threads, [&](int t) {
      std::memcpy(to.get() + share(t), from.get() + share(t), (share(t + 1) - share(t)) * sizeof(std::uint64_t));
    });
    ceilings.copy_bandwidth = std::max(ceilings.copy_bandwidth, 2.0 * kBytes / copy);
  }
}

}  // namespace

void Ceilings::keep_best_of(const Ceilings& other) {
  for (std::size_t n = 0; n < units.size() && n < other.units.size(); ++n) {
    units[n].flops = std::max(units[n].flops, other.units[n].flops);
  }
  copy_bandwidth = std::max(copy_bandwidth, other.copy_bandwidth);
}

const Unit& Ceilings::best_for_16_bit() const {
  return *std::max_element(units.begin(), units.end(), [](const Unit& a, const Unit& b) { return a.flops < b.flops; });
}

Ceilings measure_ceilings(int threads) {
  Ceilings c;
  c.threads = threads;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) {
    c.units.push_back({"fp32 FMA, avx512", peak(fma_avx512, threads)});
  } else if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    c.units.push_back({"fp32 FMA, avx2", peak(fma_avx2, threads)});
  } else {
    c.units.push_back({"fp32 multiply and add", peak(multiply_add_plain, threads)});
  }
  if (__builtin_cpu_supports("avx512bf16")) {
    c.units.push_back({"bf16 dot, avx512", peak(dot_bf16_avx512, threads)});
  }
  if (amx_allowed()) c.units.push_back({"bf16 tiles, amx", peak(dot_bf16_amx, threads)});
#else
  c.units.push_back({"fp32 multiply and add", peak(multiply_add_plain, threads)});
#endif
  measure_memory(c);
  return c;
}

double measure_read_bandwidth(int threads, std::size_t bytes) {
  const std::size_t words = std::max<std::size_t>(bytes / sizeof(std::uint64_t), 1024);
  const std::unique_ptr<std::uint64_t[]> from(new std::uint64_t[words]);
  const auto share = [&](int t) { return words * static_cast<std::size_t>(t) / static_cast<std::size_t>(threads); };
  timed(threads, [&](int t) { std::fill(from.get() + share(t), from.get() + share(t + 1), 1); });
  const Fold fold = best_fold();
  const int passes = static_cast<int>(std::max<std::size_t>(1, (std::size_t{64} << 20) / (words * 8)));
  double best = 0;
  for (int repeat = 0; repeat < 7; ++repeat) {
    const double seconds = timed(threads, [&](int t) {
      for (int pass = 0; pass < passes; ++pass) {
        volatile std::uint64_t sink = fold(from.get() + share(t), share(t + 1) - share(t));
        static_cast<void>(sink);
      }
    });
    best = std::max(best, static_cast<double>(words * 8) * passes / seconds);
  }
  return best;
}

}  // namespace tessera::tools
