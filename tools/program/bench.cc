// `tessera bench`: how fast the cases run, against ceilings measured in the same run.
#include <algorithm>
#include <chrono>
#include <map>
#include <memory>

#include "base/format.h"
#include "engine/json.h"
#include "program/ceiling.h"
#include "program/commands.h"
#include "program/console.h"
#include "program/evidence.h"
#include "program/gpu_kernels.h"
#include "program/gpu_state.h"
#include "program/sources.h"
#include "results/date.h"
#include "verify/check.h"
#include "verify/device.h"
#include "verify/family.h"

namespace tessera::tools {
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
  std::unique_ptr<verify::Case> c;
  Timing timing;
  double flops = 0;           // per second
  double bytes = 0;           // per second, compulsory traffic
  double read_bandwidth = 0;  // memory-bound on the CPU: the ceiling, measured right after
  double part = 0;            // of the ceiling
  std::string ceiling;
  bool uses_wgmma = false;        // a kernel of Hopper's own serves it
  std::string refused;            // why it was not run
  std::string wrong;              // why its result is wrong; then it is not timed
  double error = 0;               // divided by what is allowed, if it was checked
  int equal_runs = 0;             // evidence: calls that gave the bits that were judged
  double largest_difference = 0;  // of the other calls' results, divided by what it may be
  verify::Device::Overheads overheads;
};

constexpr int kEvidenceRuns = 300;

using Plan = std::unique_ptr<tessera_plan, decltype(&tessera_plan_destroy)>;

// samples(call): seconds of single calls.
template <class F>
Status time_call(Row& row, verify::Device& device, verify::Call& tensors, F&& samples_of) {
  const auto failure = [&](tessera_status code) {
    return Status(code, format("{}: {}", row.c->name, tessera_last_error()));
  };
  if (Status s = device.upload(tensors); !s.ok()) return s;
  tessera_plan* made = nullptr;
  if (const tessera_status s = tensors.plan(&made); s != TESSERA_OK) return failure(s);
  const Plan plan(made, &tessera_plan_destroy);
  const std::size_t scratch = tessera_plan_workspace(plan.get());
  const Result<void*> workspace = device.workspace(scratch);
  if (!workspace.ok()) return workspace.status();

  const auto call = [&](void* stream) -> Status {
    const tessera_status s = tensors.run(plan.get(), *workspace, scratch, stream);
    return s == TESSERA_OK ? Status() : failure(s);
  };
  Result<std::vector<double>> samples = samples_of(call);
  if (!samples.ok()) return samples.status();
  if (!row.wrong.empty()) return {};
  row.timing = summarise(std::move(*samples));
  const Result<verify::Device::Overheads> overheads = device.overheads(row.timing.median, call);
  if (!overheads.ok()) return overheads.status();
  row.overheads = *overheads;
  row.flops = row.c->flops() / row.timing.median;
  row.bytes = row.c->bytes() / row.timing.median;
  return {};
}

Status time_case(Row& row, verify::Device& device, double min_time) {
  const auto tensors = row.c->timed_call(device);
  if (!tensors.ok()) return tensors.status();
  return time_call(row, device, **tensors, [&](const auto& call) { return device.time(min_time, call); });
}

// The first result is judged by the oracle, and every timed one is compared with it.
Status time_evidence(Row& row, verify::Device& device) {
  const std::unique_ptr<verify::Trial> trial = row.c->trial();
  const auto tensors = trial->call(device, 0);
  if (!tensors.ok()) return tensors.status();
  return time_call(row, device, **tensors, [&](const auto& call) -> Result<std::vector<double>> {
    if (Status s = call(device.stream()); !s.ok()) return s;
    if (Status s = device.fetch(**tensors); !s.ok()) return s;
    verify::Judgement judgement;
    trial->judge(**tensors, 0, judgement);
    row.error = judgement.worst_ratio;
    row.wrong = judgement.failure;
    if (!row.wrong.empty()) return std::vector<double>();
    Result<Evidence> evidence =
        Evidence::begin(**tensors, device, judgement.spare, row.c->equal_runs_promised(device), kEvidenceRuns);
    if (!evidence.ok()) return evidence.status();
    Result<std::vector<double>> samples =
        device.time_single(kEvidenceRuns, call, [&](int n) { return evidence->compare(n); });
    if (Status s = evidence->finish(); !s.ok()) return s;
    row.equal_runs = evidence->equal();
    row.largest_difference = evidence->largest();
    row.wrong = evidence->wrong();
    return samples;
  });
}

