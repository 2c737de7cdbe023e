// `tessera verify`: the list of cases on a device, against the fp64 oracle, through the public C ABI.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>

#include "base/format.h"
#include "cuda/kernel.h"
#include "engine/json.h"
#include "jit/hash.h"
#include "jit/sources.h"
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
  std::vector<std::string> arch_codes;  // empty: what TESSERA_CODE_ARCH says, else the GPU's own
  std::string record;
  std::uint64_t seed = 1;
  int repeat = 1;
  double seconds = 0;               // 0: no limit
  std::vector<std::string> resume;  // files of earlier runs
  bool progress = false;
  bool verbose = false;
};

using Cases = std::vector<std::unique_ptr<verify::Case>>;
using Devices = std::vector<std::unique_ptr<verify::Device>>;
using Kernels = std::vector<jit::KernelInstance>;

// The cases with the code of one architecture.
struct Run {
  std::string arch_code;
  Devices devices;  // one per worker
  // By case:
  std::vector<Kernels> kernels;
  std::vector<std::string> codes;  // the hash of its kernels, as they are now; empty on a CPU
  std::vector<Json> earlier;       // its entry in the file to go on from, if it passed with the same code; else null
  std::vector<bool> late;          // not run because the time was over
  std::vector<Report> reports;

  std::string arch() const { return devices.front()->as_selected().name; }
  bool wants(std::size_t n) const { return earlier[n].is_null(); }
};

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

Style style_of(Outcome outcome) {
  return outcome == Outcome::kFailed ? Style::kBad : outcome == Outcome::kRefused ? Style::kWarn : Style::kGood;
}

std::string code_of(const Kernels& kernels) {
  std::string text;
  for (const jit::KernelInstance& kernel : kernels) text += jit::program_text(kernel) + jit::code_hash(kernel.header);
  return text.empty() ? "" : jit::hash_of(text).hex();
}

// What --json wrote. Empty if there is no such file, if it is another, or one that is just being written.
Json earlier_runs(const std::string& file) {
  std::ifstream in(std::filesystem::is_regular_file(file) ? file : "");
  Json runs = Json::parse(in, nullptr, false);
  if (runs.is_object()) runs = Json::array({runs});
  const bool is_good = runs.is_array() && std::all_of(runs.begin(), runs.end(), [](const Json& run) {
                         return run.is_object() && run.contains("suite") && run.contains("cases");
                       });
  return is_good ? runs : Json::array();
}

// The cases that passed in earlier runs of the same kind, by name and the hash of their kernels.
using Passes = std::map<std::pair<std::string, std::string>, Json>;
Passes earlier_passes(const Options& o, const std::string& arch_code, const std::string& device) {
  Passes passes;
  for (const std::string& file : o.resume) {
    for (const Json& run : earlier_runs(file)) {
      if (run.value("suite", "") != o.suite || run.value("arch_code", "") != arch_code ||
          run.value("device", "") != device || run.value("seed", o.seed) != o.seed ||
          run.value("repeat", o.repeat) != o.repeat) {
        continue;
      }
      for (const Json& c : run.value("cases", Json::array())) {
        if (c.value("outcome", "") == name_of(Outcome::kPassed))
          passes.insert_or_assign({c.value("name", ""), c.value("code", "")}, c);
      }
    }
  }
  return passes;
}

Result<Run> open_run(const Options& o, const std::string& arch_code, const Cases& list, int workers) {
  Run run;
  run.arch_code = arch_code;
  for (int n = 0; n < workers; ++n) {
    Result<std::unique_ptr<verify::Device>> device = verify::open_device(o.device, arch_code);
    if (!device.ok()) return device.status();
    run.devices.push_back(std::move(*device));
  }
  const engine::Device device = run.devices.front()->as_selected();
  const Passes passes = earlier_passes(o, verify::arch_code_in_force(arch_code), run.devices.front()->name());
  for (const auto& c : list) {
    const engine::Explanation explanation = c->explain(device);
    run.kernels.push_back(explanation.options.empty()
                              ? Kernels()
                              : c->kernels_of({explanation.options[0].kernel, explanation.options[0].config}, device));
    run.codes.push_back(code_of(run.kernels.back()));
    const auto pass = run.codes.back().empty() ? passes.end() : passes.find({c->name, run.codes.back()});
    run.earlier.push_back(pass == passes.end() ? Json() : pass->second);
  }
  run.late.resize(list.size());
  run.reports.resize(list.size());
  return run;
}

