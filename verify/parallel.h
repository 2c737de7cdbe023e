// Work spread over threads of its own: the oracle, inputs and verify share nothing with the library's thread pool.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace tessera::verify {

inline int machine_threads() { return static_cast<int>(std::max(1U, std::thread::hardware_concurrency())); }

// Calls work(task) for every task below `tasks`, each once. threads 0: as many as the machine has.
template <class Work>
void in_parallel(std::int64_t tasks, int threads, const Work& work) {
  if (threads <= 0) threads = machine_threads();
  std::atomic<std::int64_t> next{0};
  const auto loop = [&] {
    for (std::int64_t t = next++; t < tasks; t = next++) work(t);
  };
  std::vector<std::thread> pool;
  for (int t = 1; t < std::min<std::int64_t>(threads, tasks); ++t) pool.emplace_back(loop);
  loop();
  for (std::thread& t : pool) t.join();
}

// Calls work(begin, end) for parts of [0, count); short ranges run on the calling thread.
template <class Work>
void over_range(std::int64_t count, const Work& work) {
  constexpr std::int64_t kPart = 1 << 18;
  in_parallel((count + kPart - 1) / kPart, 0,
              [&](std::int64_t t) { work(t * kPart, std::min(count, (t + 1) * kPart)); });
}

}  // namespace tessera::verify
