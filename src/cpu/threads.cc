#include "cpu/threads.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>

namespace tessera::cpu {
namespace {

std::atomic<int> requested{0};  // 0: the default

}  // namespace

int default_threads() {
  if (const char* text = std::getenv("TESSERA_NUM_THREADS")) {
    char* end = nullptr;
    const long value = std::strtol(text, &end, 10);
    if (end != text && *end == '\0' && value >= 1 && value <= 1024) return static_cast<int>(value);
  }
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
  return 1;
}

void set_threads(int threads) { requested.store(threads, std::memory_order_relaxed); }

int threads_in_use() {
  const int threads = requested.load(std::memory_order_relaxed);
  return threads > 0 ? threads : default_threads();
}

}  // namespace tessera::cpu
