// A Config as the C++ text that initialises it: by field name, never by position.
#pragma once

#include <string>

#include "base/format.h"
#include "tile/types.h"

namespace tessera::jit {

inline std::string literal(DType dtype) {
  return dtype == DType::kFloat32   ? "DType::kFloat32"
         : dtype == DType::kFloat16 ? "DType::kFloat16"
                                    : "DType::kBFloat16";
}
inline std::string literal(bool value) { return value ? "true" : "false"; }
inline std::string literal(int value) { return format("{}", value); }

struct AnyField {
  template <class T>
  operator T() const;  // NOLINT(google-explicit-constructor): never called, only named, to count fields
};

template <class Config, class... Fields>
constexpr int count_fields() {
  if constexpr (requires { Config{Fields{}..., AnyField{}}; }) {
    return count_fields<Config, Fields..., AnyField>();
  } else {
    return sizeof...(Fields);
  }
}

template <class Config>
constexpr int count_visited() {
  int count = 0;
  visit_fields(Config{}, [&count](const char*, const auto&) { ++count; });
  return count;
}

// type_name: as the kernels spell it.
template <class Config>
std::string config_text(const char* type_name, const Config& config) {
  static_assert(count_fields<Config>() == count_visited<Config>(), "visit_fields must name every field of the Config");
  std::string text = std::string(type_name) + "{";
  const char* separator = "";
  visit_fields(config, [&](const char* field, const auto& value) {
    text += format("{}.{} = {}", separator, field, literal(value));
    separator = ", ";
  });
  return text + "}";
}

}  // namespace tessera::jit
