// The subcommands: one file each. add_x declares its flags and returns what runs it.
#pragma once

#include "program/options.h"

namespace tessera::tools {

Command add_doctor(App parent);
Command add_verify(App parent);
Command add_fuzz(App parent);
Command add_bench(App parent);
Command add_explain(App parent);
Command add_compile(App parent);
Command add_cache(App parent);
Command add_kernels(App parent);
Command add_report(App parent);
Command add_tune(App parent);
Command add_cases(App parent);

}  // namespace tessera::tools
