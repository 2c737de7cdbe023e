// A Config as the C++ text that makes it, and back: by field name, never by position.
#pragma once

#include <charconv>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "contract/types.h"
#include "ops/format.h"

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
  operator T() const;  // NOLINT(google-explicit-constructor): only ever named, to count fields
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

// type_name: as kernels spell it.
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

inline bool parse_literal(std::string_view text, DType& value) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    if (text != literal(dtype)) continue;
    value = dtype;
    return true;
  }
  return false;
}
inline bool parse_literal(std::string_view text, bool& value) {
  value = text == "true";
  return value || text == "false";
}
inline bool parse_literal(std::string_view text, int& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size();
}

// The Config that config_text gave this text for; nothing for any other text, such as that of an older version's
// Config.
template <class Config>
std::optional<Config> config_from_text(const char* type_name, std::string_view text) {
  Config config{};
  bool good = true;
  visit_fields(config, [&](const char* field, const auto& value) {
    const std::string before = format(".{} = ", field);
    const std::size_t found = text.find(before);
    if (found == std::string_view::npos) {
      good = false;
      return;
    }
    const std::size_t begin = found + before.size();
    const std::size_t end = text.find_first_of(",}", begin);
    using Field = std::remove_cvref_t<decltype(value)>;
    // The object itself is not const.
    good = good && end != std::string_view::npos &&
           parse_literal(text.substr(begin, end - begin), const_cast<Field&>(value));
  });
  if (!good || config_text(type_name, config) != text) return std::nullopt;
  return config;
}

}  // namespace tessera::jit
