// `tessera explain`: which kernel serves a problem, and why the others do not.
#include <charconv>
#include <memory>
#include <optional>

#include "base/format.h"
#include "program/commands.h"
#include "program/console.h"
#include "verify/family.h"

namespace tessera::tools {
namespace {

struct Options {
  std::vector<std::string> archs{"cpu"};
  std::string json;
};

// "cuda" and "cuda:N" are GPUs of this machine; anything else is an architecture.
std::optional<tessera_device> present_gpu(const std::string& arch) {
  if (arch == "cuda") return tessera_device{TESSERA_CUDA, 0};
  std::int32_t index = 0;
  const char* const end = arch.data() + arch.size();
  if (arch.rfind("cuda:", 0) != 0) return std::nullopt;
  const auto [stop, error] = std::from_chars(arch.data() + 5, end, index);
  if (error != std::errc() || stop != end || index < 0) return std::nullopt;
  return tessera_device{TESSERA_CUDA, index};
}

int run(const verify::Family& family, const verify::FlagValues& values, const Options& o) {
  Json answers = Json::array();
  bool first = true;
  for (const std::string& arch : o.archs) {
    const std::optional<tessera_device> gpu = present_gpu(arch);
    const tessera_device device = gpu.value_or(tessera_device{TESSERA_CPU, 0});
    const char* const asked = gpu ? nullptr : arch.c_str();
    const auto text = family.explain(values, device, asked, TESSERA_EXPLAIN_TEXT);
    if (!text.ok()) return fail(text.status());
    if (o.json != "-") print("{}{}", first ? "" : "\n", *text);
    first = false;
    const auto json = family.explain(values, device, asked, TESSERA_EXPLAIN_JSON);
    if (!json.ok()) return fail(json.status());
    Json answer = Json::parse(*json);
    answer["arch"] = arch;
    answers.push_back(std::move(answer));
  }
  return write_json(o.json, {{"answers", answers}});
}

}  // namespace

Command add_explain(App parent) {
  auto o = std::make_shared<Options>();
  const App app = parent.add_subcommand("explain", "Say which kernel serves a problem, and why the others do not");
  app.require_subcommand();
  const auto run_parsed = std::make_shared<Run>();
  std::string examples = "Examples:";
  for (const verify::Family* family : verify::families()) {
    const App sub = app.add_subcommand(family->name, format("A problem of {}", family->name));
    const auto values = sub.add_flags(family->flags());
    sub.add_option("--arch", o->archs,
                   "cpu, sm_75 ... sm_90a, which need not be present, or cuda:N, which is, with what was tuned on it; "
                   "separated by commas")
        .type_name("ARCH")
        .delimiter(',')
        .shows_default();
    sub.add_option("--json", o->json, "Write the answers to this file; -: print them instead of the text")
        .output_file();
    const std::string own = example_lines("tessera explain", *family);
    sub.footer("Examples:" + own);
    examples += own;
    sub.callback([=] { *run_parsed = [=] { return run(*family, *values, *o); }; });
  }
  app.footer(examples);
  return {app, [run_parsed] { return (*run_parsed)(); }};
}

}  // namespace tessera::tools
