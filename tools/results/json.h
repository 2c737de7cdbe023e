// JSON as the result files hold it: keys keep their order, and a value of the wrong type counts as absent.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace tessera::results {

using Json = nlohmann::ordered_json;

inline std::string text_at(const Json& object, const char* key) {
  const auto at = object.find(key);
  return at != object.end() && at->is_string() ? at->get<std::string>() : "";
}

inline double number_at(const Json& object, const char* key) {
  const auto at = object.find(key);
  return at != object.end() && at->is_number() ? at->get<double>() : 0;
}

inline bool flag_at(const Json& object, const char* key) {
  const auto at = object.find(key);
  return at != object.end() && at->is_boolean() && at->get<bool>();
}

}  // namespace tessera::results