Status measure(Row& row, verify::Device& device, const Options& o) {
  // Asked first, because making the inputs of a large case takes a while.
  const engine::Explanation explanation = row.c->explain(device.as_selected());
  if (explanation.options.empty()) {
    row.refused = format("no kernel on {} serves it; {}", device.as_selected().name, verify::reasons_of(explanation));
    return {};
  }
  row.uses_wgmma = explanation.options.front().kernel.ends_with("_sm90");
  if (o.evidence) return time_evidence(row, device);
  if (o.check) {
    const verify::Report report = verify::check(*row.c->quick_check(), device, 1, 0);
    row.error = report.worst_ratio;
    if (report.outcome == verify::Outcome::kFailed) row.wrong = report.detail;
    if (!row.wrong.empty()) return {};
  }
  return time_case(row, device, o.min_time);
}

void hold_against(Row& row, const verify::Device& device, const Ceilings& ceilings) {
  const bool memory = row.c->bound() == verify::Bound::kMemory;
  if (memory) {
    const double bandwidth = device.is_cpu() ? row.read_bandwidth : ceilings.copy_bandwidth;
    row.part = row.bytes / bandwidth;
    row.ceiling = device.is_cpu() ? format("read {:.1f} GB/s", bandwidth / 1e9) : "copy";
    return;
  }
  if (!device.is_cpu()) {
    for (const Unit& unit : ceilings.units) {
      if (unit.name != format("{} {}", row.uses_wgmma ? "wgmma" : "mma.sync", name_of(row.c->dtype()))) continue;
      row.part = row.flops / unit.flops;
      row.ceiling = unit.name;
    }
    return;
  }
  const Unit& unit = row.c->dtype() == DType::kFloat32 ? ceilings.fp32() : ceilings.best_for_16_bit();
  row.part = row.flops / unit.flops;
  row.ceiling = unit.name;
}

std::string cell_text(const Json& value) {
  if (value.is_null()) return "-";
  if (value.is_boolean()) return value.get<bool>() ? "yes" : "-";
  return value.is_string() ? value.get<std::string>() : value.dump();
}

// Named fields of an op's rows that tell them apart: those that are the same in all rows, or equal to one named before,
// are left out.
class FieldColumns {
 public:
  explicit FieldColumns(const std::vector<const Row*>& rows) {
    std::vector<std::string> names;
    for (const Row* row : rows) {
      fields_.push_back(engine::json_of(row->c->fields()));
      for (const auto& [name, value] : fields_.back().items()) {
        if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
      }
    }
    std::vector<std::vector<std::string>> shown;
    for (const std::string& name : names) {
      std::vector<std::string> column;
      for (const Json& fields : fields_) column.push_back(cell_text(fields.value(name, Json())));
      const bool constant = std::all_of(column.begin(), column.end(), [&](const auto& c) { return c == column[0]; });
      if (constant || std::find(shown.begin(), shown.end(), column) != shown.end()) continue;
      shown.push_back(column);
      names_.push_back(name);
    }
  }

  const std::vector<std::string>& names() const { return names_; }
  std::vector<std::string> cells(std::size_t row) const {
    std::vector<std::string> cells;
    for (const std::string& name : names_) cells.push_back(cell_text(fields_[row].value(name, Json())));
    return cells;
  }

 private:
  std::vector<Json> fields_;
  std::vector<std::string> names_;
};