// Compiles and loads what the cases run, all at once: cases that follow each other often share a kernel, and would wait
// for each other. What does not compile is reported by its cases. part, parts: every parts-th kernel.
void load_kernels(const Options& o, const std::vector<Run>& runs, std::size_t part = 0, std::size_t parts = 1) {
  std::vector<std::pair<const Run*, const jit::KernelInstance*>> all;
  std::set<std::pair<std::string, std::string>> known;
  for (const Run& run : runs) {
    if (run.devices.front()->is_cpu()) continue;
    for (std::size_t n = 0; n < run.kernels.size(); ++n) {
      if (!run.wants(n)) continue;
      for (const jit::KernelInstance& kernel : run.kernels[n]) {
        if (!known.emplace(run.arch(), jit::program_text(kernel)).second) continue;
        if (known.size() % parts == part) all.emplace_back(&run, &kernel);
      }
    }
  }
  Progress progress("compile", all.size(), o.progress);
  std::mutex terminal;
  verify::in_parallel(static_cast<std::int64_t>(all.size()), parts > 1 ? 1 : 0, [&](std::int64_t n) {
    const auto& [run, kernel] = all[static_cast<std::size_t>(n)];
    {
      const std::lock_guard lock(terminal);
      progress.step(format("{} {}", kernel->name, run->arch()));
    }
    const verify::Device& device = *run->devices.front();
    device.use();
    static_cast<void>(cuda::load_kernel(device.cuda_index(), *kernel));
  });
}

Result<std::vector<Run>> open_runs(const Options& o, const Cases& list, int workers) {
  std::vector<Run> runs;
  for (const std::string& arch_code : o.arch_codes.empty() ? std::vector<std::string>{""} : o.arch_codes) {
    Result<Run> opened = open_run(o, arch_code, list, workers);
    if (!opened.ok()) return opened.status();
    runs.push_back(std::move(*opened));
  }
  return runs;
}

// How many kernels load_kernels would load.
std::size_t wanted_kernels(const std::vector<Run>& runs) {
  std::set<std::pair<std::string, std::string>> known;
  for (const Run& run : runs) {
    for (std::size_t n = 0; n < run.kernels.size(); ++n) {
      if (!run.wants(n)) continue;
      for (const jit::KernelInstance& kernel : run.kernels[n]) known.emplace(run.arch(), jit::program_text(kernel));
    }
  }
  return known.size();
}

// Runs `body` in a process of its own. To be called before this one has called the driver.
template <class Body>
pid_t start_child(const Body& body) {
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) _exit(body());
  return child;
}

int exit_code_of(pid_t child) {
  int status = 0;
  return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) ? WEXITSTATUS(status) : 0;
}

// The driver compiles PTX, which is what an older architecture's code is, for one thread of a process at a time. So
// processes of their own compile first, into the caches on disk; as many as there is work for, because each of them waits
// for the driver when it opens the device. To be called before the driver is.
void fill_caches(const Options& o, const Cases& list) {
  constexpr std::size_t kKernelsOfAProcess = 4;
  const std::vector<std::string> codes = o.arch_codes.empty() ? std::vector<std::string>{""} : o.arch_codes;
  const bool all_native = std::all_of(
      codes.begin(), codes.end(), [](const std::string& code) { return verify::arch_code_in_force(code) == "native"; });
  if (o.device == "cpu" || all_native) return;
  const auto most = std::min<std::size_t>(static_cast<std::size_t>(verify::machine_threads()), 60);  // of an exit code
  const auto parts = static_cast<std::size_t>(exit_code_of(start_child([&] {
    const Result<std::vector<Run>> runs = open_runs(o, list, 1);
    return runs.ok() ? static_cast<int>(std::min(most, wanted_kernels(*runs) / kKernelsOfAProcess)) : 0;
  })));
  if (parts < 2) return;
  std::vector<pid_t> children;
  for (std::size_t part = 0; part < parts; ++part) {
    children.push_back(start_child([&] {
      if (part > 0) std::freopen("/dev/null", "w", stderr);  // the first one's progress speaks for all
      const Result<std::vector<Run>> runs = open_runs(o, list, 1);
      if (runs.ok()) load_kernels(o, *runs, part, parts);
      return 0;  // what failed is reported by the cases
    }));
  }
  for (const pid_t child : children) exit_code_of(child);
}

