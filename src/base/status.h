// Errors as values: the library does not abort or print, and no exception leaves a room.
#pragma once

#include <string>
#include <utility>
#include <variant>

#include "tessera/tessera.h"

namespace tessera {

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(tessera_status code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == TESSERA_OK; }
  tessera_status code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  tessera_status code_ = TESSERA_OK;
  std::string message_;
};

// A value, or the status that says why there is none.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::move(value)) {}         // NOLINT(google-explicit-constructor)
  Result(Status status) : state_(std::move(status)) {}  // NOLINT(google-explicit-constructor)
  // A value to be filled in place: for large values that are made at every call.
  explicit Result(std::in_place_t) : state_(std::in_place_type<T>) {}

  bool ok() const { return std::holds_alternative<T>(state_); }
  const Status& status() const { return std::get<Status>(state_); }
  T& value() { return std::get<T>(state_); }
  const T& value() const { return std::get<T>(state_); }
  T& operator*() { return value(); }
  const T& operator*() const { return value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }

 private:
  std::variant<T, Status> state_;
};

}  // namespace tessera
