// Bodies of the C ABI that all families share: version, errors, threads, plans.
#include <cstdint>
#include <string>

#include "api/error.h"
#include "api/plan.h"
#include "base/format.h"
#include "base/tensor.h"
#include "cpu/thread_pool.h"
#include "cpu/threads.h"
#include "tessera/tessera.h"

using tessera::format;
using tessera::invalid;
using tessera::Status;
using tessera::api::guarded;

std::string& tessera::api::last_error() {
  thread_local std::string message;
  return message;
}

const char* tessera_version(void) {
#define TESSERA_TEXT_(x) #x
#define TESSERA_TEXT(x) TESSERA_TEXT_(x)
  return TESSERA_TEXT(TESSERA_VERSION_MAJOR) "." TESSERA_TEXT(TESSERA_VERSION_MINOR) "." TESSERA_TEXT(
      TESSERA_VERSION_PATCH);
#undef TESSERA_TEXT
#undef TESSERA_TEXT_
}

const char* tessera_status_name(tessera_status status) {
  switch (status) {
    case TESSERA_OK:
      return "ok";
    case TESSERA_INVALID_ARGUMENT:
      return "invalid_argument";
    case TESSERA_UNSUPPORTED:
      return "unsupported";
    case TESSERA_OUT_OF_MEMORY:
      return "out_of_memory";
    case TESSERA_NO_DEVICE:
      return "no_device";
    case TESSERA_COMPILE_FAILED:
      return "compile_failed";
    case TESSERA_CUDA_FAILED:
      return "cuda_failed";
    case TESSERA_INTERNAL:
      return "internal";
  }
  return "unknown";
}

const char* tessera_last_error(void) { return tessera::api::last_error().c_str(); }

tessera_status tessera_set_num_threads(int32_t threads) {
  return guarded([&]() -> Status {
    constexpr std::int32_t kMost = 1024;
    if (threads < 0 || threads > kMost) {
      return invalid(format("threads is {}; 1 to {} are accepted, 0 for the default", threads, kMost));
    }
    tessera::cpu::set_threads(threads);
    return {};
  });
}

tessera_status tessera_set_parallel_loop(tessera_parallel_loop loop) {
  tessera::cpu::set_loop(loop);
  return TESSERA_OK;
}

int32_t tessera_num_threads(void) { return tessera::cpu::threads_in_use(); }

void tessera_plan_destroy(tessera_plan* plan) { delete plan; }

size_t tessera_plan_workspace(const tessera_plan* plan) { return plan != nullptr ? plan->plan->workspace : 0; }

const char* tessera_plan_explain(const tessera_plan* plan, tessera_explain_format format) {
  if (plan == nullptr) return "";
  try {
    return format == TESSERA_EXPLAIN_JSON ? plan->plan->json() : plan->plan->text();
  } catch (...) {
    return "";  // out of memory
  }
}
