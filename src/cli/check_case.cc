#include "cli/check_case.h"

#include <fmt/format.h>

#include <functional>
#include <memory>
#include <sstream>

#include "cases/buffers.h"
#include "select/attention.h"
#include "tests/oracle/sampled.h"

namespace tessera::cli {
namespace {

using oracle::HostTensor;
using oracle::Outputs;
using Plan = std::unique_ptr<tessera_plan, decltype(&tessera_plan_destroy)>;
using Bytes = std::vector<cases::Bytes>;

// A refusal begins with the problem, which the case's name says already; the lines about kernels are the reason.
std::string reason_of(const std::string& refusal) {
  std::istringstream lines(refusal);
  std::string reason;
  for (std::string line; std::getline(lines, line);) {
    if (line.rfind("refused ", 0) == 0) reason += (reason.empty() ? "" : "; ") + line.substr(8);
  }
  return reason.empty() ? refusal : reason;
}

// "chosen attention_forward Config{...}  workspace ..." -> "attention_forward", "Config{...}"
void read_choice(const std::string& explanation, Report& report) {
  const std::size_t at = explanation.find("\nchosen ");
  if (at == std::string::npos) return;
  std::istringstream line(explanation.substr(at + 8));
  line >> report.kernel >> std::ws;
  std::getline(line, report.config, '}');
  report.config += '}';
}

Bytes written_bytes(cases::Buffers& buffers) {
  Bytes all;
  for (const cases::Buffer* b : buffers.all()) {
    if (b->written) all.push_back(b->storage);
  }
  return all;
}

bool equal_runs_promised(const cases::Case& c, const Device& device) {
  return c.problem.op != AttentionOp::kBackward || c.problem.deterministic || device.is_cpu();
}

// Plans, then runs `repeat` times; `seen` gets the buffers after each run whose bytes are new. False where it could not
// be run: the report says why.
bool run_case(cases::Buffers& buffers, Device& device, int repeat, Report& report, const std::function<void()>& seen) {
  const auto stop = [&](Outcome outcome, std::string detail) {
    report.outcome = outcome;
    report.detail = std::move(detail);
    return false;
  };
  const auto failed = [&](const Status& s) { return stop(Outcome::kFailed, s.message()); };
  Bytes before;
  for (const cases::Buffer* b : buffers.all()) before.push_back(b->storage);
  if (const Status s = device.upload(buffers); !s.ok()) return failed(s);
  tessera_attention args = buffers.args();
  tessera_plan* made = nullptr;
  const tessera_status planned = tessera_plan_create(buffers.op(), &args, &made);
  const Plan plan(made, &tessera_plan_destroy);
  if (planned == TESSERA_UNSUPPORTED) return stop(Outcome::kRefused, reason_of(tessera_last_error()));
  if (planned != TESSERA_OK) return stop(Outcome::kFailed, fmt::format("plan: {}", tessera_last_error()));
  read_choice(tessera_plan_explain(plan.get()), report);
  report.workspace = tessera_plan_workspace(plan.get());
  Result<void*> workspace = device.workspace(report.workspace);
  if (!workspace.ok()) return failed(workspace.status());

  Bytes first;
  for (int n = 0; n < repeat; ++n) {
    if (n > 0) {
      if (const Status s = device.poison(buffers); !s.ok()) return failed(s);
    }
    if (tessera_plan_run(plan.get(), &args, *workspace, report.workspace, device.stream()) != TESSERA_OK) {
      return stop(Outcome::kFailed, fmt::format("run: {}", tessera_last_error()));
    }
    if (const Status s = device.fetch(buffers); !s.ok()) return failed(s);
    ++report.runs;
    Bytes now = repeat > 1 ? written_bytes(buffers) : Bytes();
    if (n == 0) first = now;
    if (n > 0 && now == first) continue;
    report.runs_differ = report.runs_differ || n > 0;
    seen();
  }
  if (const Status s = device.download(buffers); !s.ok()) return failed(s);
  if (std::string damage = buffers.damage(); !damage.empty()) return stop(Outcome::kFailed, std::move(damage));
  std::size_t n = 0;
  for (const cases::Buffer* b : buffers.all()) {
    const cases::Bytes& was = before[n++];
    if (!b->written && b->storage != was) return stop(Outcome::kFailed, "an input was written to");
  }
  return true;
}

// Keeps the worst over all results judged.
void judge_all(const cases::Case& c, const Outputs& got, const Outputs& exact, const Outputs& plain, Report& report) {
  struct Item {
    const char* name;
    HostTensor Outputs::*tensor;
    DType dtype;
  };
  std::vector<Item> items;
  const DType type = c.problem.dtype;
  if (c.problem.op == AttentionOp::kBackward) {
    items = {{"dq", &Outputs::dq, type}, {"dk", &Outputs::dk, type}, {"dv", &Outputs::dv, type}};
  } else {
    items = {{"out", &Outputs::o, type}};
    if (c.problem.with_lse) items.push_back({"lse", &Outputs::lse, DType::kFloat32});
  }
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
}

// Tensors of the results' shapes, with nothing in them.
Outputs blank_outputs(const AttentionProblem& p, const oracle::Inputs& in) {
  Outputs out;
  out.o = HostTensor(in.q.shape[0], in.q.shape[1], p.heads_q, p.dim_v);
  out.lse = HostTensor(in.q.shape[0], p.heads_q, in.q.shape[1], 1);
  if (p.op != AttentionOp::kBackward) return out;
  out.dq = HostTensor(in.q.shape[0], in.q.shape[1], p.heads_q, p.dim_qk);
  out.dk = HostTensor(in.k.shape[0], in.k.shape[1], p.heads_kv, p.dim_qk);
  out.dv = HostTensor(in.v.shape[0], in.v.shape[1], p.heads_kv, p.dim_v);
  return out;
}

// A long case: the backward gets o and lse from the library's own forward, which cases of its own judge.
Report check_sampled(const cases::Case& c, Device& device, int repeat, int threads) {
  const oracle::Inputs inputs = cases::make_inputs(c);
  const oracle::Sample sample = oracle::make_sample(c.problem, c.sample, c.seed);
  const bool backward = c.problem.op == AttentionOp::kBackward;
  Outputs saved;
  Report report;
  if (backward) {
    cases::Case forward = c;
    forward.problem.op = AttentionOp::kForward;
    forward.problem.with_lse = true;
    forward.problem.with_dlse = false;
    forward.problem.deterministic = false;
    cases::Buffers buffers(forward, inputs, nullptr);
    Report first;
    if (!run_case(buffers, device, 1, first, [] {})) {
      first.detail = "its forward: " + first.detail;
      return first;
    }
    saved = buffers.results(blank_outputs(forward.problem, inputs));
  }
  cases::Buffers buffers(c, inputs, backward ? &saved : nullptr);
  std::vector<Outputs> results;
  const Outputs blank = blank_outputs(c.problem, inputs);
  if (!run_case(buffers, device, repeat, report,
                [&] { results.push_back(oracle::take_sample(c.problem, sample, buffers.results(blank))); })) {
    return report;
  }
  report.outcome = Outcome::kPassed;
  const Outputs exact = oracle::sampled_attention(inputs, sample, saved.o, saved.lse, threads);
  const Outputs plain = oracle::sampled_plain_attention(inputs, sample, saved.o, saved.lse, threads);
  for (const Outputs& got : results) judge_all(c, got, exact, plain, report);
  return report;
}

Report check_whole(const cases::Case& c, Device& device, int repeat, int threads) {
  const oracle::Inputs inputs = cases::make_inputs(c);
  const bool backward = c.problem.op == AttentionOp::kBackward;
  Outputs exact;
  if (backward) exact = oracle::attention(inputs, threads);
  cases::Buffers buffers(c, inputs, backward ? &exact : nullptr);
  std::vector<Outputs> results;
  const Outputs blank = blank_outputs(c.problem, inputs);
  Report report;
  if (!run_case(buffers, device, repeat, report, [&] { results.push_back(buffers.results(blank)); })) return report;
  report.outcome = Outcome::kPassed;
  if (!backward) exact = oracle::attention(inputs, threads);
  const Outputs plain = oracle::plain_attention(inputs, threads);
  for (Outputs& got : results) {
    buffers.excuse_unused_rows(got, exact);
    judge_all(c, got, exact, plain, report);
  }
  return report;
}

void judge_differences(const cases::Case& c, const Device& device, Report& report) {
  if (report.outcome != Outcome::kPassed || !report.runs_differ || !equal_runs_promised(c, device)) return;
  report.outcome = Outcome::kFailed;
  report.detail = fmt::format("{} runs on the same inputs are not bitwise equal", report.runs);
}

}  // namespace

const char* name_of(Outcome outcome) {
  return outcome == Outcome::kPassed ? "passed" : outcome == Outcome::kFailed ? "failed" : "refused";
}

Report check_case(const cases::Case& c, Device& device, int repeat, int threads) {
  // Asked before inputs and the oracle's o and lse are made for what no kernel serves.
  const select::Selection selection = select::select_attention(c.problem, device.as_selected());
  if (selection.candidates.empty()) {
    Report refused;
    refused.outcome = Outcome::kRefused;
    for (const select::Refusal& r : selection.refusals) {
      refused.detail += fmt::format("{}{}: {}", refused.detail.empty() ? "" : "; ", r.kernel, r.reason);
    }
    return refused;
  }
  Report report = (c.sample > 0 ? check_sampled : check_whole)(c, device, repeat, threads);
  judge_differences(c, device, report);
  return report;
}

PreparedForward prepare_forward(const cases::Case& c, int threads) {
  PreparedForward prepared{c, cases::make_inputs(c), {}, {}, {}};
  if (c.sample > 0) {
    prepared.sample = oracle::make_sample(c.problem, c.sample, c.seed);
    prepared.exact = oracle::sampled_attention(prepared.inputs, prepared.sample, {}, {}, threads);
    prepared.plain = oracle::sampled_plain_attention(prepared.inputs, prepared.sample, {}, {}, threads);
  } else {
    prepared.exact = oracle::attention(prepared.inputs, threads);
    prepared.plain = oracle::plain_attention(prepared.inputs, threads);
  }
  return prepared;
}

Report check_prepared(const PreparedForward& prepared, Device& device, int repeat) {
  const cases::Case& c = prepared.c;
  cases::Buffers buffers(c, prepared.inputs, nullptr);
  const Outputs blank = blank_outputs(c.problem, prepared.inputs);
  std::vector<Outputs> results;
  Report report;
  if (!run_case(buffers, device, repeat, report, [&] { results.push_back(buffers.results(blank)); })) return report;
  report.outcome = Outcome::kPassed;
  for (Outputs& got : results) {
    if (c.sample > 0) {
      got = oracle::take_sample(c.problem, prepared.sample, got);
    } else {
      buffers.excuse_unused_rows(got, prepared.exact);
    }
    judge_all(c, got, prepared.exact, prepared.plain, report);
  }
  judge_differences(c, device, report);
  return report;
}

}  // namespace tessera::cli
