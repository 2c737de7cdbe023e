// `tessera bench`: how fast the cases run, against ceilings measured in the same run.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>

#include "cases/buffers.h"
#include "cases/cases.h"
#include "cli/ceiling.h"
#include "cli/check_case.h"
#include "cli/commands.h"
#include "cli/console.h"
#include "cli/device.h"
#include "cli/gpu_kernels.h"
#include "cli/gpu_state.h"
#include "cli/kernel_record.h"
#include "select/attention.h"

namespace tessera::cli {
namespace {

using Clock = std::chrono::steady_clock;

struct Options {
  std::string suite;  // empty: by the device
  std::string device = "cpu";
  std::string filter;
  std::string json;
  double min_time = 0.4;
  int threads = 0;
  std::string arch_code;  // empty: what TESSERA_CODE_ARCH says, else the GPU's own
  bool first_use = false;
  bool check = false;
  bool evidence = false;
  bool progress = false;
};

struct Row {
  cases::Case c;
  Timing timing;
  double flops = 0;           // per second
  double bytes = 0;           // per second, compulsory traffic
  double read_bandwidth = 0;  // decode on the CPU: the ceiling, measured right after
  double part = 0;            // of the ceiling
  std::string ceiling;
  std::string refused;  // why it was not run
  std::string wrong;    // why its result is wrong; then it is not timed
  double error = 0;     // over what is allowed, where it was checked
  Device::Overheads overheads;
};

constexpr int kEvidenceRuns = 100;

using Plan = std::unique_ptr<tessera_plan, decltype(&tessera_plan_destroy)>;

// Runs a case; once where nothing is to be timed (row: null).
Status time_case(const cases::Case& c, Device& device, cases::Buffers& buffers, const Options* o, Row* row) {
  const auto failure = [&](tessera_status code) {
    return Status(code, fmt::format("{}: {}", c.name, tessera_last_error()));
  };
  if (Status s = device.upload(buffers); !s.ok()) return s;
  const tessera_attention args = buffers.args();
  tessera_plan* made = nullptr;
  if (const tessera_status s = tessera_plan_create(buffers.op(), &args, &made); s != TESSERA_OK) return failure(s);
  const Plan plan(made, &tessera_plan_destroy);
  const std::size_t scratch = tessera_plan_workspace(plan.get());
  Result<void*> workspace = device.workspace(scratch);
  if (!workspace.ok()) return workspace.status();

  const auto call = [&](void* stream) -> Status {
    const tessera_status s = tessera_plan_run(plan.get(), &args, *workspace, scratch, stream);
    return s == TESSERA_OK ? Status() : failure(s);
  };
  if (row == nullptr) {
    if (Status s = call(device.stream()); !s.ok()) return s;
    return device.download(buffers);
  }
  Result<std::vector<double>> samples =
      o->evidence ? device.time_single(kEvidenceRuns, call) : device.time(o->min_time, call);
  if (!samples.ok()) return samples.status();
  row->timing = summarise(std::move(*samples));
  Result<Device::Overheads> overheads = device.overheads(call);
  if (!overheads.ok()) return overheads.status();
  row->overheads = *overheads;
  return device.download(buffers);
}

// The backward needs the forward's o and lse; the library's own will do, since only time is looked at.
Status run_forward(const cases::Case& backward, const oracle::Inputs& inputs, Device& device, cases::Buffers* to) {
  cases::Case c = backward;
  c.problem.op = AttentionOp::kForward;
  c.problem.with_lse = true;
  c.problem.with_dlse = false;
  c.problem.deterministic = false;
  cases::Buffers buffers(c, inputs, nullptr);
  if (Status s = time_case(c, device, buffers, nullptr, nullptr); !s.ok()) return s;
  to->take_saved(buffers);
  return {};
}

// Some rows and keys against the oracle, all of them where the case is small.
void check_row(Row& row, Device& device) {
  constexpr std::int64_t kWhole = 256, kSample = 16;
  cases::Case c = row.c;
  if (c.problem.op != AttentionOp::kDecode && c.problem.seq_k > kWhole) c.sample = kSample;
  const Report report = check_case(c, device, 1, 0);
  row.error = report.worst_ratio;
  if (report.outcome == Outcome::kFailed) row.wrong = report.detail;
}

Status measure(Row& row, Device& device, const Options& o) {
  // Asked before inputs are made, which takes a while for large cases.
  const select::Selection selection = select::select_attention(row.c.problem, device.as_selected());
  if (selection.candidates.empty()) {
    row.refused = fmt::format("no kernel on {} serves it", device.as_selected().name);
    for (const select::Refusal& r : selection.refusals) row.refused += fmt::format("; {}: {}", r.kernel, r.reason);
    return {};
  }
  if (o.check || o.evidence) check_row(row, device);
  if (!row.wrong.empty()) return {};
  const oracle::Inputs inputs = cases::make_shapes(row.c);
  cases::Buffers buffers(row.c, inputs, nullptr);
  if (row.c.problem.op == AttentionOp::kBackward) {
    if (Status s = run_forward(row.c, inputs, device, &buffers); !s.ok()) return s;
  }
  if (Status s = time_case(row.c, device, buffers, &o, &row); !s.ok()) return s;
  row.flops = row.c.flops() / row.timing.median;
  row.bytes = row.c.bytes() / row.timing.median;
  return {};
}

void hold_against(Row& row, const Device& device, const Ceilings& ceilings) {
  const AttentionProblem& p = row.c.problem;
  if (!device.is_cpu() && p.op == AttentionOp::kDecode) {
    row.part = row.bytes / ceilings.copy_bandwidth;
    row.ceiling = "copy";
    return;
  }
  if (!device.is_cpu()) {
    for (const Unit& unit : ceilings.units) {
      if (unit.name != fmt::format("mma.sync {}", name_of(p.dtype))) continue;
      row.part = row.flops / unit.flops;
      row.ceiling = unit.name;
    }
    return;
  }
  if (p.op == AttentionOp::kDecode) {
    row.part = row.bytes / row.read_bandwidth;
    row.ceiling = fmt::format("read {:.1f} GB/s", row.read_bandwidth / 1e9);
    return;
  }
  const Unit& unit = p.dtype == DType::kFloat32 ? ceilings.fp32() : ceilings.best_for_16_bit();
  row.part = row.flops / unit.flops;
  row.ceiling = unit.name;
}

std::string mask_text(const AttentionProblem& p) {
  std::string text = p.causal ? "causal" : "";
  if (p.paged) text += fmt::format("{}page {}", text.empty() ? "" : ", ", p.page_size);
  return text.empty() ? "-" : text;
}

std::string heads_text(const AttentionProblem& p) {
  return p.heads_q == p.heads_kv ? fmt::format("{}", p.heads_q) : fmt::format("{}:{}", p.heads_q, p.heads_kv);
}

void print_rows(const char* title, AttentionOp op, const std::vector<Row>& rows) {
  const bool decode = op == AttentionOp::kDecode;
  const bool gpu = std::any_of(rows.begin(), rows.end(), [](const Row& r) { return r.overheads.graph > 0; });
  const bool checked = std::any_of(rows.begin(), rows.end(), [](const Row& r) { return r.error > 0; });
  using Align = Table::Align;
  Table table({{"dtype", Align::kLeft},
               {"B"},
               {"S"},
               {"H"},
               {"D"},
               {"mask", Align::kLeft},
               {"median"},
               {"p95"},
               {"p99"},
               {"spread"},
               {gpu ? "graph" : ""},
               {gpu ? "host" : ""},
               {checked ? "error" : ""},
               {decode ? "GB/s" : "GFLOP/s"},
               {"of ceiling"},
               {"", Align::kLeft}});
  std::map<std::string, int> refused;
  for (const Row& row : rows) {
    const AttentionProblem& p = row.c.problem;
    if (p.op != op) continue;
    if (!row.refused.empty()) {
      ++refused[row.refused];
      continue;
    }
    if (!row.wrong.empty()) {
      table.add({name_of(p.dtype), fmt::format("{}", p.batch), fmt::format("{}", p.seq_k), heads_text(p),
                 fmt::format("{}", p.dim_qk), mask_text(p), paint(Style::kBad, "WRONG"), "", "", "", "", "",
                 fmt::format("{:.3g}", row.error), "", "", paint(Style::kBad, row.wrong)});
      continue;
    }
    table.add({name_of(p.dtype), fmt::format("{}", p.batch), fmt::format("{}", p.seq_k), heads_text(p),
               fmt::format("{}", p.dim_qk), mask_text(p), seconds_text(row.timing.median), seconds_text(row.timing.p95),
               seconds_text(row.timing.p99), fmt::format("{:.0f}%", 100 * row.timing.spread),
               gpu ? seconds_text(row.overheads.graph) : "", gpu ? seconds_text(row.overheads.host) : "",
               checked ? fmt::format("{:.2f}", row.error) : "",
               fmt::format("{:.1f}", (decode ? row.bytes : row.flops) / 1e9),
               row.ceiling.empty() ? "-" : fmt::format("{:.0f}%", 100 * row.part), paint(Style::kDim, row.ceiling)});
  }
  if (table.empty() && refused.empty()) return;
  fmt::print("\n{}\n", paint(Style::kBold, title));
  if (!table.empty()) table.print();
  for (const auto& [reason, times] : refused) {
    fmt::print("  {} {}\n", paint(Style::kWarn, fmt::format("{} not run:", times)), reason);
  }
}

Json json_of(const Row& row) {
  const AttentionProblem& p = row.c.problem;
  Json json{{"name", row.c.name},        {"op", name_of(p.op)},
            {"dtype", name_of(p.dtype)}, {"batch", p.batch},
            {"seq_q", p.seq_q},          {"seq_k", p.seq_k},
            {"heads_q", p.heads_q},      {"heads_kv", p.heads_kv},
            {"dim_qk", p.dim_qk},        {"dim_v", p.dim_v},
            {"causal", p.causal},        {"flops", row.c.flops()},
            {"bytes", row.c.bytes()},    {"unfused_bytes", row.c.unfused_bytes()}};
  if (!row.refused.empty()) {
    json["refused"] = row.refused;
    return json;
  }
  if (row.error > 0) json["error_over_allowed"] = row.error;
  if (!row.wrong.empty()) {
    json["wrong"] = row.wrong;
    return json;
  }
  json["p99_s"] = row.timing.p99;
  if (row.overheads.graph > 0) {
    json["graph_s"] = row.overheads.graph;
    json["host_s"] = row.overheads.host;
  }
  json["median_s"] = row.timing.median;
  json["p95_s"] = row.timing.p95;
  json["spread"] = row.timing.spread;
  json["runs"] = row.timing.runs;
  json["flops_per_s"] = row.flops;
  json["bytes_per_s"] = row.bytes;
  if (row.ceiling.empty()) return json;
  json["part_of_ceiling"] = row.part;
  json["ceiling"] = row.ceiling;
  return json;
}

int run(const Options& o) {
  if (o.threads > 0 && tessera_set_num_threads(o.threads) != TESSERA_OK) return fail(kBadUsage, tessera_last_error());
  Result<std::unique_ptr<Device>> device = open_device(o.device, o.arch_code);
  if (!device.ok()) return fail(static_cast<ExitCode>(exit_code_of(device.status())), device.status().message());
  const std::string suite = !o.suite.empty()      ? o.suite
                            : o.evidence          ? "evidence"
                            : (*device)->is_cpu() ? "bench"
                                                  : "bench-gpu";
  std::vector<Row> rows;
  for (cases::Case& c : cases::suite(suite)) {
    if (c.name.find(o.filter) != std::string::npos) rows.emplace_back().c = std::move(c);
  }

  const auto begin = Clock::now();
  fmt::print("{}\n", (*device)->name());
  Json json{{"date", today()},
            {"version", tessera_version()},
            {"device", (*device)->name()},
            {"arch_code", arch_code_in_force(o.arch_code)},
            {"suite", suite}};
  if (!(*device)->is_cpu()) note_sources(json);
  Ceilings ceilings;
  KernelBench kernels;
  if (const auto state = gpu_state((*device)->cuda_index()); state) json["gpu_before"] = json_of(*state);
  if ((*device)->is_cpu()) {
    if (rows.empty()) return fail(kBadUsage, fmt::format("no case of suite {} has '{}' in its name", suite, o.filter));
    ceilings = measure_ceilings(tessera_num_threads());
    json["threads"] = ceilings.threads;
  } else {
    Result<KernelBench> measured = bench_gpu_kernels(**device, o.filter, o.min_time, o.first_use, o.progress);
    if (!measured.ok())
      return fail(static_cast<ExitCode>(exit_code_of(measured.status())), measured.status().message());
    kernels = std::move(*measured);
    if (rows.empty() && kernels.rows.empty()) {
      return fail(kBadUsage, fmt::format("no case of suite {} and no kernel has '{}' in its name", suite, o.filter));
    }
    ceilings.copy_bandwidth = kernels.copy_bandwidth;
  }
  std::fflush(stdout);

  {
    Progress progress("bench", rows.size(), o.progress);
    for (Row& row : rows) {
      progress.step(row.c.name);
      const Status s = measure(row, **device, o);
      if (!s.ok()) {
        progress.finish();
        return fail(static_cast<ExitCode>(exit_code_of(s)), s.message());
      }
      if (row.c.problem.op == AttentionOp::kDecode && (*device)->is_cpu() && row.refused.empty()) {
        row.read_bandwidth = measure_read_bandwidth(ceilings.threads, static_cast<std::size_t>(row.c.bytes()));
      }
    }
  }
  if ((*device)->is_cpu()) ceilings.keep_best_of(measure_ceilings(ceilings.threads));
  for (Unit& unit : kernels.units) {  // of a GPU; again, after the cases
    const DType dtype = unit.name.ends_with("bf16") ? DType::kBFloat16 : DType::kFloat16;
    const Result<Unit> again = measure_mma_peak(**device, dtype, o.min_time);
    if (again.ok()) unit.flops = std::max(unit.flops, again->flops);
  }
  if (!(*device)->is_cpu()) ceilings.units = kernels.units;
  for (Row& row : rows) {
    if (row.refused.empty() && row.wrong.empty()) hold_against(row, **device, ceilings);
  }
  for (const Unit& unit : ceilings.units) {
    fmt::print("  measured {}: {:.0f} GFLOP/s\n", unit.name, unit.flops / 1e9);
    json["ceilings"][unit.name] = unit.flops;
  }
  fmt::print("  measured copy: {:.1f} GB/s\n", ceilings.copy_bandwidth / 1e9);
  json["ceilings"]["copy_bytes_per_s"] = ceilings.copy_bandwidth;
  print_rows("forward", AttentionOp::kForward, rows);
  print_rows("backward", AttentionOp::kBackward, rows);
  print_rows("decode", AttentionOp::kDecode, rows);
  if (!(*device)->is_cpu()) {
    print(kernels);
    json["kernels"] = json_of(kernels);
  }
  if (const auto state = gpu_state((*device)->cuda_index()); state) {
    json["gpu_after"] = json_of(*state);
    fmt::print("\nGPU after: SM {} MHz, memory {} MHz, {:.0f} W, {} C\n", state->sm_mhz, state->memory_mhz,
               state->watts, state->celsius);
  }
  const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  fmt::print("\nspread: (95th - 5th percentile) / median. {} cases in {}\n", rows.size() + kernels.rows.size(),
             seconds_text(seconds));
  json["seconds"] = seconds;
  json["cases"] = Json::array();
  for (const Row& row : rows) json["cases"].push_back(json_of(row));
  if (const int code = write_json(o.json, json); code != kSuccess) return code;
  const auto wrong = std::count_if(rows.begin(), rows.end(), [](const Row& r) { return !r.wrong.empty(); });
  if (wrong > 0) return fail(kCheckFailed, fmt::format("{} of {} cases gave a wrong result", wrong, rows.size()));
  return kSuccess;
}

}  // namespace

Command add_bench(CLI::App& parent) {
  auto o = std::make_shared<Options>();
  CLI::App* app = parent.add_subcommand("bench", "Measure speed against measured ceilings");
  app->add_option("--suite", o->suite, "bench, bench-long, bench-gpu or any other; default: by the device")
      ->type_name("NAME")
      ->check(quiet(CLI::IsMember(cases::suite_names())));
  app->add_option("--device", o->device, "cpu, cuda or cuda:N")->type_name("DEVICE")->capture_default_str();
  app->add_option("--arch-code", o->arch_code,
                  "Code for this architecture, on a newer GPU: native, sm_75, sm_80, ...; default: TESSERA_CODE_ARCH, "
                  "else native")
      ->type_name("ARCH")
      ->capture_default_str();
  app->add_flag("--check", o->check, "Check each case against the oracle before it is timed; a wrong one is not");
  app->add_flag("--evidence", o->evidence,
                "Suite evidence: each case checked, then 100 single calls, launch included, with p50, p95 and p99");
  app->add_flag("--first-use", o->first_use, "GPU: also how long each kernel's first use takes; compiles them all");
  app->add_option("--filter", o->filter, "Only cases with this in their name")->type_name("TEXT");
  app->add_option("--min-time", o->min_time, "Seconds to spend on a case, at the least")
      ->type_name("SECONDS")
      ->check(quiet(CLI::Range(0.0, 600.0)))
      ->capture_default_str();
  app->add_option("--threads", o->threads, "CPU threads; 0: the default")
      ->type_name("N")
      ->check(quiet(CLI::NonNegativeNumber))
      ->capture_default_str();
  app->add_option("--json", o->json, "Write all figures to this file")->type_name("FILE");
  app->add_flag("--progress", o->progress, "Draw the bar even where stderr is no terminal");
  app->footer(
      "GFLOP/s count the visible (query, key) pairs only: 2 products forward, 5 backward. fp32 is held against the\n"
      "fp32 FMA peak, 16-bit types against the fastest unit that was measured, decode against reading as many bytes\n"
      "as it must move. On a GPU, forward and backward are held against the tensor cores' rate through mma.sync, and\n"
      "the kernels that serve others are timed too.\n\n"
      "Examples:\n"
      "  tessera bench\n"
      "  tessera bench --filter bwd/fp32 --min-time 2\n"
      "  tessera bench --suite bench-long --threads 1 --json bench.json\n"
      "  tessera bench --device cuda --evidence --json evidence.json");
  return {app, [o] { return run(*o); }};
}

}  // namespace tessera::cli
