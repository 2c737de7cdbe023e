// Workers wait for jobs on a list. A job is a counter of tasks; every thread that joins it, the caller included, takes
// tasks until none is left. Joining takes a slot under the lock; the caller leaves only after every other thread has
// left, so a job can live on its caller's stack. A worker that has just run out of work spins for some tens of
// microseconds before it sleeps: an operation is two or three jobs in a row, and waking a sleeping thread costs as much
// as packing a head.
#include "cpu/thread_pool.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

namespace tessera::cpu {
namespace {

constexpr int kSpins = 2000;
constexpr int kMaxWorkers = 1023;

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// The cores that the threads of a job run on. By itself, the scheduler may wake a worker on its caller's core and take
// milliseconds, longer than a short call lasts, to notice that another core is idle. So a sleeping worker is barred
// from the caller's core before it is woken and allowed everywhere again once it runs, and a worker that starts on a
// core that its job already uses moves to another one.
class Cores {
 public:
  // `allowed`: the cores that this thread may run on by its affinity mask.
  void settle(const cpu_set_t& allowed) {
    const int here = sched_getcpu();
    if (here < 0 || here >= kMost || !take(here)) return;
    cpu_set_t free;
    CPU_ZERO(&free);
    for (int cpu = 0; cpu < kMost; ++cpu) {
      const std::uint64_t word = words_[cpu / 64].load(std::memory_order_relaxed);
      if (CPU_ISSET(cpu, &allowed) && (word >> (cpu % 64) & 1) == 0) CPU_SET(cpu, &free);
    }
    if (CPU_COUNT(&free) == 0 || sched_setaffinity(0, sizeof(free), &free) != 0) return;
    sched_setaffinity(0, sizeof(allowed), &allowed);
    const int now = sched_getcpu();
    if (now >= 0 && now < kMost) take(now);
  }

  // Marks the core as used; true if it was used already.
  bool take(int cpu) {
    const std::uint64_t bit = std::uint64_t{1} << (cpu % 64);
    return (words_[cpu / 64].fetch_or(bit, std::memory_order_relaxed) & bit) != 0;
  }

  static constexpr int kMost = CPU_SETSIZE;

 private:
  std::atomic<std::uint64_t> words_[kMost / 64] = {};
};

struct Worker {
  std::thread thread;
  // All are guarded by the pool's lock.
  pid_t id = 0;  // 0 until it runs
  cpu_set_t allowed;
  bool asleep = false;
  bool barred = false;  // from the core of the caller that woke it
};

struct Job {
  TaskFunction function;
  void* context;
  std::int64_t tasks;
  int slots;  // threads that may join, the caller included
  std::atomic<std::int64_t> next{0};
  int joined = 1;              // slots handed out; guarded by the pool's lock
  std::atomic<int> active{1};  // threads that have joined and not left
  Job* following = nullptr;    // guarded by the pool's lock
  std::atomic<bool> failed{false};
  std::exception_ptr exception;  // the first that a task threw; guarded by `failed`
  Cores cores{};

  bool open() const { return joined < slots && next.load(std::memory_order_relaxed) < tasks; }

  // No exception leaves it: it may be another library's thread. After one, no task begins.
  void work(int slot) noexcept {
    for (;;) {
      const std::int64_t task = next.fetch_add(1, std::memory_order_relaxed);
      if (task >= tasks) return;
      try {
        function(context, task, slot);
      } catch (...) {
        if (!failed.exchange(true)) exception = std::current_exception();
        next.store(tasks, std::memory_order_relaxed);
      }
    }
  }
};

class Pool {
 public:
  explicit Pool(pid_t pid) : pid_(pid) {}

  pid_t pid() const { return pid_; }

  void run(Job& job) {
    const int here = sched_getcpu();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      start_workers(job.slots - 1);
      if (here >= 0 && here < Cores::kMost) {
        job.cores.take(here);
        bar_sleepers(here, job.slots - 1);
      }
      Job** end = &first_;
      while (*end != nullptr) end = &(*end)->following;
      *end = &job;
      posted_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    job.work(0);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      Job** link = &first_;
      while (*link != &job) link = &(*link)->following;
      *link = job.following;
    }
    // No thread can join any more; those that did leave after their current task.
    int spins = 0;
    while (job.active.load(std::memory_order_acquire) != 1) {
      if (++spins < kSpins) {
        pause();
      } else {
        std::this_thread::yield();
      }
    }
  }

  void stop() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
      posted_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker->thread.join();
    workers_.clear();
  }

