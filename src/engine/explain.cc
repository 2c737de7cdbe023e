#include "engine/explain.h"

#include "base/format.h"
#include "engine/json.h"

namespace tessera::engine {
namespace {

std::string bytes_text(std::size_t bytes) {
  if (bytes < 1024) return format("{} B", bytes);
  if (bytes < 1024 * 1024) return format("{:.1f} KiB", static_cast<double>(bytes) / 1024);
  return format("{:.1f} MiB", static_cast<double>(bytes) / (1024 * 1024));
}

Json json_of(const Explanation::Option& option) {
  return {{"kernel", option.kernel},
          {"config", json_of(option.config)},
          {"workspace", option.workspace},
          {option.tuned ? "measured_us" : "predicted_us", option.microseconds},
          {"why", option.why},
          {"tuned", option.tuned}};
}

}  // namespace

std::string text_of(const Explanation& e) {
  std::string text = format("{}\non {}\n", e.problem, e.device);
  if (e.options.empty()) text += "no kernel of this version serves it\n";
  const char* verdict = "chosen ";
  for (const Explanation::Option& option : e.options) {
    const double time = option.microseconds;
    const std::string us = time < 1000 ? format("{:.3g}", time) : format("{:.0f}", time);
    text += format("{} {}: {}; {} {} us, workspace {}\n        {}\n", verdict, option.kernel, option.why,
                   option.tuned ? "measured" : "predicted", us, bytes_text(option.workspace), text_of(option.config));
    verdict = "offered";
  }
  for (const Refusal& r : e.refusals) text += format("refused {}: {}\n", r.kernel, r.reason);
  return text;
}

std::string json_text_of(const Explanation& e) {
  Json json{{"family", e.family}, {"op", e.op},        {"problem", e.problem},     {"fields", json_of(e.fields)},
            {"device", e.device}, {"chosen", nullptr}, {"offered", Json::array()}, {"refused", Json::array()}};
  for (const Explanation::Option& option : e.options) {
    if (json["chosen"].is_null()) {
      json["chosen"] = json_of(option);
    } else {
      json["offered"].push_back(json_of(option));
    }
  }
  for (const Refusal& r : e.refusals) json["refused"].push_back({{"kernel", r.kernel}, {"reason", r.reason}});
  return json.dump(2);
}

}  // namespace tessera::engine
