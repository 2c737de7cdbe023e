// How a command declares its command line. CLI11 is behind this, included by options.cc alone, because it takes seconds to
// compile.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "verify/family.h"

namespace CLI {  // NOLINT(readability-identifier-naming): as CLI11 has it
class App;
class Option;
}  // namespace CLI

namespace tessera::tools {

class Option {
 public:
  explicit Option(CLI::Option* option) : option_(option) {}

  Option type_name(const std::string& name) const;
  Option delimiter(char c) const;  // between values
  Option shows_default() const;    // the variable's value as it is now, in --help
  Option excludes(const char* flag) const;
  // Values that are accepted. --help does not spell them out, because the option's own text says it better.
  Option one_of(const std::vector<std::string>& values) const;
  Option range(int least, int most) const;
  Option range(double least, double most) const;
  Option positive() const;
  Option non_negative() const;
  Option output_file() const;  // "-", or a file in a folder that can be written to

 private:
  CLI::Option* option_;
};

// A command, or a subcommand of one. Copies are the same command.
class App {
 public:
  explicit App(CLI::App* app) : app_(app) {}

  App add_subcommand(const std::string& name, const std::string& help) const;
  void require_subcommand() const;
  void fallthrough() const;  // flags that it does not know are its parent's
  void footer(const std::string& text) const;
  void callback(std::function<void()> parsed) const;
  bool parsed() const;

  Option add_flag(const std::string& name, bool& to, const std::string& help) const;
  Option add_option(const std::string& name, std::string& to, const std::string& help) const;
  Option add_option(const std::string& name, std::vector<std::string>& to, const std::string& help) const;
  Option add_option(const std::string& name, int& to, const std::string& help) const;
  Option add_option(const std::string& name, std::uint64_t& to, const std::string& help) const;
  Option add_option(const std::string& name, double& to, const std::string& help) const;

  // A family's problem flags. The values are filled in when the command line is parsed; flags that were not given are not
  // in the map.
  std::shared_ptr<verify::FlagValues> add_flags(const std::vector<verify::Flag>& flags) const;

 private:
  CLI::App* app_;
};

// The family's examples as lines of a footer.
std::string example_lines(const std::string& command, const verify::Family& family);

using Run = std::function<int()>;  // returns an ExitCode

struct Command {
  App app;
  Run run;
};

// Parses, and runs the command that was given. `add` declares the commands.
int run_commands(int argc, char** argv, const std::vector<Command (*)(App)>& add);

}  // namespace tessera::tools
