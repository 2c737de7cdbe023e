// `tessera fuzz`: random small problems of every family on a device, against the fp64 oracle, through the public C ABI.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>

#include "base/format.h"
#include "program/commands.h"
#include "program/console.h"
#include "program/sources.h"
#include "results/date.h"
#include "tessera/tessera.h"
#include "verify/check.h"
#include "verify/device.h"
#include "verify/family.h"
#include "verify/parallel.h"

namespace tessera::tools {
namespace {

using verify::Outcome;
using Clock = std::chrono::steady_clock;

struct Options {
  std::string device = "cpu";
  std::string arch_code;  // empty: what TESSERA_CODE_ARCH says, else the GPU's own
  std::string json;
  std::uint64_t seed = 1;
  int problems = 1000;
  int instances = 200;
  int kinds = 0;
  int threads = 0;
  double seconds = 0;
};

constexpr int kMostFailures = 20;

struct Failure {
  std::uint64_t seed;
  std::string name;
  std::string detail;
};

// What the workers share.
struct Tally {
  std::mutex mutex;
  std::map<std::string, std::set<std::string>> instances;  // by family

  std::size_t instance_count() const {
    std::size_t count = 0;
    for (const auto& [family, names] : instances) count += names.size();
    return count;
  }
  struct OfKernel {
    int problems = 0;
    double worst_ratio = 0;
  };
  std::map<std::string, OfKernel> kernels;
  std::vector<Failure> failures;
  std::atomic<std::uint64_t> next{0};  // numbers that were drawn
  std::atomic<int> begun{0}, judged{0}, refused{0}, passed_over{0};
};

std::vector<const verify::Family*> drawn_families() {
  std::vector<const verify::Family*> list = verify::families();
  std::erase_if(list, [](const verify::Family* family) { return family->random == nullptr; });
  return list;
}

// False if its family would have more kernel instances than its part of --instances.
bool within_limit(Tally& tally, const verify::Case& c, const engine::Explanation::Option& option,
                  const engine::Device& device, int limit) {
  std::set<std::string> fresh;
  const std::vector<jit::KernelInstance> wanted = c.kernels_of({option.kernel, option.config}, device);
  const std::lock_guard lock(tally.mutex);
  std::set<std::string>& known = tally.instances[c.family()];
  for (const jit::KernelInstance& instance : wanted) {
    if (known.count(instance.name) == 0) fresh.insert(instance.name);
  }
  if (known.size() + fresh.size() > static_cast<std::size_t>(limit)) return false;
  known.merge(fresh);
  return true;
}

// A family's problems are of o.kinds kinds, which follow each other; each million of seeds has kinds of its own.
std::uint64_t kind_of(const Options& o, std::uint64_t seed) {
  if (o.kinds == 0) return seed;
  const auto kinds = static_cast<std::uint64_t>(o.kinds);
  return seed / 1'000'000 * kinds + seed / drawn_families().size() % kinds;
}

void work(const Options& o, verify::Device& device, Tally& tally, Clock::time_point end) {
  const engine::Device as_selected = device.as_selected();
  const std::vector<const verify::Family*> families = drawn_families();
  const int limit = o.instances / static_cast<int>(families.size());
  const auto enough = [&] {
    if (o.seconds > 0 && Clock::now() > end) return true;
    const std::lock_guard lock(tally.mutex);
    return tally.failures.size() >= kMostFailures;
  };
  while (!enough()) {
    const std::uint64_t seed = o.seed + tally.next++;
    const std::unique_ptr<verify::Case> c = families[seed % families.size()]->random(seed, kind_of(o, seed));
    const engine::Explanation explanation = c->explain(as_selected);
    if (explanation.options.empty()) {
      ++tally.refused;
      continue;
    }
    if (!within_limit(tally, *c, explanation.options.front(), as_selected, limit)) {
      ++tally.passed_over;
      continue;
    }
    if (tally.begun++ >= o.problems) return;
    const verify::Report report = verify::check(*c, device, 1, 1);
    ++tally.judged;
    const std::lock_guard lock(tally.mutex);
    Tally::OfKernel& kernel = tally.kernels[report.kernel.empty() ? explanation.options.front().kernel : report.kernel];
    ++kernel.problems;
    kernel.worst_ratio = std::max(kernel.worst_ratio, report.worst_ratio);
    if (report.outcome != Outcome::kPassed) tally.failures.push_back({seed, c->name, report.detail});
  }
}

int run(const Options& o) {
  const int cores = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  const int workers = std::min(o.threads > 0 ? o.threads : cores, std::max(1, o.problems));
  std::vector<std::unique_ptr<verify::Device>> devices;
  for (int n = 0; n < workers; ++n) {
    Result<std::unique_ptr<verify::Device>> opened = verify::open_device(o.device, o.arch_code);
    if (!opened.ok()) return fail(opened.status());
    devices.push_back(std::move(*opened));
    devices.back()->keep_memory();
  }
  tessera_set_num_threads(1);  // the workers keep the cores busy
  const auto begin = Clock::now();
  Tally tally;
  verify::in_parallel(workers, workers, [&](std::int64_t worker) {
    work(o, *devices[static_cast<std::size_t>(worker)], tally,
         begin + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(o.seconds)));
  });
  const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();

