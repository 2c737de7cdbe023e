// `tessera verify`: the list of cases on a device, against the fp64 oracle, through the public C ABI.
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>

#include "cases/cases.h"
#include "cli/check_case.h"
#include "cli/commands.h"
#include "cli/console.h"
#include "cli/device.h"
#include "cli/kernel_record.h"
#include "cuda/kernel.h"
#include "tests/oracle/parallel.h"

namespace tessera::cli {
namespace {

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

int run(const Options& o) {
  std::vector<cases::Case> list = cases::suite(o.suite);
  std::erase_if(list, [&](const cases::Case& c) { return c.name.find(o.filter) == std::string::npos; });
  if (list.empty()) return fail(kBadUsage, fmt::format("no case of suite {} has '{}' in its name", o.suite, o.filter));
  if (!o.record.empty() && (o.device == "cpu" || o.suite != "full" || !o.filter.empty())) {
    return fail(kBadUsage, "--record is for the whole suite full on a GPU");
  }
  if (const Status s = may_record(); !o.record.empty() && !s.ok()) return fail(kBadUsage, s.message());
  // Cases side by side, each with a device of its own: the oracle is what takes time. A long case has the machine to
  // itself.
  const bool sampled = std::any_of(list.begin(), list.end(), [](const cases::Case& c) { return c.sample > 0; });
  const int workers = sampled ? 1 : std::min<int>(machine_threads(), static_cast<int>(list.size()));
  std::vector<std::unique_ptr<Device>> devices;
  for (int n = 0; n < workers; ++n) {
    Result<std::unique_ptr<Device>> device = open_device(o.device, o.arch_code);
    if (!device.ok()) return fail(static_cast<ExitCode>(exit_code_of(device.status())), device.status().message());
    devices.push_back(std::move(*device));
  }

  const auto begin = std::chrono::steady_clock::now();
  std::vector<Report> reports(list.size());
  Progress progress("verify", list.size(), o.progress);
  std::mutex terminal;
  std::atomic<std::size_t> next{0};
  in_parallel(workers, workers, [&](std::int64_t worker) {
    for (std::size_t n = next++; n < list.size(); n = next++) {
      cases::Case& c = list[n];
      {
        const std::lock_guard lock(terminal);
        progress.step(c.name);
      }
      c.seed = o.seed;
      reports[n] = check_case(c, *devices[static_cast<std::size_t>(worker)], o.repeat, sampled ? 0 : 1);
      const Report& r = reports[n];
      if (r.outcome != Outcome::kFailed && !o.verbose) continue;
      const std::lock_guard lock(terminal);
      progress.finish();
      const Style style = r.outcome == Outcome::kFailed    ? Style::kBad
                          : r.outcome == Outcome::kRefused ? Style::kWarn
                                                           : Style::kGood;
      fmt::print("{}  {}", paint(style, name_of(r.outcome)), c.name);
      if (r.outcome == Outcome::kPassed) fmt::print("  {:.2f}", r.worst_ratio);
      fmt::print("{}{}\n", r.detail.empty() ? "" : "\n        ", r.detail);
      std::fflush(stdout);
    }
  });
  progress.finish();
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();

  std::map<Outcome, int> count;
  std::map<std::string, int> refusals;  // by reason
  double worst = 0;
  std::string worst_case;
  int differing = 0;
  Json json_cases = Json::array();
  for (std::size_t n = 0; n < list.size(); ++n) {
    const Report& r = reports[n];
    ++count[r.outcome];
    if (r.outcome == Outcome::kRefused) ++refusals[r.detail];
    if (r.outcome != Outcome::kRefused && r.worst_ratio >= worst) {
      worst = r.worst_ratio;
      worst_case = fmt::format("{} of {}", r.worst_tensor, list[n].name);
    }
    differing += r.runs_differ ? 1 : 0;
    Json entry{{"name", list[n].name}, {"outcome", name_of(r.outcome)}};
    if (!r.detail.empty()) entry["detail"] = r.detail;
    if (r.outcome != Outcome::kRefused) {
      entry["error_over_allowed"] = r.worst_ratio;
      entry["kernel"] = r.kernel;
      entry["workspace"] = r.workspace;
      if (o.repeat > 1) entry["runs_differ"] = r.runs_differ;
    }
    json_cases.push_back(std::move(entry));
  }

  const std::string device = devices.front()->name();
  for (const auto& [reason, times] : refusals) {
    fmt::print("{}  {} of them: {}\n", paint(Style::kWarn, "refused"), times, reason);
  }
  const int bad = count[Outcome::kFailed];
  fmt::print("{} on {}: {}, {}, {} refused, in {}\n", paint(Style::kBold, o.suite), device,
             paint(bad == 0 ? Style::kGood : Style::kDim, fmt::format("{} passed", count[Outcome::kPassed])),
             paint(bad > 0 ? Style::kBad : Style::kDim, fmt::format("{} failed", bad)), count[Outcome::kRefused],
             seconds_text(seconds));
  if (!worst_case.empty()) fmt::print("worst error: {:.2f} of what is allowed, {}\n", worst, worst_case);

  if (o.repeat > 1) {
    fmt::print("each case {} times: {} gave results that are not bitwise equal\n", o.repeat, differing);
  }

  Json json{{"date", today()},
            {"version", tessera_version()},
            {"suite", o.suite},
            {"device", device},
            {"arch_code", arch_code_in_force(o.arch_code)},
            {"seed", o.seed},
            {"repeat", o.repeat},
            {"passed", count[Outcome::kPassed]},
            {"failed", bad},
            {"refused", count[Outcome::kRefused]},
            {"worst_error_over_allowed", worst},
            {"worst_case", worst_case},
            {"seconds", seconds},
            {"cases", json_cases}};
  if (!devices.front()->is_cpu()) note_sources(json);
  if (const int code = write_json(o.json, json); code != kSuccess) return code;
  if (!o.record.empty() && bad == 0) {
    std::set<std::string> headers;
    std::string arch;
    for (const auto& [instance, target] : cuda::loaded_instances()) {
      headers.insert(instance.header);
      arch = target.arch;
    }
    const Proof proof{arch, cuda::device(devices.front()->cuda_index())->name,
                      fmt::format("verify {}, {} cases", o.suite, count[Outcome::kPassed])};
    const Status s = record_verified(o.record, {headers.begin(), headers.end()}, proof);
    if (!s.ok()) return fail(kBadUsage, s.message());
  }
  return bad == 0 ? kSuccess : kCheckFailed;
}

}  // namespace

Command add_verify(CLI::App& parent) {
  auto o = std::make_shared<Options>();
  CLI::App* app = parent.add_subcommand("verify", "Check results against the fp64 oracle");
  app->add_option("--suite", o->suite, "Which cases: quick, full, hostile, ...")
      ->type_name("NAME")
      ->check(quiet(CLI::IsMember(cases::suite_names())))
      ->capture_default_str();
  app->add_option("--device", o->device, "cpu, cuda or cuda:N")->type_name("DEVICE")->capture_default_str();
  app->add_option("--filter", o->filter, "Only cases with this in their name")->type_name("TEXT");
  app->add_option("--arch-code", o->arch_code,
                  "Code for this architecture, on a newer GPU: native, sm_75, sm_80, ...; default: TESSERA_CODE_ARCH, "
                  "else native")
      ->type_name("ARCH")
      ->capture_default_str();
  app->add_option("--repeat", o->repeat, "Run each case so often and compare the results bitwise")
      ->type_name("N")
      ->check(quiet(CLI::Range(1, 100000)))
      ->capture_default_str();
  app->add_option("--seed", o->seed, "Of the inputs")->type_name("N")->capture_default_str();
  app->add_option("--json", o->json, "Write every case's outcome to this file")->type_name("FILE");
  app->add_option("--record", o->record,
                  "Where all pass: note in this file which kernels were verified; GPU, suite full")
      ->type_name("FILE");
  app->add_flag("--verbose", o->verbose, "A line for every case");
  app->add_flag("--progress", o->progress, "Draw the bar even where stderr is no terminal");
  app->footer(
      "A case passes when its error is at most twice that of the plain computation in the same precision, plus a\n"
      "floor. Cases that no kernel serves on the device are counted as refused, with the reason. With --repeat, every\n"
      "forward, and every backward that is asked to be deterministic, must give the same bits in each run.\n\n"
      "Examples:\n"
      "  tessera verify\n"
      "  tessera verify --suite full --filter bwd/bf16\n"
      "  tessera verify --suite hostile --seed 7 --json verify.json\n"
      "  tessera verify --device cuda --suite full --arch-code sm_75\n"
      "  tessera verify --device cuda --filter bwd --repeat 100");
  return {app, [o] { return run(*o); }};
}

}  // namespace tessera::cli
