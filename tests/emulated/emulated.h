// Hopper kernels on the CPU: the headers below ptx/ take the place of those of kernels/, and the threads of a CTA are fibers of
// one CPU thread. What the hardware may do at various times happens as early or as late as a program must expect: wgmma reads and
// adds when it is waited for, TMA stores read shared memory when that is waited for, and TMA loads write at once or later, at
// random. Warps run in random order and fall behind at random. So a missing wait or barrier gives wrong results here in most runs,
// and on a GPU rarely. Registers, alignment and the order of memory accesses of different proxies are not looked at.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>

#define __forceinline__ inline
#define __shared__
#define __align__(bytes) __attribute__((aligned(bytes)))

namespace tessera {

extern unsigned char memory[];  // stands for a CTA's shared memory, as kernels declare it: its address is 0

namespace emulated {

struct Index3 {
  unsigned x = 0, y = 0, z = 0;
};

// What a tensor map stands for: layers of rows of 16-bit elements, in boxes of 64 columns in the widest swizzle.
struct Tensor {
  unsigned short* data;
  long columns, rows, layers;
  long row_stride, layer_stride;
  int box_rows;
};

// Runs a kernel of `threads` threads in each of `ctas` CTAs, those of a cluster at the same time, clusters one after the other.
// Returns what is wrong: threads that wait for each other, loads that nobody waits for.
const char* run(unsigned ctas, int threads, int cluster, unsigned seed, const std::function<void()>& kernel);

// Of the calling thread, its warp and its CTA.
unsigned char* shared(unsigned address, unsigned bytes);
unsigned cluster_rank();
void cluster_arrive();
void cluster_wait();
void wait_until(const std::function<bool()>& holds);
void sync_warp();
void sync_threads();
float shuffle(float value, int lane);
void named_barrier(int barrier, int threads, bool waits);
void mbarrier_init(unsigned mbarrier, unsigned arrivals);
void mbarrier_arrive(unsigned mbarrier, unsigned expected_bytes);
void mbarrier_arrive_at(unsigned mbarrier, unsigned rank);
bool mbarrier_has_completed(unsigned mbarrier, unsigned parity);
// ctas: the bits of their ranks.
void load(const Tensor& from, unsigned to, unsigned mbarrier, unsigned ctas, int x, int y, int z);
void ldmatrix(unsigned (&r)[4], unsigned address);
void stmatrix(unsigned address, const unsigned (&r)[4]);

// Work of a thread that may be done until its group is waited for.
enum class Queue : std::uint8_t { kWgmma, kStores };
void defer(Queue queue, std::function<void()> work);
void commit(Queue queue);
void wait(Queue queue, int pending);

void store(const Tensor& to, unsigned from, int x, int y, int z);  // now

}  // namespace emulated
}  // namespace tessera

inline tessera::emulated::Index3 threadIdx, blockIdx, gridDim;

struct float2 {
  float x, y;
};
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline void __syncwarp() { tessera::emulated::sync_warp(); }
inline void __syncthreads() { tessera::emulated::sync_threads(); }
inline float __shfl_xor_sync(unsigned, float value, int mask) {
  return tessera::emulated::shuffle(value, static_cast<int>(threadIdx.x) % 32 ^ mask);
}
inline int __shfl_sync(unsigned, int value, int lane) {
  float bits;
  std::memcpy(&bits, &value, sizeof bits);
  bits = tessera::emulated::shuffle(bits, lane);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<std::uint64_t>(high) << 32 | low) >> (shift & 31));
}
