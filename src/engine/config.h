// A Config by names: the fields of each step of a recipe. Tables, explanations and the tuner carry Configs in this form;
// a kernel's host file converts it to and from its own struct, field by field.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "base/dtype.h"

namespace tessera::engine {

struct Field {
  std::string name;
  std::variant<bool, std::int64_t, double, std::string> value;

  bool operator==(const Field&) const = default;
};
using Fields = std::vector<Field>;

struct StepConfig {
  std::string step;  // "main"
  Fields fields;

  bool operator==(const StepConfig&) const = default;
};
using Config = std::vector<StepConfig>;

// {"main": {"dtype": "bf16", "block_q": 128, "masked": true}}: JSON, with a space after each colon and comma.
std::string text_of(const Config& config);
std::string text_of(const Fields& fields);
std::optional<Config> config_from_text(std::string_view text);

inline const Fields* fields_of_step(const Config& config, std::string_view step) {
  const auto at = std::find_if(config.begin(), config.end(), [&](const StepConfig& s) { return s.step == step; });
  return at == config.end() ? nullptr : &at->fields;
}

// T: a struct whose visit_fields names every field: bool, int or DType.
template <class T>
Fields fields_of(const T& config) {
  Fields fields;
  visit_fields(config, [&](const char* name, const auto& value) {
    using Value = std::remove_cvref_t<decltype(value)>;
    if constexpr (std::is_same_v<Value, DType>) {
      fields.push_back({name, std::string(name_of(value))});
    } else if constexpr (std::is_same_v<Value, bool>) {
      fields.push_back({name, value});
    } else {
      fields.push_back({name, static_cast<std::int64_t>(value)});
    }
  });
  return fields;
}

inline bool read_value(const Field& field, bool& to) {
  const bool* value = std::get_if<bool>(&field.value);
  if (value != nullptr) to = *value;
  return value != nullptr;
}
inline bool read_value(const Field& field, int& to) {
  const auto* value = std::get_if<std::int64_t>(&field.value);
  if (value == nullptr || *value != static_cast<int>(*value)) return false;
  to = static_cast<int>(*value);
  return true;
}
inline bool read_value(const Field& field, DType& to) {
  const auto* value = std::get_if<std::string>(&field.value);
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    if (value == nullptr || *value != name_of(dtype)) continue;
    to = dtype;
    return true;
  }
  return false;
}

// The inverse of fields_of. Returns nothing if a field is missing, unknown or of another type, as in a Config of
// another version.
template <class T>
std::optional<T> from_fields(const Fields* fields) {
  if (fields == nullptr) return std::nullopt;
  T config{};
  std::size_t found = 0;
  visit_fields(config, [&](const char* name, const auto& value) {
    const auto at = std::find_if(fields->begin(), fields->end(), [&](const Field& f) { return f.name == name; });
    using Value = std::remove_cvref_t<decltype(value)>;
    // visit_fields takes a const reference; the object itself is not const.
    if (at != fields->end() && read_value(*at, const_cast<Value&>(value))) ++found;
  });
  int visited = 0;
  visit_fields(config, [&](const char*, const auto&) { ++visited; });
  if (found != static_cast<std::size_t>(visited) || fields->size() != found) return std::nullopt;
  return config;
}

// The Config of a recipe whose one step is called "main".
template <class T>
Config main_config(const T& config) {
  return {{"main", fields_of(config)}};
}
template <class T>
std::optional<T> from_main(const Config& config) {
  return config.size() == 1 ? from_fields<T>(fields_of_step(config, "main")) : std::nullopt;
}

}  // namespace tessera::engine
