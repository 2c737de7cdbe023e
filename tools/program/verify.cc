// `tessera verify`: the list of cases on a device, against the fp64 oracle, through the public C ABI.
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>

#include "cuda/kernel.h"
#include "engine/json.h"
#include "program/commands.h"
#include "program/console.h"
#include "program/sources.h"
#include "results/date.h"
#include "results/kernel_record.h"
#include "verify/check.h"
#include "verify/device.h"
#include "verify/family.h"
#include "verify/parallel.h"

namespace tessera::tools {
namespace {

using verify::Outcome;
using verify::Report;

struct Options {
  std::string suite = "quick";
  std::string device = "cpu";
  std::string filter;
  std::string json;
  std::string arch_code;  // empty: what TESSERA_CODE_ARCH says, else the GPU's own
  std::string record;
  std::uint64_t seed = 1;
  int repeat = 1;
  bool progress = false;
  bool verbose = false;
};

using Cases = std::vector<std::unique_ptr<verify::Case>>;
using Devices = std::vector<std::unique_ptr<verify::Device>>;

Style style_of(Outcome outcome) {
  return outcome == Outcome::kFailed ? Style::kBad : outcome == Outcome::kRefused ? Style::kWarn : Style::kGood;
}

// Cases run in parallel, each worker with its own device, because the oracle takes most of the time. A sampled case has
// the machine to itself.
std::vector<Report> check_all(const Options& o, const Cases& list, Devices& devices, bool sampled) {
  std::vector<Report> reports(list.size());
  Progress progress("verify", list.size(), o.progress);
  std::mutex terminal;
  std::atomic<std::size_t> next{0};
  const auto workers = static_cast<int>(devices.size());
  verify::in_parallel(workers, workers, [&](std::int64_t worker) {
    for (std::size_t n = next++; n < list.size(); n = next++) {
      verify::Case& c = *list[n];
      {
        const std::lock_guard lock(terminal);
        progress.step(c.name);
      }
      c.seed += o.seed - 1;
      reports[n] = check(c, *devices[static_cast<std::size_t>(worker)], o.repeat, sampled ? 0 : 1);
      const Report& r = reports[n];
      if (r.outcome != Outcome::kFailed && !o.verbose) continue;
      const std::lock_guard lock(terminal);
      progress.finish();
      fmt::print("{}  {}", paint(style_of(r.outcome), name_of(r.outcome)), c.name);
      if (r.outcome == Outcome::kPassed) fmt::print("  {:.2f}", r.worst_ratio);
      fmt::print("{}{}\n", r.detail.empty() ? "" : "\n        ", r.detail);
      std::fflush(stdout);
    }
  });
  return reports;
}

struct Summary {
  std::map<Outcome, int> count;
  std::map<std::string, int> refusals;  // by reason
  double worst = 0;
  std::string worst_case;
  int differing = 0;
  Json cases = Json::array();
};

Summary summary_of(const Options& o, const Cases& list, const std::vector<Report>& reports) {
  Summary s;
  for (std::size_t n = 0; n < list.size(); ++n) {
    const Report& r = reports[n];
    ++s.count[r.outcome];
    if (r.outcome == Outcome::kRefused) ++s.refusals[r.detail];
    if (r.outcome != Outcome::kRefused && r.worst_ratio >= s.worst) {
      s.worst = r.worst_ratio;
      s.worst_case = fmt::format("{} of {}", r.worst_tensor, list[n]->name);
    }
    s.differing += r.runs_differ ? 1 : 0;
    Json entry{{"name", list[n]->name},
               {"family", list[n]->family()},
               {"op", list[n]->op()},
               {"fields", engine::json_of(list[n]->fields())},
               {"outcome", name_of(r.outcome)}};
    if (!r.detail.empty()) entry["detail"] = r.detail;
    if (r.outcome != Outcome::kRefused) {
      entry["error_over_allowed"] = r.worst_ratio;
      entry["kernel"] = r.kernel;
      entry["workspace"] = r.workspace;
      if (o.repeat > 1) entry["runs_differ"] = r.runs_differ;
    }
    s.cases.push_back(std::move(entry));
  }
  return s;
}

void print(const Options& o, const std::string& device, Summary& s, double seconds) {
  for (const auto& [reason, times] : s.refusals) {
    fmt::print("{}  {} of them: {}\n", paint(Style::kWarn, "refused"), times, reason);
  }
  const int bad = s.count[Outcome::kFailed];
  fmt::print("{} on {}: {}, {}, {} refused, in {}\n", paint(Style::kBold, o.suite), device,
             paint(bad == 0 ? Style::kGood : Style::kDim, fmt::format("{} passed", s.count[Outcome::kPassed])),
             paint(bad > 0 ? Style::kBad : Style::kDim, fmt::format("{} failed", bad)), s.count[Outcome::kRefused],
             seconds_text(seconds));
  if (!s.worst_case.empty()) fmt::print("worst error: {:.2f} of what is allowed, {}\n", s.worst, s.worst_case);
  if (o.repeat > 1) {
    fmt::print("each case {} times: {} gave results that are not bitwise equal\n", o.repeat, s.differing);
  }
}

// Which kernels ran, into the record.
Status record(const Options& o, int device, int passed) {
  std::set<std::string> headers;
  std::string arch;
  for (const auto& [instance, target] : cuda::loaded_instances()) {
    headers.insert(instance.header);
    arch = target.arch;
  }
  const Result<cuda::DeviceInfo> info = cuda::device(device);
  if (!info.ok()) return info.status();
  return results::record_verified(o.record, {headers.begin(), headers.end()},
                                  {arch, info->name, fmt::format("verify {}, {} cases", o.suite, passed)});
}

int run(const Options& o) {
  Cases list = verify::suite(o.suite);
  std::erase_if(list, [&](const auto& c) { return c->name.find(o.filter) == std::string::npos; });
  if (list.empty()) return fail(kBadUsage, fmt::format("no case of suite {} has '{}' in its name", o.suite, o.filter));
  if (!o.record.empty() && (o.device == "cpu" || o.suite != "full" || !o.filter.empty())) {
    return fail(kBadUsage, "--record is for the whole suite full on a GPU");
  }
  if (const Status s = results::may_record(); !o.record.empty() && !s.ok()) return fail(kBadUsage, s.message());
  const bool sampled = std::any_of(list.begin(), list.end(), [](const auto& c) { return c->is_sampled(); });
  const int workers = sampled ? 1 : std::min<int>(verify::machine_threads(), static_cast<int>(list.size()));
  Devices devices;
  for (int n = 0; n < workers; ++n) {
    Result<std::unique_ptr<verify::Device>> device = verify::open_device(o.device, o.arch_code);
    if (!device.ok()) return fail(device.status());
    devices.push_back(std::move(*device));
  }

  const auto begin = std::chrono::steady_clock::now();
  const std::vector<Report> reports = check_all(o, list, devices, sampled);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  Summary s = summary_of(o, list, reports);
  const std::string device = devices.front()->name();
  print(o, device, s, seconds);

  const int passed = s.count[Outcome::kPassed], bad = s.count[Outcome::kFailed];
  Json json{{"date", results::today()},
            {"version", tessera_version()},
            {"suite", o.suite},
            {"device", device},
            {"arch_code", verify::arch_code_in_force(o.arch_code)},
            {"seed", o.seed},
            {"repeat", o.repeat},
            {"passed", passed},
            {"failed", bad},
            {"refused", s.count[Outcome::kRefused]},
            {"worst_error_over_allowed", s.worst},
            {"worst_case", s.worst_case},
            {"seconds", seconds},
            {"cases", s.cases}};
  if (!devices.front()->is_cpu()) note_sources(json);
  if (const int code = write_json(o.json, json); code != kSuccess) return code;
  if (passed == 0 && bad == 0) {
    return fail(kCheckFailed, "nothing was verified: no kernel on this device serves any of the cases");
  }
  if (!o.record.empty() && bad == 0) {
    if (const Status recorded = record(o, devices.front()->cuda_index(), passed); !recorded.ok()) {
      return fail(kBadUsage, recorded.message());
    }
  }
  return bad == 0 ? kSuccess : kCheckFailed;
}

}  // namespace

Command add_verify(CLI::App& parent) {
  auto o = std::make_shared<Options>();
  CLI::App* app = parent.add_subcommand("verify", "Check results against the fp64 oracle");
  app->add_option("--suite", o->suite, "Which cases: quick, full, hostile, ...")
      ->type_name("NAME")
      ->check(quiet(CLI::IsMember(verify::suite_names())))
      ->capture_default_str();
  app->add_option("--device", o->device, "cpu, cuda or cuda:N")->type_name("DEVICE")->capture_default_str();
  app->add_option("--filter", o->filter, "Only cases with this in their name")->type_name("TEXT");
  app->add_option("--arch-code", o->arch_code,
                  "Code for this architecture, on a newer GPU: native, sm_75, sm_80, ...; default: TESSERA_CODE_ARCH, "
                  "else native")
      ->type_name("ARCH")
      ->capture_default_str();
  app->add_option("--repeat", o->repeat, "Run each case N times and compare the results bitwise")
      ->type_name("N")
      ->check(quiet(CLI::Range(1, 100000)))
      ->capture_default_str();
  app->add_option("--seed", o->seed, "Of the inputs: N - 1 is added to each case's own")
      ->type_name("N")
      ->capture_default_str();
  app->add_option("--json", o->json, "Write every case's outcome to this file")->type_name("FILE");
  app->add_option("--record", o->record,
                  "If all pass: record in this file which kernels were verified; GPU, suite full")
      ->type_name("FILE");
  app->add_flag("--verbose", o->verbose, "A line for every case");
  app->add_flag("--progress", o->progress, "Draw the bar even if stderr is no terminal");
  app->footer(
      "A case passes when its error is at most twice that of the plain computation in the same precision, plus a\n"
      "floor. Cases that no kernel serves on the device are counted as refused, with the reason; if that is all of\n"
      "them, nothing was verified, and the exit code is 1. With --repeat, every\n"
      "forward, and every backward that is asked to be deterministic, must give the same bits in each run.\n\n"
      "Examples:\n"
      "  tessera verify\n"
      "  tessera verify --suite full --filter bwd/bf16\n"
      "  tessera verify --suite hostile --seed 7 --json verify.json\n"
      "  tessera verify --device cuda --suite full --arch-code sm_75\n"
      "  tessera verify --device cuda --filter bwd --repeat 100");
  return {app, [o] { return run(*o); }};
}

}  // namespace tessera::tools
