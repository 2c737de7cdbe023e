#include "verify/check.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>

#include "base/format.h"
#include "engine/json.h"

namespace tessera::verify {
namespace {

using Plan = std::unique_ptr<tessera_plan, decltype(&tessera_plan_destroy)>;
using Contents = std::vector<Bytes>;

void read_choice(const tessera_plan* plan, Report& report) {
  const auto json = engine::Json::parse(tessera_plan_explain(plan, TESSERA_EXPLAIN_JSON), nullptr, false);
  if (!json.is_object() || !json.contains("chosen") || !json["chosen"].is_object()) return;
  report.kernel = json["chosen"].value("kernel", "");
  if (const auto config = engine::config_from_text(json["chosen"]["config"].dump())) {
    report.config = engine::text_of(*config);
  }
}

Contents written_bytes(Call& call) {
  Contents all;
  for (const Buffer* b : call.buffers()) {
    if (b->written) all.push_back(b->storage);
  }
  return all;
}

// What a run wrote outside of its outputs; empty: nothing.
std::string damage_of(Call& call, const Contents& before) {
  std::size_t n = 0;
  for (const Buffer* b : call.buffers()) {
    const Bytes& was = before[n++];
    if (b->written) {
      if (std::string damage = b->damage(); !damage.empty()) return damage;
    } else if (b->storage != was) {
      return format("{} is an input and was written to", b->name);
    }
  }
  return {};
}

// Plans, then runs `repeat` times; `seen` is called after each run whose bytes are new. False if it could not be run: the
// report says why.
bool run_case(Call& call, Device& device, int repeat, Report& report, const std::function<void()>& seen) {
  const auto stop = [&](Outcome outcome, std::string detail) {
    report.outcome = outcome;
    report.detail = std::move(detail);
    return false;
  };
  const auto failed = [&](const Status& s) { return stop(Outcome::kFailed, s.message()); };
  Contents before;
  for (const Buffer* b : call.buffers()) before.push_back(b->storage);
  if (const Status s = device.upload(call); !s.ok()) return failed(s);
  tessera_plan* made = nullptr;
  const tessera_status planned = call.plan(&made);
  const Plan plan(made, &tessera_plan_destroy);
  if (planned != TESSERA_OK) {
    return stop(planned == TESSERA_UNSUPPORTED ? Outcome::kRefused : Outcome::kFailed,
                format("plan: {}", tessera_last_error()));
  }
  read_choice(plan.get(), report);
  report.workspace = tessera_plan_workspace(plan.get());
  Result<void*> workspace = device.workspace(report.workspace);
  if (!workspace.ok()) return failed(workspace.status());

  Contents first;
  for (int n = 0; n < repeat; ++n) {
    if (n > 0) {
      if (const Status s = device.poison(call); !s.ok()) return failed(s);
    }
    if (call.run(plan.get(), *workspace, report.workspace, device.stream()) != TESSERA_OK) {
      return stop(Outcome::kFailed, format("run: {}", tessera_last_error()));
    }
    if (const Status s = device.fetch(call); !s.ok()) return failed(s);
    ++report.runs;
    Contents now = repeat > 1 ? written_bytes(call) : Contents();
    if (n == 0) first = now;
    if (n > 0 && now == first) continue;
    report.runs_differ = report.runs_differ || n > 0;
    seen();
  }
  if (const Status s = device.download(call); !s.ok()) return failed(s);
  if (std::string damage = damage_of(call, before); !damage.empty()) return stop(Outcome::kFailed, std::move(damage));
  return true;
}

// A call that must be refused with a message before anything is written.
Report check_invalid(Call& call, Device& device) {
  Report report;
  Contents before;
  for (const Buffer* b : call.buffers()) before.push_back(b->storage);
  if (const Status s = run_once(call, device); s.code() != TESSERA_INVALID_ARGUMENT || s.message().empty()) {
    report.detail = s.ok() ? "it breaks the contract and was run" : format("not invalid_argument: {}", s.message());
    return report;
  }
  std::size_t n = 0;
  for (const Buffer* b : call.buffers()) {
    if (b->storage != before[n++]) report.detail = format("{} was written by a call that was refused", b->name);
  }
  report.judged = true;
  report.outcome = report.detail.empty() ? Outcome::kPassed : Outcome::kFailed;
  return report;
}

}  // namespace

void Judgement::add(const char* tensor, const Verdict& verdict) {
  if (verdict.ratio >= worst_ratio) {
    worst_ratio = verdict.ratio;
    worst_tensor = tensor;
  }
  if (!verdict.pass && failure.empty()) failure = format("{}: {}", tensor, verdict.message);
  const auto [at, is_new] = spare.emplace(tensor, verdict.allowed - verdict.max_abs_err);
  if (!is_new) at->second = std::min(at->second, verdict.allowed - verdict.max_abs_err);
}

void Judgement::add_exact(const std::string& difference) {
  if (difference.empty()) return;
  worst_ratio = std::numeric_limits<double>::infinity();
  worst_tensor = difference.substr(0, difference.find(':'));
  if (failure.empty()) failure = difference;
}

const char* name_of(Outcome outcome) {
  return outcome == Outcome::kPassed ? "passed" : outcome == Outcome::kFailed ? "failed" : "refused";
}

std::string reasons_of(const engine::Explanation& explanation) {
  std::string text;
  for (const engine::Refusal& r : explanation.refusals) {
    text += format("{}{}: {}", text.empty() ? "" : "; ", r.kernel, r.reason);
  }
  return text.empty() ? format("there is no kernel for {}", explanation.op) : text;
}

Status run_once(Call& call, Device& device) {
  const auto failure = [&](tessera_status code) { return Status(code, tessera_last_error()); };
  if (Status s = device.upload(call); !s.ok()) return s;
  tessera_plan* made = nullptr;
  const tessera_status planned = call.plan(&made);
  const Plan plan(made, &tessera_plan_destroy);
  if (planned != TESSERA_OK) return failure(planned);
  const std::size_t bytes = tessera_plan_workspace(plan.get());
  const Result<void*> workspace = device.workspace(bytes);
  if (!workspace.ok()) return workspace.status();
  if (const tessera_status ran = call.run(plan.get(), *workspace, bytes, device.stream()); ran != TESSERA_OK) {
    return failure(ran);
  }
  if (Status s = device.fetch(call); !s.ok()) return s;
  return device.download(call);
}

Report check_trial(const Case& c, Trial& trial, Device& device, int repeat, int threads) {
  Report report;
  const auto call = trial.call(device, threads);
  if (!call.ok()) {
    report.detail = call.status().message();
    return report;
  }
  if (c.is_invalid(device)) return check_invalid(**call, device);
  Judgement judgement;
  if (!run_case(**call, device, repeat, report, [&] { trial.judge(**call, threads, judgement); })) return report;
  report.judged = true;
  report.worst_ratio = judgement.worst_ratio;
  report.worst_tensor = judgement.worst_tensor;
  report.detail = judgement.failure;
  if (report.detail.empty() && report.runs_differ && c.equal_runs_promised(device)) {
    report.detail = format("{} runs on the same inputs are not bitwise equal", report.runs);
  }
  report.outcome = report.detail.empty() ? Outcome::kPassed : Outcome::kFailed;
  return report;
}

std::vector<Report> check(const Case& c, const std::vector<Device*>& devices, int repeat, int threads) {
  std::unique_ptr<Trial> trial;
  std::vector<Report> reports;
  for (Device* device : devices) {
    // Asked first, so that no inputs are made for a case that no kernel serves.
    const engine::Explanation explanation = c.explain(device->as_selected());
    if (explanation.options.empty()) {
      Report refused;
      refused.outcome = Outcome::kRefused;
      refused.detail = reasons_of(explanation);
      reports.push_back(std::move(refused));
      continue;
    }
    if (!trial) trial = c.trial();
    device->use();
    reports.push_back(check_trial(c, *trial, *device, repeat, threads));
  }
  return reports;
}

Report check(const Case& c, Device& device, int repeat, int threads) {
  return check(c, std::vector<Device*>{&device}, repeat, threads).front();
}

}  // namespace tessera::verify
