// A family's problem flags on the command line.
#pragma once

#include <CLI/CLI.hpp>
#include <memory>
#include <string>
#include <vector>

#include "verify/family.h"

namespace tessera::tools {

// The values are filled in when the command line is parsed; flags that were not given are not in the map.
inline std::shared_ptr<verify::FlagValues> add_flags(CLI::App& app, const std::vector<verify::Flag>& flags) {
  auto values = std::make_shared<verify::FlagValues>();
  for (const verify::Flag& flag : flags) {
    if (flag.type.empty()) {
      app.add_flag_callback(
          flag.name, [=, name = flag.name] { (*values)[name] = {}; }, flag.help);
      continue;
    }
    CLI::Option* option = app.add_option_function<std::vector<std::string>>(
        flag.name,
        [=, name = flag.name](std::vector<std::string> given) {
          std::erase(given, std::string());  // what CLI11 gives for a flag that stands alone
          (*values)[name] = std::move(given);
        },
        flag.initial.empty() ? flag.help : flag.help + "; default: " + flag.initial);
    option->expected(flag.least, flag.most)->type_name(flag.type);
    if (flag.most > 1) option->delimiter(',');
    if (!flag.choices.empty()) {
      std::vector<std::string> choices = flag.choices;
      if (flag.least == 0) choices.emplace_back();
      option->check(CLI::IsMember(choices).description(""));
    }
  }
  return values;
}

// The family's examples as lines of a footer.
inline std::string example_lines(const std::string& command, const verify::Family& family) {
  std::string text;
  std::string_view rest = family.examples;
  while (!rest.empty()) {
    const std::size_t end = std::min(rest.find('\n'), rest.size());
    text += "\n  " + command + " " + family.name + " " + std::string(rest.substr(0, end));
    rest.remove_prefix(std::min(end + 1, rest.size()));
  }
  return text;
}

}  // namespace tessera::tools
