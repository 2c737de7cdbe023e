// `tessera kernels`: every GPU kernel, the hash of its code, and whether that code was verified on a GPU.
#include <algorithm>
#include <filesystem>
#include <memory>

#include "base/format.h"
#include "cuda/code_arch.h"
#include "jit/sources.h"
#include "program/commands.h"
#include "program/console.h"
#include "program/sources.h"
#include "results/kernel_record.h"
#include "verify/family.h"

namespace tessera::tools {
namespace {

struct Options {
  std::string results = "results";
  std::string json;
  std::string record;
  std::vector<std::string> only;
  std::string by;
  bool strict = false;
};

int record(const Options& o) {
  const std::vector<std::string> known = verify::kernel_headers();
  for (const std::string& header : o.only) {
    if (std::find(known.begin(), known.end(), header) == known.end()) {
      return fail(kBadUsage, format("there is no kernel '{}'; `tessera kernels` lists them", header));
    }
  }
  if (o.only.empty() || o.by.empty()) return fail(kBadUsage, "--record needs --kernel and --by");
  if (const Status s = results::may_record(); !s.ok()) return fail(kBadUsage, s.message());
  const Result<cuda::DeviceInfo> info = cuda::device(0);
  if (!info.ok()) return fail(kMissing, info.status().message());
  const Status s = results::record_verified(o.record, o.only, {cuda::arch_of(*info), info->name, o.by});
  return s.ok() ? kSuccess : fail(kBadUsage, s.message());
}

int run(const Options& o) {
  if (!o.record.empty()) return record(o);
  if (!o.only.empty() || !o.by.empty()) return fail(kBadUsage, "--kernel and --by are for --record");
  if (const Status& s = jit::kernel_sources().status; !s.ok()) return fail(kBadUsage, s.message());
  if (!std::filesystem::is_directory(o.results)) {
    return fail(kBadUsage, format("there is no folder '{}'; --results names the one with the records", o.results));
  }
  using Verified = results::KernelState::Verified;
  const std::vector<results::KernelState> states = results::kernel_states(o.results, verify::kernel_headers());
  Json json = Json::array();
  int stale = 0;
  for (const results::KernelState& state : states) {
    const bool good = state.verified == Verified::kYes;
    stale += good ? 0 : 1;
    const std::string said = good                                   ? "verified"
                             : state.verified == Verified::kChanged ? "changed since it was verified"
                                                                    : "never verified";
    print("{}  {}  {}{}{}\n", state.hash.substr(0, 12), state.header, paint(good ? Style::kGood : Style::kWarn, said),
          state.where.empty() ? "" : ": ", state.where);
    json.push_back({{"header", state.header}, {"hash", state.hash}, {"verified", said}, {"where", state.where}});
  }
  if (stale > 0) {
    print("{} of {} kernels have not been verified on a GPU as they are now: scripts/gpu_check.sh does it\n", stale,
          states.size());
  }
  Json all{{"kernels", json}};
  note_sources(all);
  if (const int code = write_json(o.json, all); code != kSuccess) return code;
  return o.strict && stale > 0 ? kCheckFailed : kSuccess;
}

}  // namespace

Command add_kernels(App parent) {
  auto o = std::make_shared<Options>();
  const App app = parent.add_subcommand("kernels", "Say which kernels changed since they were verified on a GPU");
  app.add_option("--results", o->results, "Folder of records, one subfolder for each GPU")
      .type_name("DIR")
      .shows_default();
  app.add_flag("--strict", o->strict, "Fail if one has not been verified as it is now");
  app.add_option("--record", o->record, "Write into this record that the kernels named were verified on this GPU")
      .type_name("FILE");
  app.add_option("--kernel", o->only, "With --record: which").type_name("HEADER").delimiter(',');
  app.add_option("--by", o->by, "With --record: by which test").type_name("TEXT");
  app.add_option("--json", o->json, "Write the list to this file").output_file();
  app.footer(
      "The hash is of a kernel's code and all that it includes, without comments. `verify --record` writes records.\n\n"
      "Examples:\n"
      "  tessera kernels\n"
      "  tessera kernels --strict --results results\n"
      "  tessera verify --device cuda --suite full --record results/h200/verified.json");
  return {app, [o] { return run(*o); }};
}

}  // namespace tessera::tools
