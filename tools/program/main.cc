#include <fmt/format.h>

#include <exception>

#include "program/commands.h"
#include "program/console.h"
#include "tessera/tessera.h"

int main(int argc, char** argv) {
  using namespace tessera::tools;
  CLI::App app{"Tessera: fused transformer kernels for NVIDIA GPUs and the CPU"};
  app.name("tessera");
  app.footer(
      "Exit codes: 0 success, 1 a check failed, 2 bad usage, 3 the device or the compiler is missing.\n"
      "`tessera COMMAND --help` has each command's flags and examples.");
  app.set_version_flag("--version", std::string("tessera ") + tessera_version());
  app.require_subcommand(1);
  app.get_formatter()->column_width(34);

  const Command commands[] = {add_doctor(app),  add_verify(app),  add_fuzz(app),  add_bench(app),
                              add_explain(app), add_compile(app), add_cache(app), add_kernels(app),
                              add_report(app),  add_tune(app),    add_cases(app)};
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& e) {  // --help, --version
    return app.exit(e);
  } catch (const CLI::ParseError& e) {
    // CLI11 would only say that a command is missing.
    const std::vector<std::string> unknown =
        app.get_subcommands().empty() ? app.remaining() : std::vector<std::string>();
    fmt::print(stderr, "error: {}\n", unknown.empty() ? e.what() : fmt::format("there is no command '{}'", unknown[0]));
    std::string command = "tessera";
    for (const CLI::App* sub : app.get_subcommands()) command += " " + sub->get_name();
    fmt::print(stderr, "`{} --help` says what is accepted.\n", command);
    return kBadUsage;
  }
  try {
    for (const Command& command : commands) {
      if (command.app->parsed()) return command.run();
    }
  } catch (const std::exception& e) {
    return fail(kCheckFailed, e.what());
  }
  return kBadUsage;
}
