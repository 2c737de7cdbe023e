// The subcommands: one file each. add_x declares its flags on the app and returns what runs it; the int is an ExitCode.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace tessera::tools {

using Run = std::function<int()>;

struct Command {
  CLI::App* app;
  Run run;
};

// A check that does not spell itself out in --help, because the option's own text says it better.
inline CLI::Validator quiet(CLI::Validator check) { return check.description(""); }

Command add_doctor(CLI::App& parent);
Command add_verify(CLI::App& parent);
Command add_fuzz(CLI::App& parent);
Command add_bench(CLI::App& parent);
Command add_explain(CLI::App& parent);
Command add_compile(CLI::App& parent);
Command add_cache(CLI::App& parent);
Command add_kernels(CLI::App& parent);
Command add_report(CLI::App& parent);
Command add_tune(CLI::App& parent);
Command add_cases(CLI::App& parent);

}  // namespace tessera::tools
