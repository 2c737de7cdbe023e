// GPU kernels on the CPU: the headers below ptx/ take the place of those of kernels/, and the threads of a CTA are fibers of one
// CPU thread. What the hardware may do at various times happens as early or as late as a program must expect, at random: wgmma and
// TMA stores read shared memory when they are committed or when they are waited for, copies of cp.async likewise, and TMA loads
// write at once or later. Warps run in random order and fall behind at random, and so do CTAs. So a missing wait or barrier gives
// wrong results here in most runs, and on a GPU rarely. What wgmma, TMA stores and bulk copies read in shared memory is what TMA
// wrote there, or a thread that has fenced since (fence.proxy.async). Accesses outside of memory, misaligned ones, deadlocks and
// loads that nobody waits for end the launch with a message. Registers and the order of accesses to global memory are not looked at.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#pragma GCC visibility push(default)
namespace tessera::emulated {

struct Index3 {
  unsigned x = 1, y = 1, z = 1;
};

struct Launch {
  Index3 grid;
  int threads;            // of a CTA
  int cluster = 1;        // CTAs
  int at_once = 3;        // clusters that run at the same time; they start in the order of their index
  unsigned shared_bytes;  // dynamic shared memory
  unsigned seed;
};

// A launch that runs the kernel in each thread.
struct Machine;
constexpr const char* kOutsideOfMemory = "an access outside of global memory";
class Grid {
 public:
  Grid(const Launch& launch, std::function<void()> kernel);
  ~Grid();
  // Starts the first CTAs, whose threads run until they wait for what the preceding grid wrote (PDL).
  void start_early();
  // Runs it to its end. Returns what is wrong, or null: threads that wait for each other, loads that nobody waits for, ...
  const char* run();

 private:
  std::unique_ptr<Machine> machine_;
};
inline const char* run(const Launch& launch, std::function<void()> kernel) {
  return Grid(launch, std::move(kernel)).run();
}

// What a tensor map stands for: elements of 16 bits, the contiguous axis first, in boxes whose first extent, 64, 32 or 16, is
// that of the swizzle.
struct Tensor {
  unsigned short* data;
  long extents[4];
  long strides[4];  // in elements; the first is 1
  int box[4];
};

// Of the calling thread, its warp, its CTA and its cluster.
struct Window {
  unsigned char* data;
  unsigned bytes;
};
Window shared_memory();  // dynamic, then static
Window async_view();     // of the same, without what a thread wrote and has not fenced
void* static_shared(const void* site, unsigned bytes);
void load_shared(void* value, unsigned address, unsigned bytes);
void store_shared(unsigned address, const void* value, unsigned bytes);
void fence_async();  // fence.proxy.async
void require(bool holds, const char* otherwise);
inline bool is_aligned(const void* address, unsigned bytes) {
  return reinterpret_cast<std::uintptr_t>(address) % bytes == 0;
}
void wait(bool (*holds)(const void*), const void* of);
void yield();
void fall_behind();
void progress();  // somebody who waits may go on
void wait_for_preceding_grid();
void sync_warp();
// own: words of this lane; all: of every lane, one lane after the other.
void exchange(const unsigned* own, int words, unsigned* all);
void named_barrier(int barrier, int threads, bool waits);
void sync_threads();
unsigned cluster_rank();
void cluster_arrive();
void cluster_wait();
void mbarrier_init(unsigned mbarrier, unsigned arrivals);
void mbarrier_arrive(unsigned mbarrier, unsigned expected_bytes);
void mbarrier_arrive_at(unsigned mbarrier, unsigned rank);
bool mbarrier_has_completed(unsigned mbarrier, unsigned parity);
// ctas: the bits of their ranks.
void load(const Tensor& from, unsigned to, unsigned mbarrier, unsigned ctas, const int (&at)[4]);
void store(const Tensor& to, unsigned from, const int (&at)[4]);  // now
// Addresses in the cluster.
unsigned cluster_address(unsigned address, unsigned rank);
void store_cluster(unsigned address, const void* value, unsigned bytes);
void copy_to_cluster(unsigned to, unsigned from, unsigned bytes, unsigned mbarrier);

// Work of a thread that may be done until its group is waited for.
enum class Queue : std::uint8_t { kWgmma, kStores, kCopies };
void defer(Queue queue, std::function<void()> work);
void commit(Queue queue);
void wait(Queue queue, int pending);
void mbarrier_arrive_after_copies(unsigned mbarrier);

template <class Holds>
void wait_until(const Holds& holds) {
  if (!holds()) wait([](const void* of) { return (*static_cast<const Holds*>(of))(); }, &holds);
}
template <class Value>
Value& of_cta(const void* site) {
  return *static_cast<Value*>(static_shared(site, sizeof(Value)));
}

}  // namespace tessera::emulated

extern tessera::emulated::Index3 threadIdx, blockIdx, blockDim, gridDim;
#pragma GCC visibility pop