void print_case(const Options& o, const std::vector<Run>& runs, const Run& run, const verify::Case& c,
                const Report& r) {
  if (r.outcome != Outcome::kFailed && !o.verbose) return;
  print("{}  {}{}", paint(style_of(r.outcome), name_of(r.outcome)), c.name, runs.size() > 1 ? " as " + run.arch() : "");
  if (r.outcome == Outcome::kPassed) print("  {:.2f}", r.worst_ratio);
  print("{}{}\n", r.detail.empty() ? "" : "\n        ", r.detail);
  std::fflush(stdout);
}

// Cases run in parallel, each worker with its own devices, because the oracle takes most of the time; its answer serves
// all runs. A sampled case has the machine to itself.
void check_all(const Options& o, const Cases& list, std::vector<Run>& runs, bool sampled,
               std::chrono::steady_clock::time_point begin) {
  Progress progress("verify", list.size(), o.progress);
  std::mutex terminal;
  std::atomic<std::size_t> next{0};
  const auto workers = static_cast<int>(runs.front().devices.size());
  verify::in_parallel(workers, workers, [&](std::int64_t worker) {
    for (std::size_t n = next++; n < list.size(); n = next++) {
      verify::Case& c = *list[n];
      {
        const std::lock_guard lock(terminal);
        progress.step(c.name);
      }
      c.seed += o.seed - 1;
      std::vector<Run*> wanted;
      std::vector<verify::Device*> devices;
      for (Run& run : runs) {
        if (!run.wants(n)) continue;
        if (o.seconds > 0 && seconds_since(begin) > o.seconds) {
          const std::lock_guard lock(terminal);  // neighbours in a vector<bool> share a word
          run.late[n] = true;
          continue;
        }
        wanted.push_back(&run);
        devices.push_back(run.devices[static_cast<std::size_t>(worker)].get());
      }
      std::vector<Report> reports = verify::check(c, devices, o.repeat, sampled ? 0 : 1);
      const std::lock_guard lock(terminal);
      for (std::size_t r = 0; r < wanted.size(); ++r) {
        if (reports[r].outcome == Outcome::kFailed || o.verbose) progress.finish();
        print_case(o, runs, *wanted[r], c, reports[r]);
        wanted[r]->reports[n] = std::move(reports[r]);
      }
    }
  });
}

struct Summary {
  std::map<Outcome, int> count;
  std::map<std::string, int> refusals;  // by reason
  double worst = 0;
  std::string worst_case;
  int differing = 0;
  int earlier = 0;  // passed in the run that this one went on from
  Json cases = Json::array();
};

Summary summary_of(const Options& o, const Cases& list, const Run& run) {
  Summary s;
  for (std::size_t n = 0; n < list.size(); ++n) {
    if (run.late[n]) continue;
    const auto judge = [&](double ratio, const std::string& tensor) {
      if (tensor.empty() || ratio < s.worst) return;  // empty: it did not run
      s.worst = ratio;
      s.worst_case = format("{} of {}", tensor, list[n]->name);
    };
    if (!run.wants(n)) {
      ++s.count[Outcome::kPassed];
      ++s.earlier;
      s.differing += run.earlier[n].value("runs_differ", false) ? 1 : 0;
      judge(run.earlier[n].value("error_over_allowed", 0.0), run.earlier[n].value("worst_tensor", ""));
      s.cases.push_back(run.earlier[n]);
      continue;
    }
    const Report& r = run.reports[n];
    ++s.count[r.outcome];
    if (r.outcome == Outcome::kRefused) {
      ++s.refusals[r.detail];
    } else {
      judge(r.worst_ratio, r.worst_tensor);
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
      entry["worst_tensor"] = r.worst_tensor;
      entry["kernel"] = r.kernel;
      entry["workspace"] = r.workspace;
      if (!run.codes[n].empty()) entry["code"] = run.codes[n];
      if (o.repeat > 1) entry["runs_differ"] = r.runs_differ;
    }
    s.cases.push_back(std::move(entry));
  }
  return s;
}

