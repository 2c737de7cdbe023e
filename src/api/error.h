// The thread's last error, and the wrapper of every C function that can fail.
#pragma once

#include <new>
#include <string>

#include "base/status.h"

namespace tessera::api {

std::string& last_error();

// Runs a body that returns Status. That status, or an exception, becomes the thread's last error and a status code.
template <class Body>
tessera_status guarded(Body&& body) noexcept {
  try {
    const Status status = body();
    last_error() = status.message();
    return status.code();
  } catch (const std::bad_alloc&) {
    last_error().clear();  // no allocation here: a short text fits a string's own buffer
    last_error() = "out of memory";
    return TESSERA_OUT_OF_MEMORY;
  } catch (...) {
    last_error().clear();
    last_error() = "internal error";
    return TESSERA_INTERNAL;
  }
}

}  // namespace tessera::api