void print_op(const std::string& op, const std::vector<const Row*>& rows) {
  const bool memory = rows.front()->c->bound() == verify::Bound::kMemory;
  const bool gpu = std::any_of(rows.begin(), rows.end(), [](const Row* r) { return r->overheads.graph > 0; });
  const bool checked = std::any_of(rows.begin(), rows.end(), [](const Row* r) { return r->error > 0; });
  const FieldColumns fields(rows);
  std::vector<Table::Column> columns;
  for (const std::string& name : fields.names()) columns.push_back({name});
  for (const char* title : {"median", "p95", "p99", "spread", gpu ? "graph" : "", gpu ? "host" : "",
                            checked ? "error" : "", memory ? "GB/s" : "GFLOP/s", "of ceiling"}) {
    columns.push_back({title});
  }
  columns.push_back({"", Table::Align::kLeft});
  Table table(columns);
  std::map<std::string, int> refused;
  for (std::size_t n = 0; n < rows.size(); ++n) {
    const Row& row = *rows[n];
    if (!row.refused.empty()) {
      ++refused[row.refused];
      continue;
    }
    std::vector<std::string> cells = fields.cells(n);
    const auto add = [&](std::initializer_list<std::string> more) { cells.insert(cells.end(), more); };
    if (!row.wrong.empty()) {
      add({paint(Style::kBad, "WRONG"), "", "", "", "", "", format("{:.3g}", row.error), "", "",
           paint(Style::kBad, row.wrong)});
    } else {
      add({seconds_text(row.timing.median), seconds_text(row.timing.p95), seconds_text(row.timing.p99),
           format("{:.0f}%", 100 * row.timing.spread), gpu ? seconds_text(row.overheads.graph) : "",
           gpu ? seconds_text(row.overheads.host) : "", checked ? format("{:.2f}", row.error) : "",
           format("{:.1f}", (memory ? row.bytes : row.flops) / 1e9),
           row.ceiling.empty() ? "-" : format("{:.0f}%", 100 * row.part), paint(Style::kDim, row.ceiling)});
    }
    table.add(std::move(cells));
  }
  print("\n{}\n", paint(Style::kBold, op));
  if (!table.empty()) table.print();
  for (const auto& [reason, times] : refused) {
    print("  {} {}\n", paint(Style::kWarn, format("{} not run:", times)), reason);
  }
}

void print_rows(const std::vector<Row>& rows) {
  std::vector<std::string> ops;
  for (const Row& row : rows) {
    if (std::find(ops.begin(), ops.end(), row.c->op()) == ops.end()) ops.push_back(row.c->op());
  }
  for (const std::string& op : ops) {
    std::vector<const Row*> of_op;
    for (const Row& row : rows) {
      if (row.c->op() == op) of_op.push_back(&row);
    }
    print_op(op, of_op);
  }
}

void print_evidence(const std::vector<Row>& rows, Json& json) {
  int calls = 0, equal = 0;
  double largest = 0;
  for (const Row& row : rows) {
    calls += row.timing.runs;
    equal += row.timing.runs > 0 ? row.equal_runs : 0;
    largest = std::max(largest, row.largest_difference);
  }
  print("{} calls: {} gave the bits of a result that the oracle judged", calls, equal);
  if (equal < calls) {
    print(", {} differ from one by at most {:.2f} of what the oracle leaves", calls - equal, largest);
  }
  print("\n");
  json["calls"] = calls;
  json["equal_calls"] = equal;
  json["largest_difference"] = largest;
}

Json json_of(const Row& row) {
  Json json{{"name", row.c->name},
            {"family", row.c->family()},
            {"op", row.c->op()},
            {"fields", engine::json_of(row.c->fields())},
            {"flops", row.c->flops()},
            {"bytes", row.c->bytes()},
            {"unfused_bytes", row.c->unfused_bytes()}};
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
  if (row.equal_runs > 0 || row.largest_difference > 0) {
    json["equal_runs"] = row.equal_runs;
    json["largest_difference"] = row.largest_difference;
  }
  json["flops_per_s"] = row.flops;
  json["bytes_per_s"] = row.bytes;
  if (row.ceiling.empty()) return json;
  json["part_of_ceiling"] = row.part;
  json["ceiling"] = row.ceiling;
  return json;
}