void print_summary(const Options& o, const std::string& device, Summary& s, double seconds) {
  for (const auto& [reason, times] : s.refusals) {
    print("{}  {} of them: {}\n", paint(Style::kWarn, "refused"), times, reason);
  }
  const int bad = s.count[Outcome::kFailed];
  print("{} on {}: {}, {}, {} refused, in {}\n", paint(Style::kBold, o.suite), device,
        paint(bad == 0 ? Style::kGood : Style::kDim, format("{} passed", s.count[Outcome::kPassed])),
        paint(bad > 0 ? Style::kBad : Style::kDim, format("{} failed", bad)), s.count[Outcome::kRefused],
        seconds_text(seconds));
  if (s.earlier > 0) print("{} of them passed in an earlier run, with the same kernels\n", s.earlier);
  if (!s.worst_case.empty()) print("worst error: {:.2f} of what is allowed, {}\n", s.worst, s.worst_case);
  if (o.repeat > 1) {
    print("each case {} times: {} gave results that are not bitwise equal\n", o.repeat, s.differing);
  }
}

// The kernels whose cases have all passed, into the record.
Status record(const Options& o, const Run& run, int passed) {
  std::set<std::string> headers, open;
  for (std::size_t n = 0; n < run.kernels.size(); ++n) {
    const bool pass = !run.wants(n) || (!run.late[n] && run.reports[n].outcome == Outcome::kPassed);
    for (const jit::KernelInstance& kernel : run.kernels[n]) (pass ? headers : open).insert(kernel.header);
  }
  std::erase_if(headers, [&](const std::string& header) { return open.count(header) > 0; });
  const Result<cuda::DeviceInfo> info = cuda::device(run.devices.front()->cuda_index());
  if (!info.ok()) return info.status();
  return results::record_verified(o.record, {headers.begin(), headers.end()},
                                  {run.arch(), info->name, format("verify {}, {} cases", o.suite, passed)});
}

// Prints what a run found, adds it to `json` and to the record.
int report(const Options& o, const Cases& list, const Run& run, double seconds, Json& json) {
  Summary s = summary_of(o, list, run);
  const std::string device = run.devices.front()->name();
  print_summary(o, device, s, seconds);
  const int passed = s.count[Outcome::kPassed], bad = s.count[Outcome::kFailed];
  Json entry{{"date", results::today()},
             {"version", tessera_version()},
             {"suite", o.suite},
             {"device", device},
             {"arch_code", verify::arch_code_in_force(run.arch_code)},
             {"seed", o.seed},
             {"repeat", o.repeat},
             {"passed", passed},
             {"failed", bad},
             {"refused", s.count[Outcome::kRefused]},
             {"worst_error_over_allowed", s.worst},
             {"worst_case", s.worst_case},
             {"seconds", seconds},
             {"cases", s.cases}};
  const auto late = std::count(run.late.begin(), run.late.end(), true);
  if (late > 0) {
    entry["not_run"] = late;
    print("{} {} cases, because {} s were over\n", paint(Style::kWarn, "not run:"), late, o.seconds);
  }
  if (!run.devices.front()->is_cpu()) note_sources(entry);
  json.push_back(std::move(entry));
  if (passed == 0 && bad == 0) {
    return fail(kCheckFailed, "nothing was verified: no kernel on this device serves any of the cases");
  }
  if (!o.record.empty()) {
    if (const Status recorded = record(o, run, passed); !recorded.ok()) return fail(kBadUsage, recorded.message());
  }
  return bad > 0 || late > 0 ? kCheckFailed : kSuccess;
}

