// `tessera compile`: the compile gate. Every candidate of every kernel, for GPUs that need not be present.
#include <memory>
#include <set>
#include <thread>

#include "base/format.h"
#include "jit/gate.h"
#include "jit/nvrtc.h"
#include "program/commands.h"
#include "program/console.h"
#include "program/sources.h"
#include "verify/family.h"

namespace tessera::tools {
namespace {

struct Options {
  std::vector<std::string> archs = verify::gate_archs();
  std::string kernel;
  std::string json;
  int jobs = 0;
  bool fresh = false;
  bool progress = false;
  bool stop = false;
  bool brief = false;
  bool pairs = false;
  bool ptx = false;
};

Json json_of(const jit::GateRow& row) {
  Json json{{"kernel", row.kernel},
            {"config", row.config},
            {"arch", row.arch},
            {"registers", row.resources.registers},
            {"spill_store_bytes", row.resources.spill_store_bytes},
            {"spill_load_bytes", row.resources.spill_load_bytes},
            {"stack_bytes", row.resources.stack_bytes},
            {"static_smem_bytes", row.resources.static_smem_bytes},
            {"dynamic_smem_bytes", row.dynamic_smem_bytes},
            {"wgmma_serialized", row.resources.wgmma_serialized},
            {"seconds", row.seconds},
            {"origin", jit::name_of(row.origin)},
            {"passed", row.passed()}};
  if (!row.passed()) json["failure"] = row.failure;
  return json;
}

int run(const Options& o) {
  const Result<jit::NvrtcInfo> nvrtc = jit::nvrtc_info();
  if (!nvrtc.ok()) return fail(kMissing, nvrtc.status().message());

  std::vector<jit::CompileRequest> requests;
  for (const std::string& arch : o.archs) {
    std::set<std::string> seen;  // headers
    for (const jit::KernelInstance& instance : verify::gate_instances(arch)) {
      if (instance.name.find(o.kernel) == std::string::npos) continue;
      if (!seen.insert(instance.header).second && o.brief) continue;
      requests.push_back({instance, {arch, o.ptx}, {}, {}});
    }
  }
  if (requests.empty()) {
    return fail(kBadUsage, format("no kernel for {} has '{}' in its name", join(o.archs, ", "), o.kernel));
  }

  if (o.pairs) requests = jit::pairwise(requests);

  jit::GateReport report;
  jit::GateOptions options;
  options.threads = o.jobs > 0 ? o.jobs : static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  options.use_cache = !o.fresh;
  {
    Progress progress("compile", requests.size(), o.progress);
    options.progress = [&](const jit::GateRow& row, int, int) { progress.step(row.kernel + " " + row.arch); };
    if (!o.stop) {
      Result<jit::GateReport> all = jit::run_gate(requests, options);
      if (!all.ok()) return fail(kMissing, all.status().message());
      report = std::move(*all);
    } else {
      for (const jit::CompileRequest& request : requests) {
        Result<jit::GateReport> one = jit::run_gate({request}, options);
        if (!one.ok()) return fail(kMissing, one.status().message());
        report.seconds += one->seconds;
        report.rows.push_back(one->rows.front());
        if (one->failures() > 0) break;
      }
    }
  }

  using Align = Table::Align;
  Table table({{"kernel", Align::kLeft},
               {"arch", Align::kLeft},
               {"registers"},
               {"spills"},
               {"smem"},
               {"compile"},
               {"", Align::kLeft}});
  Json rows = Json::array();
  for (const jit::GateRow& row : report.rows) {
    const jit::Resources& r = row.resources;
    const bool known = r.registers >= 0;
    const auto number = [&](int value) { return known ? format("{}", value) : std::string("-"); };
    table.add({row.kernel, row.arch, number(r.registers), number(r.spill_store_bytes + r.spill_load_bytes),
               number(r.static_smem_bytes + row.dynamic_smem_bytes),
               row.origin == jit::Origin::kCompiled ? seconds_text(row.seconds) : "cached",
               row.passed() ? paint(Style::kGood, "ok") : paint(Style::kBad, "FAILED")});
    rows.push_back(json_of(row));
  }
  table.print();
  for (const jit::GateRow& row : report.rows) {
    if (!row.passed()) print("\n{} {} {}\n{}\n", paint(Style::kBad, "failed"), row.kernel, row.arch, row.failure);
  }
  const int bad = report.failures();
  print("\n{} of {} passed in {}, NVRTC {}.{}\n", report.rows.size() - static_cast<std::size_t>(bad),
        report.rows.size(), seconds_text(report.seconds), nvrtc->major, nvrtc->minor);

  Json json{{"nvrtc", format("{}.{}", nvrtc->major, nvrtc->minor)},
            {"archs", o.archs},
            {"failed", bad},
            {"seconds", report.seconds},
            {"rows", rows}};
  note_sources(json);
  if (const int code = write_json(o.json, json); code != kSuccess) return code;
  return bad == 0 ? kSuccess : kCheckFailed;
}

}  // namespace

Command add_compile(App parent) {
  auto o = std::make_shared<Options>();
  const App app = parent.add_subcommand("compile", "Compile every kernel without a GPU and read ptxas's report");
  app.add_option("--arch", o->archs, "Architectures, separated by commas")
      .type_name("ARCH")
      .delimiter(',')
      .one_of(verify::known_archs())
      .shows_default();
  app.add_option("--kernel", o->kernel, "Only kernels with this in their name").type_name("TEXT");
  app.add_flag("--brief", o->brief, "One instance of each kernel");
  app.add_flag("--pairs", o->pairs,
               "Of each kernel, instances with every two values that Config fields have together, or a field and the "
               "architecture")
      .excludes("--brief");
  app.add_flag("--ptx", o->ptx, "To PTX alone, without ptxas and its report: whether a kernel compiles");
  app.add_option("--jobs", o->jobs, "Compilations at once; 0: one per core")
      .type_name("N")
      .non_negative()
      .shows_default();
  app.add_flag("--fresh", o->fresh, "Compile even what the cache has");
  app.add_flag("--stop,!--keep-going", o->stop, "Stop at the first failure; by default all are compiled");
  app.add_option("--json", o->json, "Write the table to this file").output_file();
  app.add_flag("--progress", o->progress, "Draw the bar even if stderr is no terminal");
  app.footer(
      "A row fails on a spill, on more shared memory than the architecture has, and if ptxas says that wgmma was\n"
      "serialised. smem and spills are in bytes.\n\n"
      "Examples:\n"
      "  tessera compile\n"
      "  tessera compile --arch sm_75,sm_90a --kernel backward_preprocess\n"
      "  tessera compile --arch sm_80 --pairs\n"
      "  tessera compile --arch sm_100,sm_120 --brief\n"
      "  tessera compile --fresh --json compile.json");
  return {app, [o] { return run(*o); }};
}

}  // namespace tessera::tools