Status measure_all(std::vector<Row>& rows, verify::Device& device, const Options& o, int threads) {
  Progress progress("bench", rows.size(), o.progress);
  for (Row& row : rows) {
    progress.step(row.c->name);
    if (const Status s = measure(row, device, o); !s.ok()) return s;
    if (row.c->bound() == verify::Bound::kMemory && device.is_cpu() && row.refused.empty()) {
      row.read_bandwidth = measure_read_bandwidth(threads, static_cast<std::size_t>(row.c->bytes()));
    }
  }
  return {};
}

// Measured again after the cases: interference can only lower a figure.
void measure_again(Ceilings& ceilings, verify::Device& device, double min_time) {
  if (device.is_cpu()) return ceilings.keep_best_of(measure_ceilings(ceilings.threads));
  for (Unit& unit : ceilings.units) {
    const DType dtype = unit.name.ends_with("bf16") ? DType::kBFloat16 : DType::kFloat16;
    const Result<Unit> again = measure_peak(device, unit.name.starts_with("wgmma"), dtype, min_time);
    if (again.ok()) unit.flops = std::max(unit.flops, again->flops);
  }
}

void print_ceilings(const Ceilings& ceilings, Json& json) {
  for (const Unit& unit : ceilings.units) {
    print("  measured {}: {:.0f} GFLOP/s\n", unit.name, unit.flops / 1e9);
    json["ceilings"][unit.name] = unit.flops;
  }
  print("  measured copy: {:.1f} GB/s\n", ceilings.copy_bandwidth / 1e9);
  json["ceilings"]["copy_bytes_per_s"] = ceilings.copy_bandwidth;
}

int run(const Options& o) {
  if (o.threads > 0 && tessera_set_num_threads(o.threads) != TESSERA_OK) return fail(kBadUsage, tessera_last_error());
  const Result<std::unique_ptr<verify::Device>> opened = verify::open_device(o.device, o.arch_code);
  if (!opened.ok()) return fail(opened.status());
  verify::Device& device = **opened;
  const std::string suite = !o.suite.empty()  ? o.suite
                            : o.evidence      ? "evidence"
                            : device.is_cpu() ? "bench"
                                              : "bench-gpu";
  std::vector<Row> rows;
  for (auto& c : verify::suite(suite)) {
    if (c->name.find(o.filter) != std::string::npos) rows.emplace_back().c = std::move(c);
  }

  const auto begin = Clock::now();
  print("{}\n", device.name());
  Json json{{"date", results::today()},
            {"version", tessera_version()},
            {"device", device.name()},
            {"arch_code", verify::arch_code_in_force(o.arch_code)},
            {"suite", suite}};
  Ceilings ceilings;
  KernelBench kernels;
  if (const auto state = gpu_state(device.cuda_index()); state) json["gpu_before"] = json_of(*state);
  if (device.is_cpu()) {
    if (rows.empty()) return fail(kBadUsage, format("no case of suite {} has '{}' in its name", suite, o.filter));
    ceilings = measure_ceilings(tessera_num_threads());
    json["threads"] = ceilings.threads;
  } else {
    note_sources(json);
    json["l2_flush_bytes"] = o.evidence ? 0 : device.flush_bytes();
    Result<KernelBench> measured = bench_gpu_kernels(device, o.filter, o.min_time, o.first_use, o.progress);
    if (!measured.ok()) return fail(measured.status());
    kernels = std::move(*measured);
    if (rows.empty() && kernels.rows.empty()) {
      return fail(kBadUsage, format("no case of suite {} and no kernel has '{}' in its name", suite, o.filter));
    }
    ceilings.copy_bandwidth = kernels.copy_bandwidth;
    ceilings.units = kernels.units;
  }
  std::fflush(stdout);

  if (const Status s = measure_all(rows, device, o, ceilings.threads); !s.ok()) return fail(s);
  measure_again(ceilings, device, o.min_time);
  for (Row& row : rows) {
    if (row.refused.empty() && row.wrong.empty()) hold_against(row, device, ceilings);
  }
  print_ceilings(ceilings, json);
  print_rows(rows);
  if (!device.is_cpu()) {
    print_bench(kernels);
    json["kernels"] = json_of(kernels);
  }
  if (const auto state = gpu_state(device.cuda_index()); state) {
    json["gpu_after"] = json_of(*state);
    print("\nGPU after: SM {} MHz, memory {} MHz, {:.0f} W, {} C\n", state->sm_mhz, state->memory_mhz, state->watts,
          state->celsius);
  }
  const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  print("\nspread: (95th - 5th percentile) / median. {}{} cases in {}\n",
        !o.evidence && device.flush_bytes() > 0 ? "L2 is flushed before each call, but not in a graph. " : "",
        rows.size() + kernels.rows.size(), seconds_text(seconds));
  if (o.evidence) print_evidence(rows, json);
  json["seconds"] = seconds;
  json["cases"] = Json::array();
  for (const Row& row : rows) json["cases"].push_back(json_of(row));
  if (const int code = write_json(o.json, json); code != kSuccess) return code;
  const auto wrong = std::count_if(rows.begin(), rows.end(), [](const Row& r) { return !r.wrong.empty(); });
  if (wrong > 0) return fail(kCheckFailed, format("{} of {} cases gave a wrong result", wrong, rows.size()));
  return kSuccess;
}

}  // namespace