int run(const Options& o) {
  Cases list = verify::suite(o.suite);
  std::erase_if(list, [&](const auto& c) { return c->name.find(o.filter) == std::string::npos; });
  if (list.empty()) return fail(kBadUsage, format("no case of suite {} has '{}' in its name", o.suite, o.filter));
  if (!o.record.empty() && (o.device == "cpu" || o.suite != "full" || !o.filter.empty())) {
    return fail(kBadUsage, "--record is for the whole suite full on a GPU");
  }
  if (const Status s = results::may_record(); !o.record.empty() && !s.ok()) return fail(kBadUsage, s.message());
  if (!o.resume.empty() && o.device == "cpu") {
    return fail(kBadUsage, "--resume keeps what passed with the same GPU kernels; it needs --device cuda");
  }
  for (const std::string& file : o.resume) {
    if (earlier_runs(file).empty()) print(stderr, "note: --resume: there is nothing in {}\n", file);
  }
  const bool sampled = std::any_of(list.begin(), list.end(), [](const auto& c) { return c->is_sampled(); });
  const int workers = sampled ? 1 : std::min<int>(verify::machine_threads(), static_cast<int>(list.size()));
  const auto begin = std::chrono::steady_clock::now();
  fill_caches(o, list);
  Result<std::vector<Run>> opened = open_runs(o, list, workers);
  if (!opened.ok()) return fail(opened.status());
  std::vector<Run>& runs = *opened;
  load_kernels(o, runs);
  check_all(o, list, runs, sampled, begin);
  const double seconds = seconds_since(begin);
  int code = kSuccess;
  Json json = Json::array();
  for (const Run& run : runs) code = std::max(code, report(o, list, run, seconds, json));
  const int written = write_json(o.json, runs.size() == 1 && json.size() == 1 ? json.front() : json);
  return written != kSuccess ? written : code;
}

}  // namespace

Command add_verify(App parent) {
  auto o = std::make_shared<Options>();
  const App app = parent.add_subcommand("verify", "Check results against the fp64 oracle");
  app.add_option("--suite", o->suite, "Which cases: quick, full, hostile, ...")
      .type_name("NAME")
      .one_of(verify::suite_names())
      .shows_default();
  app.add_option("--device", o->device, "cpu, cuda or cuda:N").type_name("DEVICE").shows_default();
  app.add_option("--filter", o->filter, "Only cases with this in their name").type_name("TEXT");
  app.add_option("--arch-code", o->arch_codes,
                 "Code for these architectures, on a newer GPU: native, sm_75, sm_80, ..., separated by commas; "
                 "default: TESSERA_CODE_ARCH, else native")
      .type_name("ARCH")
      .delimiter(',');
  app.add_option("--repeat", o->repeat, "Run each case N times and compare the results bitwise")
      .type_name("N")
      .range(1, 100000)
      .shows_default();
  app.add_option("--seed", o->seed, "Of the inputs: N - 1 is added to each case's own").type_name("N").shows_default();
  app.add_option("--json", o->json, "Write every case's outcome to this file").output_file();
  app.add_option("--record", o->record, "Record in this file which kernels passed all of their cases; GPU, suite full")
      .type_name("FILE");
  app.add_option("--seconds", o->seconds,
                 "Start no case after this time, and exit with 1; --resume goes on later. 0: no limit")
      .type_name("S")
      .non_negative()
      .shows_default();
  app.add_option("--resume", o->resume,
                 "Go on from files that --json wrote on such a GPU: keep what passed there with the same kernels")
      .type_name("FILE");
  app.add_flag("--verbose", o->verbose, "A line for every case");
  app.add_flag("--progress", o->progress, "Draw the bar even if stderr is no terminal");
  app.footer(
      "A case passes when its error is at most twice that of the plain computation in the same precision, plus a\n"
      "floor. Cases that no kernel serves on the device are counted as refused, with the reason; if that is all of\n"
      "them, nothing was verified, and the exit code is 1. With --repeat, every\n"
      "forward, and every backward that is asked to be deterministic, must give the same bits in each run.\n\n"
      "Examples:\n"
      "  tessera verify\n"
      "  tessera verify --suite full --filter bwd/bf16\n"
      "  tessera verify --suite hostile --seed 7 --json verify.json\n"
      "  tessera verify --device cuda --suite full --arch-code native,sm_80,sm_75 --record verified.json\n"
      "  tessera verify --device cuda --filter bwd --repeat 100");
  return {app, [o] { return run(*o); }};
}

}  // namespace tessera::tools
