// `tessera cases`: the cases of a suite as data, for other programs that run the same ones.
#include <memory>

#include "base/format.h"
#include "engine/json.h"
#include "program/commands.h"
#include "program/console.h"
#include "verify/family.h"

namespace tessera::tools {
namespace {

struct Options {
  std::string suite = "quick";
  std::string filter;
  std::string json;
};

int run(const Options& o) {
  Json list = Json::array();
  for (const auto& c : verify::suite(o.suite)) {
    if (c->name.find(o.filter) == std::string::npos) continue;
    if (o.json != "-") print("{}\n", c->name);
    list.push_back({{"name", c->name},
                    {"family", c->family()},
                    {"op", c->op()},
                    {"fields", engine::json_of(c->fields())},
                    {"tags", c->tags},
                    {"flops", c->flops()},
                    {"bytes", c->bytes()},
                    {"unfused_bytes", c->unfused_bytes()}});
  }
  if (list.empty()) return fail(kBadUsage, format("no case of suite {} has '{}' in its name", o.suite, o.filter));
  return write_json(o.json, {{"suite", o.suite}, {"cases", list}});
}

}  // namespace

Command add_cases(App parent) {
  auto o = std::make_shared<Options>();
  const App app = parent.add_subcommand("cases", "List the cases of a suite, with what each asks for");
  app.add_option("--suite", o->suite, "quick, full, hostile, peers, ...")
      .type_name("NAME")
      .one_of(verify::suite_names())
      .shows_default();
  app.add_option("--filter", o->filter, "Only cases with this in their name").type_name("TEXT");
  app.add_option("--json", o->json, "Write names, fields, operations and bytes to this file; -: print them")
      .output_file();
  app.footer(
      "Examples:\n"
      "  tessera cases --suite full --filter bwd/bf16\n"
      "  tessera cases --suite peers --json -");
  return {app, [o] { return run(*o); }};
}

}  // namespace tessera::tools
