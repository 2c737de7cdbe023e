// `tessera verify`: the list of cases on a device, against the fp64 oracle, through the public C ABI.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <memory>
#include <sstream>

#include "cases/buffers.h"
#include "cases/cases.h"
#include "cli/commands.h"
#include "cli/console.h"
#include "cli/device.h"
#include "tests/oracle/oracle.h"

namespace tessera::cli {
namespace {

struct Options {
  std::string suite = "quick";
  std::string device = "cpu";
  std::string filter;
  std::string json;
  std::uint64_t seed = 1;
  bool progress = false;
  bool verbose = false;
};

enum class Outcome { kPassed, kFailed, kRefused };

struct Report {
  Outcome outcome = Outcome::kFailed;
  std::string detail;      // of a failure or a refusal
  double worst_ratio = 0;  // error over what the rule allows
  std::string worst_tensor;
};

using Plan = std::unique_ptr<tessera_plan, decltype(&tessera_plan_destroy)>;

Report failed(std::string detail) { return {Outcome::kFailed, std::move(detail), 0, {}}; }

// A refusal begins with the problem, which the case's name says already; the lines about kernels are the reason.
std::string reason_of(const std::string& refusal) {
  std::istringstream lines(refusal);
  std::string reason;
  for (std::string line; std::getline(lines, line);) {
    if (line.rfind("refused ", 0) == 0) reason += (reason.empty() ? "" : "; ") + line.substr(8);
  }
  return reason.empty() ? refusal : reason;
}

Report judge_all(const cases::Case& c, const oracle::Outputs& got, const oracle::Outputs& exact,
                 const oracle::Outputs& plain) {
  struct Item {
    const char* name;
    oracle::HostTensor oracle::Outputs::*tensor;
    DType dtype;
  };
  std::vector<Item> items;
  const DType type = c.problem.dtype;
  if (c.problem.op == AttentionOp::kBackward) {
    items = {
        {"dq", &oracle::Outputs::dq, type}, {"dk", &oracle::Outputs::dk, type}, {"dv", &oracle::Outputs::dv, type}};
  } else {
    items = {{"out", &oracle::Outputs::o, type}};
    if (c.problem.with_lse) items.push_back({"lse", &oracle::Outputs::lse, DType::kFloat32});
  }
  Report report{Outcome::kPassed, {}, 0, {}};
  for (const Item& item : items) {
    const oracle::Verdict v =
        oracle::judge(got.*item.tensor, exact.*item.tensor, plain.*item.tensor, item.dtype, c.floor);
    if (v.ratio >= report.worst_ratio) {
      report.worst_ratio = v.ratio;
      report.worst_tensor = item.name;
    }
    if (!v.pass && report.outcome == Outcome::kPassed) {
      report.outcome = Outcome::kFailed;
      report.detail = fmt::format("{}: {}", item.name, v.message);
    }
  }
  return report;
}

Report check(const cases::Case& c, Device& device) {
  const oracle::Inputs inputs = cases::make_inputs(c);

  // What no kernel serves costs no oracle.
  const bool backward = c.problem.op == AttentionOp::kBackward;
  oracle::Outputs exact;
  if (backward) exact = oracle::attention(inputs);
  cases::Buffers buffers(c, inputs, backward ? &exact : nullptr);
  std::vector<std::vector<std::byte>> before;
  for (const cases::Buffer* b : buffers.all()) before.push_back(b->storage);

  if (const Status s = device.upload(buffers); !s.ok()) return failed(s.message());
  tessera_attention args = buffers.args();
  tessera_plan* made = nullptr;
  const tessera_status planned = tessera_plan_create(buffers.op(), &args, &made);
  const Plan plan(made, &tessera_plan_destroy);
  if (planned == TESSERA_UNSUPPORTED) return {Outcome::kRefused, reason_of(tessera_last_error()), 0, {}};
  if (planned != TESSERA_OK) return failed(fmt::format("plan: {}", tessera_last_error()));
  const std::size_t scratch = tessera_plan_workspace(plan.get());
  Result<void*> workspace = device.workspace(scratch);
  if (!workspace.ok()) return failed(workspace.status().message());
  if (tessera_plan_run(plan.get(), &args, *workspace, scratch, nullptr) != TESSERA_OK) {
    return failed(fmt::format("run: {}", tessera_last_error()));
  }
  if (const Status s = device.download(buffers); !s.ok()) return failed(s.message());

  if (!backward) exact = oracle::attention(inputs);
  if (std::string damage = buffers.damage(); !damage.empty()) return failed(std::move(damage));
  std::size_t n = 0;
  for (const cases::Buffer* b : buffers.all()) {
    const std::vector<std::byte>& was = before[n++];
    if (!b->written && b->storage != was) return failed("an input was written to");
  }
  return judge_all(c, buffers.results(exact), exact, oracle::plain_attention(inputs));
}

const char* name_of(Outcome outcome) {
  return outcome == Outcome::kPassed ? "passed" : outcome == Outcome::kFailed ? "failed" : "refused";
}

int run(const Options& o) {
  std::vector<cases::Case> list = cases::suite(o.suite);
  std::erase_if(list, [&](const cases::Case& c) { return c.name.find(o.filter) == std::string::npos; });
  if (list.empty()) return fail(kBadUsage, fmt::format("no case of suite {} has '{}' in its name", o.suite, o.filter));
  Result<std::unique_ptr<Device>> device = open_device(o.device);
  if (!device.ok()) return fail(static_cast<ExitCode>(exit_code_of(device.status())), device.status().message());

  const auto begin = std::chrono::steady_clock::now();
  std::map<Outcome, int> count;
  std::map<std::string, int> refusals;  // by reason
  double worst = 0;
  std::string worst_case;
  Json json_cases = Json::array();
  Progress progress("verify", list.size(), o.progress);
  for (cases::Case& c : list) {
    progress.step(c.name);
    c.seed = o.seed;
    const Report r = check(c, **device);
    ++count[r.outcome];
    if (r.outcome == Outcome::kRefused) ++refusals[r.detail];
    if (r.outcome != Outcome::kRefused && r.worst_ratio >= worst) {
      worst = r.worst_ratio;
      worst_case = fmt::format("{} of {}", r.worst_tensor, c.name);
    }
    if (r.outcome == Outcome::kFailed || o.verbose) {
      progress.finish();
      const Style style = r.outcome == Outcome::kFailed    ? Style::kBad
                          : r.outcome == Outcome::kRefused ? Style::kWarn
                                                           : Style::kGood;
      fmt::print("{}  {}", paint(style, name_of(r.outcome)), c.name);
      if (r.outcome == Outcome::kPassed) fmt::print("  {:.2f}", r.worst_ratio);
      fmt::print("{}{}\n", r.detail.empty() ? "" : "\n        ", r.detail);
    }
    Json entry{{"name", c.name}, {"outcome", name_of(r.outcome)}, {"error_over_allowed", r.worst_ratio}};
    if (!r.detail.empty()) entry["detail"] = r.detail;
    json_cases.push_back(std::move(entry));
  }
  progress.finish();
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();

  for (const auto& [reason, times] : refusals) {
    fmt::print("{}  {} of them: {}\n", paint(Style::kWarn, "refused"), times, reason);
  }
  const int bad = count[Outcome::kFailed];
  fmt::print("{} on {}: {}, {}, {} refused, in {}\n", paint(Style::kBold, o.suite), (*device)->name(),
             paint(bad == 0 ? Style::kGood : Style::kDim, fmt::format("{} passed", count[Outcome::kPassed])),
             paint(bad > 0 ? Style::kBad : Style::kDim, fmt::format("{} failed", bad)), count[Outcome::kRefused],
             seconds_text(seconds));
  if (!worst_case.empty()) fmt::print("worst error: {:.2f} of what is allowed, {}\n", worst, worst_case);

  const Json json{{"suite", o.suite},
                  {"device", (*device)->name()},
                  {"seed", o.seed},
                  {"passed", count[Outcome::kPassed]},
                  {"failed", bad},
                  {"refused", count[Outcome::kRefused]},
                  {"worst_error_over_allowed", worst},
                  {"worst_case", worst_case},
                  {"seconds", seconds},
                  {"cases", json_cases}};
  if (const int code = write_json(o.json, json); code != kSuccess) return code;
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
  app->add_option("--seed", o->seed, "Of the inputs")->type_name("N")->capture_default_str();
  app->add_option("--json", o->json, "Write every case's outcome to this file")->type_name("FILE");
  app->add_flag("--verbose", o->verbose, "A line for every case");
  app->add_flag("--progress", o->progress, "Draw the bar even where stderr is no terminal");
  app->footer(
      "A case passes when its error is at most twice that of the plain computation in the same precision, plus a\n"
      "floor. Cases that no kernel serves on the device are counted as refused, with the reason.\n\n"
      "Examples:\n"
      "  tessera verify\n"
      "  tessera verify --suite full --filter bwd/bf16\n"
      "  tessera verify --suite hostile --seed 7 --json verify.json");
  return {app, [o] { return run(*o); }};
}

}  // namespace tessera::cli
