// The threads of the CPU backend: one pool per process, started when it is first needed.
#pragma once

#include <cstdint>
#include <type_traits>

namespace tessera::cpu {

using TaskFunction = void (*)(void* context, std::int64_t task, int slot);

// Calls function(context, task, slot) once for every task in [0, tasks), on up to `threads` threads, and returns when
// all are done. slot is in [0, threads), and no two concurrent calls share one, so it may index scratch memory. Tasks
// are handed out in order; if one throws, no more are, and the first exception is thrown again when the others that run
// have ended. The caller works too, so a call makes progress even if no worker is free or none can be started: callers
// may be concurrent or nested, and a child process after fork() starts its own pool.
void parallel_for(std::int64_t tasks, int threads, TaskFunction function, void* context);

// Another pool's loop, instead of the threads here: tessera_parallel_loop. Null: the threads here.
using Loop = std::int32_t (*)(std::int64_t begin, std::int64_t end, std::int64_t grain,
                              void (*body)(std::int64_t first, std::int64_t last, void* context), void* context);
void set_loop(Loop loop);

template <class F>
void parallel_for(std::int64_t tasks, int threads, F&& body) {
  using Body = std::remove_reference_t<F>;
  parallel_for(
      tasks, threads, [](void* context, std::int64_t task, int slot) { (*static_cast<Body*>(context))(task, slot); },
      const_cast<void*>(static_cast<const void*>(&body)));
}

}  // namespace tessera::cpu
