#include "cpu/thread_pool.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <new>
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

std::atomic<int> loops{0};

// A loop of the caller's, on two threads, the second of which has all but one of the numbers.
std::int32_t loop_on_two_threads(std::int64_t begin, std::int64_t end, std::int64_t,
                                 void (*body)(std::int64_t first, std::int64_t last, void* context), void* context) {
  ++loops;
  std::thread other([=] { body(begin + 1, end, context); });
  body(begin, begin + 1, context);
  other.join();
  return 0;
}

std::int32_t loop_that_fails(std::int64_t, std::int64_t, std::int64_t, void (*)(std::int64_t, std::int64_t, void*),
                             void*) {
  ++loops;
  return 1;
}

TEST(ThreadPool, another_loop_runs_every_task_once_even_if_it_fails) {
  for (const Loop loop : {loop_on_two_threads, loop_that_fails}) {
    loops = 0;
    set_loop(loop);
    std::vector<std::atomic<int>> runs(1000);
    int slots[4][16] = {};  // plain memory, as above
    parallel_for(1000, 4, [&](std::int64_t task, int slot) {
      ++runs[static_cast<std::size_t>(task)];
      ++slots[slot][0];
    });
    set_loop(nullptr);
    EXPECT_EQ(loops, 1);
    for (const auto& each : runs) EXPECT_EQ(each, 1);
  }
}

// As PyTorch's does: what a body throws ends in the loop.
std::int32_t loop_that_catches(std::int64_t begin, std::int64_t end, std::int64_t,
                               void (*body)(std::int64_t first, std::int64_t last, void* context), void* context) {
  std::int32_t failures = 0;
  for (std::int64_t i = begin; i < end; ++i) {
    try {
      body(i, i + 1, context);
    } catch (...) {
      ++failures;
    }
  }
  return failures;
}

TEST(ThreadPool, what_a_task_throws_reaches_the_caller_whatever_thread_it_was) {
  for (const Loop loop : {Loop{nullptr}, Loop{loop_that_catches}, Loop{loop_on_two_threads}}) {
    set_loop(loop);
    for (std::int64_t bad = 0; bad < 20; ++bad) {
      std::atomic<int> done{0};
      EXPECT_THROW(parallel_for(20, 3,
                                [&](std::int64_t task, int) {
                                  if (task == bad) throw std::bad_alloc();
                                  ++done;
                                }),
                   std::bad_alloc);
      EXPECT_LT(done, 20);
    }
    std::atomic<int> after{0};
    parallel_for(20, 3, [&](std::int64_t, int) { ++after; });
    EXPECT_EQ(after, 20);
    set_loop(nullptr);
  }
}

TEST(ThreadPool, a_forked_child_does_not_use_its_parents_loop) {
  if (tests::sanitizers() == "thread") GTEST_SKIP() << "ThreadSanitizer ends a forked child that starts threads";
  loops = 0;
  set_loop(loop_on_two_threads);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(30);
    std::atomic<int> mine{0};
    parallel_for(100, 3, [&](std::int64_t, int) { ++mine; });
    _exit(mine == 100 && loops == 0 ? 0 : 1);
  }
  set_loop(nullptr);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

}  // namespace
}  // namespace tessera::cpu
