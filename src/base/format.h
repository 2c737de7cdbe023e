// A wrapper of {fmt}: its formatting code is compiled once, in format.cc, instead of in every file that formats a
// message, which would take most of the build's time.
#pragma once

#include <fmt/core.h>

#include <string>

namespace tessera {

std::string vformat(fmt::string_view text, fmt::format_args args);

template <class... Args>
std::string format(fmt::format_string<Args...> text, Args&&... args) {
  return tessera::vformat(text, fmt::make_format_args(args...));
}

template <class Range>
std::string join(const Range& range, const char* separator) {
  std::string text;
  const char* between = "";
  for (const auto& element : range) {
    text += between + format("{}", element);
    between = separator;
  }
  return text;
}

}  // namespace tessera
