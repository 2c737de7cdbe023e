// What the emulated GPU notices, one small kernel each (emulated.h).
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "device.h"
#include "ptx/barrier.cuh"
#include "ptx/bulk_copy.cuh"
#include "ptx/cluster.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"

namespace tessera::emulated {
namespace {

constexpr int kRows = 8, kColumns = 64;  // of the box
constexpr unsigned kBoxBytes = kRows * kColumns * 2, kFull = 4 * kBoxBytes;

struct Shape {
  int threads = 64, cluster = 1, clusters = 1;
  unsigned seed = 1;
};
template <class Kernel>
std::string run_kernel(const Shape& grid, const Kernel& kernel) {
  const Launch launch = {.grid = {static_cast<unsigned>(grid.cluster * grid.clusters)},
                         .threads = grid.threads,
                         .cluster = grid.cluster,
                         .shared_bytes = kFull + 64,
                         .seed = grid.seed};
  const char* const wrong = run(launch, kernel);
  return wrong == nullptr ? "" : wrong;
}

bool says(const std::string& message, const char* part) { return message.find(part) != std::string::npos; }

struct Box {
  std::vector<unsigned short> values = std::vector<unsigned short>(kRows * kColumns);
  TensorMap map = map_of({values.data(), {kColumns, kRows, 1, 1}, {1, kColumns, 1, 1}, {kColumns, kRows, 1, 1}});
};

TEST(Emulated, a_kernel_that_waits_for_what_it_needs_runs) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    Box box;
    for (std::size_t i = 0; i < box.values.size(); ++i) box.values[i] = static_cast<unsigned short>(i);
    std::vector<unsigned> seen(64);
    EXPECT_EQ(run_kernel({.seed = seed},
                         [&] {
                           if (threadIdx.x == 0) {
                             tessera::mbarrier_init(kFull, 1);
                             mbarrier_arrive_expect_tx(kFull, kBoxBytes);
                             tma_load(0, box.map, kFull, 0, 0, 0, 0);
                           }
                           __syncthreads();
                           mbarrier_wait_parity(kFull, 0);
                           seen[threadIdx.x] = load_shared_4(threadIdx.x % 4 * 4);
                         }),
              "");
    for (unsigned i = 0; i < 64; ++i) EXPECT_EQ(seen[i], (i % 4 * 2 + 1) << 16 | i % 4 * 2);
  }
}

TEST(Emulated, a_load_that_is_read_too_early_is_not_always_there) {
  std::set<unsigned> seen;
  for (unsigned seed = 0; seed < 20; ++seed) {
    Box box;
    EXPECT_EQ(run_kernel({.seed = seed},
                         [&] {
                           if (threadIdx.x > 0) return;
                           tessera::mbarrier_init(kFull, 1);
                           mbarrier_arrive_expect_tx(kFull, kBoxBytes);
                           tma_load(0, box.map, kFull, 0, 0, 0, 0);
                           seen.insert(load_shared_4(0));
                           mbarrier_wait_parity(kFull, 0);
                         }),
              "");
  }
  EXPECT_EQ(seen.size(), 2u) << "what was there, and the box";
}

TEST(Emulated, a_store_without_a_fence_does_not_see_what_was_written) {
  for (const bool fences : {false, true}) {
    Box box;
    EXPECT_EQ(run_kernel({},
                         [&] {
                           for (unsigned at = threadIdx.x * 4; at < kBoxBytes; at += 64 * 4)
                             store_shared_4(at, 0x70007u);
                           if (fences) fence_proxy_async();
                           __syncthreads();
                           if (threadIdx.x > 0) return;
                           tma_store(box.map, 0, 0, 0, 0, 0);
                           tma_store_commit_group();
                           tma_store_wait_group_read<0>();
                         }),
              "");
    EXPECT_EQ(box.values, std::vector<unsigned short>(kRows * kColumns, fences ? 7 : 0xffff)) << fences;
  }
}

TEST(Emulated, a_barrier_that_is_left_out_shows) {
  std::set<unsigned> seen;
  for (unsigned seed = 0; seed < 20; ++seed) {
    run_kernel({.seed = seed}, [&] {
      if (threadIdx.x == 63) store_shared_4(0, 7);
      if (threadIdx.x == 0) seen.insert(load_shared_4(0));
    });
  }
  EXPECT_EQ(seen.size(), 2u);
}

// One lane releases a stage for its warp; another may not have seen it full yet.
TEST(Emulated, a_stage_that_is_released_before_all_lanes_have_seen_it_shows) {
  for (const bool gathers : {false, true}) {
    std::set<std::string> said;
    for (unsigned seed = 0; seed < 100; ++seed) {
      said.insert(run_kernel({.seed = seed}, [&] {
        constexpr unsigned kEmpty = kFull + kMbarrierBytes, kFills = 4;
        if (threadIdx.x == 0) {
          tessera::mbarrier_init(kFull, 1);
          tessera::mbarrier_init(kEmpty, 1);
        }
        __syncthreads();
        for (unsigned fill = 0; fill < kFills; ++fill) {
          if (threadIdx.x < 32) {
            mbarrier_wait_parity(kFull, fill % 2);
            if (gathers) __syncwarp();
            if (threadIdx.x == 0) tessera::mbarrier_arrive(kEmpty);
          } else if (threadIdx.x == 32) {
            mbarrier_wait_parity(kEmpty, fill % 2 ^ 1);
            tessera::mbarrier_arrive(kFull);
          }
        }
      }));
    }
    EXPECT_EQ(*said.begin(), "") << "no seed lets it end";
    if (gathers) {
      EXPECT_EQ(said.size(), 1u) << *said.rbegin();
    } else {
      EXPECT_NE(said.rbegin()->find("wait for each other"), std::string::npos) << "all seeds let it end";
    }
  }
}