 private:
  void start_workers(int wanted) {
    if (stopping_) return;
    wanted = std::min(wanted, kMaxWorkers);
    try {
      while (static_cast<int>(workers_.size()) < wanted) {
        auto worker = std::make_unique<Worker>();
        workers_.reserve(workers_.size() + 1);
        worker->thread = std::thread([this, mine = worker.get()] { serve(*mine); });
        workers_.push_back(std::move(worker));
      }
    } catch (const std::system_error&) {
      // Fewer threads than requested: the caller and those that did start share the work.
    } catch (const std::bad_alloc&) {
    }
  }

  // Each costs a system call: beyond a few workers, those that collide move by themselves.
  void bar_sleepers(int cpu, int wanted) {
    constexpr int kMostBarred = 8;
    int left = std::min(wanted, kMostBarred);
    for (auto& worker : workers_) {
      if (left == 0) return;
      if (!worker->asleep) continue;
      --left;
      cpu_set_t elsewhere = worker->allowed;
      CPU_CLR(cpu, &elsewhere);
      if (CPU_COUNT(&elsewhere) == 0) continue;
      worker->barred = sched_setaffinity(worker->id, sizeof(elsewhere), &elsewhere) == 0;
    }
  }

  Job* find_open_job() {
    for (Job* job = first_; job != nullptr; job = job->following) {
      if (job->open()) return job;
    }
    return nullptr;
  }

  void serve(Worker& self) {
    std::unique_lock<std::mutex> lock(mutex_);
    self.id = gettid();
    if (sched_getaffinity(0, sizeof(self.allowed), &self.allowed) != 0) CPU_ZERO(&self.allowed);
    for (;;) {
      if (self.barred) {
        sched_setaffinity(0, sizeof(self.allowed), &self.allowed);
        self.barred = false;
      }
      Job* job = find_open_job();
      if (job != nullptr) {
        const int slot = job->joined++;
        job->active.fetch_add(1, std::memory_order_relaxed);
        lock.unlock();
        job->cores.settle(self.allowed);
        job->work(slot);
        job->active.fetch_sub(1, std::memory_order_release);
        lock.lock();
        continue;
      }
      if (stopping_) return;
      const std::uint64_t seen = posted_.load(std::memory_order_relaxed);
      lock.unlock();
      for (int i = 0; i < kSpins && posted_.load(std::memory_order_relaxed) == seen; ++i) pause();
      lock.lock();
      self.asleep = true;
      wake_.wait(lock, [&] { return posted_.load(std::memory_order_relaxed) != seen; });
      self.asleep = false;
    }
  }

  const pid_t pid_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::unique_ptr<Worker>> workers_;
  Job* first_ = nullptr;
  std::atomic<std::uint64_t> posted_{0};
  bool stopping_ = false;
};

// The pool of the process. Pools are never freed: after fork(), the parent's may be locked by a thread that the child
// does not have, and at exit a caller on another thread may still use one. Its threads are joined when the library is
// unloaded.
struct PoolHolder {
  std::atomic<Pool*> pool{nullptr};

  ~PoolHolder() {
    Pool* mine = pool.load(std::memory_order_acquire);
    if (mine != nullptr && mine->pid() == getpid()) mine->stop();
  }

  Pool* get() {
    const pid_t pid = getpid();
    Pool* current = pool.load(std::memory_order_acquire);
    while (current == nullptr || current->pid() != pid) {
      Pool* fresh = new (std::nothrow) Pool(pid);
      if (fresh == nullptr) return nullptr;
      if (pool.compare_exchange_strong(current, fresh, std::memory_order_acq_rel)) return fresh;
      delete fresh;
    }
    return current;
  }
};

PoolHolder holder;

std::atomic<Loop> other_loop{nullptr};
std::atomic<pid_t> other_loop_of{0};  // the process whose threads it has

Loop loop_of_this_process() {
  const Loop loop = other_loop.load(std::memory_order_acquire);
  return loop != nullptr && other_loop_of.load(std::memory_order_relaxed) == getpid() ? loop : nullptr;
}

}  // namespace

void set_loop(Loop loop) {
  other_loop_of.store(getpid(), std::memory_order_relaxed);
  other_loop.store(loop, std::memory_order_release);
}

void parallel_for(std::int64_t tasks, int threads, TaskFunction function, void* context) {
  const int slots = static_cast<int>(std::min<std::int64_t>(std::max(threads, 1), tasks));
  Job job{function, context, tasks, slots};
  if (slots > 1) {
    if (const Loop loop = loop_of_this_process()) {
      const auto work = [](std::int64_t first, std::int64_t last, void* of) {
        if (first < last) static_cast<Job*>(of)->work(static_cast<int>(first));
      };
      loop(0, slots, 1, work, &job);
    } else if (Pool* pool = holder.get()) {
      pool->run(job);
    }
  }
  job.work(0);  // what no other thread has done
  if (job.exception) std::rethrow_exception(job.exception);
}

}  // namespace tessera::cpu
