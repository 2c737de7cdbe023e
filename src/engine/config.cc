#include "engine/config.h"

#include <nlohmann/json.hpp>

#include "engine/json.h"

namespace tessera::engine {

Json json_of(const Fields& fields) {
  Json object = Json::object();
  for (const Field& field : fields) std::visit([&](const auto& value) { object[field.name] = value; }, field.value);
  return object;
}

Json json_of(const Config& config) {
  Json object = Json::object();
  for (const StepConfig& step : config) object[step.step] = json_of(step.fields);
  return object;
}

namespace {

// dump() leaves out the spaces that make a long line readable.
std::string spaced(const Json& json) {
  if (!json.is_object()) return json.dump();
  std::string text = "{";
  const char* separator = "";
  for (const auto& [name, value] : json.items()) {
    text += separator + Json(name).dump() + ": " + spaced(value);
    separator = ", ";
  }
  return text + "}";
}

}  // namespace

std::string text_of(const Config& config) { return spaced(json_of(config)); }
std::string text_of(const Fields& fields) { return spaced(json_of(fields)); }

std::optional<Config> config_from_text(std::string_view text) {
  const Json json = Json::parse(text, nullptr, false);
  if (!json.is_object()) return std::nullopt;
  Config config;
  for (const auto& [step, fields] : json.items()) {
    if (!fields.is_object()) return std::nullopt;
    StepConfig& to = config.emplace_back();
    to.step = step;
    for (const auto& [name, value] : fields.items()) {
      if (value.is_boolean()) {
        to.fields.push_back({name, value.get<bool>()});
      } else if (value.is_number_integer()) {
        to.fields.push_back({name, value.get<std::int64_t>()});
      } else if (value.is_string()) {
        to.fields.push_back({name, value.get<std::string>()});
      } else {
        return std::nullopt;
      }
    }
  }
  return config;
}

}  // namespace tessera::engine