TEST(Emulated, threads_that_wait_for_each_other_are_named) {
  const std::string message = run_kernel({.threads = 128}, [] {
    if (threadIdx.x == 0) tessera::mbarrier_init(kFull, 2);
    __syncthreads();
    if (threadIdx.x < 64) return named_barrier_sync(3, 96);
    mbarrier_wait_parity(kFull, 0);
  });
  EXPECT_TRUE(says(message, "threads wait for each other")) << message;
  EXPECT_TRUE(says(message, "barrier 3 has 64")) << message;
}

TEST(Emulated, accesses_that_are_misaligned_or_outside_end_the_launch) {
  EXPECT_EQ(run_kernel({}, [] { store_shared_16(8, {}); }), "a misaligned address in shared memory");
  EXPECT_EQ(run_kernel({}, [] { load_shared_4(1u << 20); }), "an address beyond shared memory");
  alignas(16) unsigned words[8] = {};
  EXPECT_EQ(run_kernel({}, [&] { store_16(words + 1, {}); }), "a misaligned vector in global memory");
  EXPECT_EQ(run_kernel({}, [&] { cp_async_16(0, words + 1, true); }), "a misaligned source of cp.async");
  void* const nothing = mmap(nullptr, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(nothing, MAP_FAILED);
  EXPECT_EQ(run_kernel({}, [&] { store_8(nothing, {}); }), "an access outside of global memory");
  EXPECT_EQ(run_kernel({}, [] {}), "") << "and the next launch runs";
  munmap(nothing, 4096);
}

TEST(Emulated, wrong_use_of_mbarriers_ends_the_launch) {
  EXPECT_EQ(run_kernel({}, [] { tessera::mbarrier_arrive(kFull); }), "an mbarrier that was not initialised");
  EXPECT_EQ(run_kernel({},
                       [] {
                         if (threadIdx.x > 0) return;
                         tessera::mbarrier_init(kFull, 1);
                         mbarrier_arrive_expect_tx(kFull, 16);
                         tessera::mbarrier_arrive(kFull);
                       }),
            "more arrivals than an mbarrier expects");
}

TEST(Emulated, a_load_that_nobody_waits_for_is_noticed) {
  Box box;
  std::set<std::string> said;
  for (unsigned seed = 0; seed < 20; ++seed) {
    said.insert(run_kernel({.seed = seed}, [&] {
      if (threadIdx.x > 0) return;
      tessera::mbarrier_init(kFull, 1);
      mbarrier_arrive_expect_tx(kFull, kBoxBytes);
      tma_load(0, box.map, kFull, 0, 0, 0, 0);
    }));
  }
  EXPECT_TRUE(said.count("nobody waited for a load") == 1);
}

TEST(Emulated, a_cluster_waits_for_threads_that_run_and_its_memory_is_there_as_long) {
  for (const bool waits : {true, false}) {
    std::set<std::string> said;
    for (unsigned seed = 0; seed < 20; ++seed) {
      said.insert(run_kernel({.cluster = 2, .clusters = 4, .seed = seed}, [&] {
        if (threadIdx.x == 0) tessera::mbarrier_init(kFull, 2);
        cluster_sync();
        if (threadIdx.x >= 32) return;  // exits without arriving again
        if (threadIdx.x < 2) tessera::mbarrier_arrive_at(kFull, threadIdx.x);
        if (waits) cluster_sync();
      }));
    }
    EXPECT_EQ(said.count("an arrival at a CTA that has exited"), waits ? 0u : 1u);
    EXPECT_EQ(said == std::set<std::string>{""}, waits);
  }
}

TEST(Emulated, a_grid_that_starts_early_sees_what_the_preceding_one_wrote_after_it_has_waited) {
  int written = 0;
  std::vector<int> before(64), after(64);
  Grid first({.grid = {1}, .threads = 64, .shared_bytes = 0, .seed = 1}, [&] { written = 1; });
  Grid second({.grid = {1}, .threads = 64, .shared_bytes = 0, .seed = 2}, [&] {
    before[threadIdx.x] = written;
    pdl_wait_and_launch_dependents();
    after[threadIdx.x] = written;
  });
  second.start_early();
  EXPECT_EQ(first.run(), nullptr);
  EXPECT_EQ(second.run(), nullptr);
  EXPECT_EQ(before, std::vector<int>(64, 0));
  EXPECT_EQ(after, std::vector<int>(64, 1));
}

}  // namespace
}  // namespace tessera::emulated