Command add_bench(App parent) {
  auto o = std::make_shared<Options>();
  const App app = parent.add_subcommand("bench", "Measure speed against measured ceilings");
  app.add_option("--suite", o->suite, "bench, bench-long, bench-gpu or any other; default: by the device")
      .type_name("NAME")
      .one_of(verify::suite_names());
  app.add_option("--device", o->device, "cpu, cuda or cuda:N").type_name("DEVICE").shows_default();
  app.add_option("--arch-code", o->arch_code,
                 "Code for this architecture, on a newer GPU: native, sm_75, sm_80, ...; default: TESSERA_CODE_ARCH, "
                 "else native")
      .type_name("ARCH")
      .shows_default();
  app.add_flag("--check", o->check, "Check each case against the oracle before it is timed; a wrong one is not");
  app.add_flag("--evidence", o->evidence,
               "Suite evidence: each case checked, then 300 single calls, launch included, with p50, p95 and p99; each "
               "result must have the bits of the checked one or be as right");
  app.add_flag("--first-use", o->first_use, "GPU: also how long each kernel's first use takes; compiles them all");
  app.add_option("--filter", o->filter, "Only cases with this in their name").type_name("TEXT");
  app.add_option("--min-time", o->min_time, "Seconds to spend on a case, at the least")
      .type_name("SECONDS")
      .range(0.0, 600.0)
      .shows_default();
  app.add_option("--threads", o->threads, "CPU threads; 0: the default").type_name("N").non_negative().shows_default();
  app.add_option("--json", o->json, "Write all figures to this file").output_file();
  app.add_flag("--progress", o->progress, "Draw the bar even if stderr is no terminal");
  app.footer(
      "GFLOP/s count useful operations only: of attention, those of the visible (query, key) pairs. fp32 is compared\n"
      "with the fp32 FMA peak, 16-bit types with the fastest unit that was measured, and what waits for memory with\n"
      "reading as many bytes as it must move. On a GPU, what computes is compared with the tensor cores' rate through\n"
      "the instruction that its kernel uses, mma.sync or Hopper's wgmma, and the kernels that serve others are timed "
      "too.\n\n"
      "Examples:\n"
      "  tessera bench\n"
      "  tessera bench --filter bwd/fp32 --min-time 2\n"
      "  tessera bench --suite bench-long --threads 1 --json bench.json\n"
      "  tessera bench --device cuda --evidence --json evidence.json");
  return {app, [o] { return run(*o); }};
}

}  // namespace tessera::tools
