#include "cpu/thread_pool.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "tests/sanitizers.h"

namespace tessera::cpu {
namespace {

TEST(ThreadPool, every_task_runs_once) {
  for (int threads : {1, 2, 5, 16}) {
    for (int tasks : {0, 1, 2, 7, 1000}) {
      std::vector<std::atomic<int>> runs(static_cast<std::size_t>(tasks) + 1);
      parallel_for(tasks, threads, [&](std::int64_t task, int) { ++runs[static_cast<std::size_t>(task)]; });
      for (int task = 0; task < tasks; ++task) EXPECT_EQ(runs[static_cast<std::size_t>(task)], 1);
      EXPECT_EQ(runs[static_cast<std::size_t>(tasks)], 0);
    }
  }
}

TEST(ThreadPool, a_slot_is_never_shared) {
  constexpr int kThreads = 4;
  int counts[kThreads][16] = {};  // plain memory: a race is ThreadSanitizer's to find
  for (int again = 0; again < 50; ++again) {
    parallel_for(200, kThreads, [&](std::int64_t, int slot) { ++counts[slot][0]; });
  }
  int total = 0;
  for (const auto& count : counts) total += count[0];
  EXPECT_EQ(total, 50 * 200);
}

TEST(ThreadPool, nested_and_concurrent_calls_finish) {
  std::atomic<int> sum{0};
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; ++i) {
    callers.emplace_back([&] {
      for (int again = 0; again < 20; ++again) {
        parallel_for(6, 3, [&](std::int64_t, int) { parallel_for(5, 4, [&](std::int64_t, int) { ++sum; }); });
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(sum, 4 * 20 * 6 * 5);
}

TEST(ThreadPool, a_forked_child_has_its_own_pool) {
  if (tests::sanitizers() == "thread") GTEST_SKIP() << "ThreadSanitizer ends a forked child that starts threads";
  std::atomic<int> sum{0};
  parallel_for(100, 3, [&](std::int64_t, int) { ++sum; });
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(30);  // a deadlock must not hang the test
    std::atomic<int> mine{0};
    parallel_for(100, 3, [&](std::int64_t, int) { ++mine; });
    _exit(mine == 100 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  parallel_for(100, 3, [&](std::int64_t, int) { ++sum; });
  EXPECT_EQ(sum, 200);
}

}  // namespace
}  // namespace tessera::cpu
