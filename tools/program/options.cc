#include "program/options.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <exception>
#include <filesystem>
#include <string_view>

#include "program/console.h"
#include "tessera/tessera.h"

namespace tessera::tools {
namespace {

Option checked(CLI::Option* option, CLI::Validator check) { return Option(option->check(check.description(""))); }

// `said` follows a value that is not accepted. CLI11's own checks would spell out double's range.
Option checked(CLI::Option* option, bool (*accepted)(double), const char* said) {
  const auto check = [=](const std::string& text) {
    double value = 0;
    const bool is_number = CLI::detail::lexical_cast(text, value);
    return is_number && accepted(value) ? std::string() : format("{} is not {}", text, said);
  };
  return checked(option, CLI::Validator(check, ""));
}

// Empty, or why no file can be written there. Checked before a command spends minutes on what it would write.
std::string refusal_of_file(const std::string& file) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  if (file == "-" || file.empty()) return {};
  if (fs::is_directory(file, ignored)) return format("cannot write {}: it is a folder", file);
  const fs::path folder = fs::path(file).parent_path();
  if (!folder.empty() && !fs::is_directory(folder, ignored)) {
    return format("cannot write {}: there is no folder {}", file, folder.string());
  }
  const std::string written = fs::exists(file, ignored) ? file : folder.empty() ? "." : folder.string();
  return access(written.c_str(), W_OK) == 0 ? std::string() : format("cannot write {}", file);
}

template <class T>
Option added(CLI::App* app, const std::string& name, T& to, const std::string& help) {
  return Option(app->add_option(name, to, help));
}

}  // namespace

Option Option::type_name(const std::string& name) const { return Option(option_->type_name(name)); }
Option Option::delimiter(char c) const { return Option(option_->delimiter(c)); }
Option Option::shows_default() const { return Option(option_->capture_default_str()); }
Option Option::excludes(const char* flag) const { return Option(option_->excludes(flag)); }
Option Option::one_of(const std::vector<std::string>& values) const { return checked(option_, CLI::IsMember(values)); }
Option Option::range(int least, int most) const { return checked(option_, CLI::Range(least, most)); }
Option Option::range(double least, double most) const { return checked(option_, CLI::Range(least, most)); }
Option Option::positive() const {
  return checked(
      option_, [](double value) { return value > 0; }, "a number above 0");
}
Option Option::non_negative() const {
  return checked(
      option_, [](double value) { return value >= 0; }, "0 or above");
}
Option Option::output_file() const { return checked(option_->type_name("FILE"), CLI::Validator(refusal_of_file, "")); }

App App::add_subcommand(const std::string& name, const std::string& help) const {
  return App(app_->add_subcommand(name, help));
}
void App::require_subcommand() const { app_->require_subcommand(1); }
void App::fallthrough() const { app_->fallthrough(); }
void App::footer(const std::string& text) const { app_->footer(text); }
void App::callback(std::function<void()> parsed) const { app_->callback(std::move(parsed)); }
bool App::parsed() const { return app_->parsed(); }

Option App::add_flag(const std::string& name, bool& to, const std::string& help) const {
  return Option(app_->add_flag(name, to, help));
}
Option App::add_option(const std::string& name, std::string& to, const std::string& help) const {
  return added(app_, name, to, help);
}
Option App::add_option(const std::string& name, std::vector<std::string>& to, const std::string& help) const {
  return added(app_, name, to, help);
}
Option App::add_option(const std::string& name, int& to, const std::string& help) const {
  return added(app_, name, to, help);
}
Option App::add_option(const std::string& name, std::uint64_t& to, const std::string& help) const {
  // CLI11 would take what is negative or too large for some other number.
  const auto check = [](const std::string& text) {
    const bool is_digits = text.find_first_not_of("0123456789") == std::string::npos;
    return is_digits && text.size() < 20 ? std::string() : format("{} is not a whole number of up to 19 digits", text);
  };
  return checked(app_->add_option(name, to, help), CLI::Validator(check, ""));
}
Option App::add_option(const std::string& name, double& to, const std::string& help) const {
  return added(app_, name, to, help);
}

std::shared_ptr<verify::FlagValues> App::add_flags(const std::vector<verify::Flag>& flags) const {
  auto values = std::make_shared<verify::FlagValues>();
  for (const verify::Flag& flag : flags) {
    if (flag.type.empty()) {
      app_->add_flag_callback(
          flag.name, [=, name = flag.name] { (*values)[name] = {}; }, flag.help);
      continue;
    }
    CLI::Option* option = app_->add_option_function<std::vector<std::string>>(
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
      checked(option, CLI::IsMember(choices));
    }
  }
  return values;
}

std::string example_lines(const std::string& command, const verify::Family& family) {
  std::string text;
  std::string_view rest = family.examples;
  while (!rest.empty()) {
    const std::size_t end = std::min(rest.find('\n'), rest.size());
    text += "\n  " + command + " " + family.name + " " + std::string(rest.substr(0, end));
    rest.remove_prefix(std::min(end + 1, rest.size()));
  }
  return text;
}

int run_commands(int argc, char** argv, const std::vector<Command (*)(App)>& add) {
  CLI::App app{"Tessera: fused transformer kernels for NVIDIA GPUs and the CPU"};
  app.name("tessera");
  app.footer(
      "Exit codes: 0 success, 1 a check failed, 2 bad usage, 3 the device or the compiler is missing.\n"
      "`tessera COMMAND --help` has each command's flags and examples.");
  app.set_version_flag("--version", std::string("tessera ") + tessera_version());
  app.require_subcommand(1);
  app.get_formatter()->column_width(34);

  std::vector<Command> commands;
  for (const auto add_command : add) commands.push_back(add_command(App(&app)));
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& e) {  // --help, --version
    return app.exit(e);
  } catch (const CLI::ParseError& e) {
    // CLI11 would only say that a command is missing.
    const std::vector<std::string> unknown =
        app.get_subcommands().empty() ? app.remaining() : std::vector<std::string>();
    print(stderr, "error: {}\n", unknown.empty() ? e.what() : format("there is no command '{}'", unknown[0]));
    std::string command = "tessera";
    for (const CLI::App* at = &app; !at->get_subcommands().empty();) {
      at = at->get_subcommands()[0];
      command += " " + at->get_name();
    }
    print(stderr, "`{} --help` says what is accepted.\n", command);
    return kBadUsage;
  }
  try {
    for (const Command& command : commands) {
      if (!command.app.parsed()) continue;
      const int code = command.run();
      const bool is_written = std::fflush(stdout) == 0 && std::ferror(stdout) == 0;
      return is_written || code != kSuccess ? code : fail(kCheckFailed, "cannot write to standard output");
    }
  } catch (const std::exception& e) {
    return fail(kCheckFailed, e.what());
  }
  return kBadUsage;
}

}  // namespace tessera::tools