  print("{}\n", devices.front()->name());
  Table table({{"kernel", Table::Align::kLeft}, {"problems"}, {"worst error / allowed"}});
  Json kernels = Json::object();
  for (const auto& [name, of] : tally.kernels) {
    table.add({name, format("{}", of.problems), format("{:.2f}", of.worst_ratio)});
    kernels[name] = {{"problems", of.problems}, {"worst_ratio", of.worst_ratio}};
  }
  table.print();
  Json failures = Json::array();
  for (const Failure& f : tally.failures) {
    print("{} {} --seed {} --kinds {}\n  {}\n", paint(Style::kBad, "failed"), f.name, f.seed, o.kinds, f.detail);
    failures.push_back({{"seed", f.seed}, {"name", f.name}, {"detail", f.detail}});
  }
  const std::uint64_t last = o.seed + tally.next - 1;
  print(
      "{} of {} problems passed, seeds {} to {}, {} kernel instances, in {}; {} drawn that no kernel serves, {} left "
      "out for their instances\n",
      tally.judged - static_cast<int>(tally.failures.size()), tally.judged.load(), o.seed, last, tally.instance_count(),
      seconds_text(seconds), tally.refused.load(), tally.passed_over.load());
  Json json{{"date", results::today()},
            {"version", tessera_version()},
            {"device", devices.front()->name()},
            {"arch_code", verify::arch_code_in_force(o.arch_code)},
            {"first_seed", o.seed},
            {"last_seed", last},
            {"problems", tally.judged.load()},
            {"failed", tally.failures.size()},
            {"refused", tally.refused.load()},
            {"passed_over", tally.passed_over.load()},
            {"instances", tally.instance_count()},
            {"kinds", o.kinds},
            {"seconds", seconds},
            {"kernels", kernels},
            {"failures", failures}};
  note_sources(json);
  if (const int code = write_json(o.json, json); code != kSuccess) return code;
  return tally.failures.empty() && tally.judged > 0 ? kSuccess : kCheckFailed;
}

}  // namespace

Command add_fuzz(App parent) {
  auto o = std::make_shared<Options>();
  const App app = parent.add_subcommand("fuzz", "Check random small problems against the oracle");
  app.add_option("--device", o->device, "cpu, cuda or cuda:N").type_name("DEVICE").shows_default();
  app.add_option("--arch-code", o->arch_code, "GPU: run this architecture's code").type_name("ARCH");
  app.add_option("--problems", o->problems, "How many").type_name("N").positive().shows_default();
  app.add_option("--seed", o->seed, "Of the first problem; the next ones count up").type_name("N").shows_default();
  app.add_option("--instances", o->instances, "Kernel instances at most; problems that need another are left out")
      .type_name("N")
      .positive()
      .shows_default();
  app.add_option("--kinds", o->kinds, "Kinds of problems of each family, for few kernel instances; 0: any")
      .type_name("N")
      .non_negative()
      .shows_default();
  app.add_option("--threads", o->threads, "Problems at once; 0: one per core")
      .type_name("N")
      .non_negative()
      .shows_default();
  app.add_option("--seconds", o->seconds, "Stop after this time, however many were tried; 0: no limit")
      .type_name("S")
      .non_negative()
      .shows_default();
  app.add_option("--json", o->json, "Write counts, seeds and failures to this file").output_file();
  app.footer(
      "A number gives the same problem everywhere: a failure names the --seed that repeats it with --problems 1.\n\n"
      "Examples:\n"
      "  tessera fuzz --problems 10000\n"
      "  tessera fuzz --device cuda --problems 100000 --instances 200 --json fuzz.json\n"
      "  tessera fuzz --device cuda --problems 1 --seed 4711");
  return {app, [o] { return run(*o); }};
}

}  // namespace tessera::tools
