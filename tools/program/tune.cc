// `tessera tune`: searches the Configs of a problem's kernels on the GPU at hand and keeps the winner in the tuning table.
#include <unistd.h>

#include <algorithm>
#include <map>
#include <memory>

#include "base/format.h"
#include "engine/json.h"
#include "engine/tuning_table.h"
#include "program/commands.h"
#include "program/console.h"
#include "program/tune_worker.h"
#include "program/tuning.h"
#include "results/date.h"
#include "verify/family.h"

namespace tessera::tools {
namespace {

struct Options {
  std::string device = "cuda";
  std::string arch = "sm_90a";
  std::string cases;
  double budget = 60;
  std::uint64_t seed = 1;
  bool dry_run = false;
  bool progress = false;
  bool list = false;
  bool clear = false;
  std::string json;
};

constexpr const char* kSuite = "bench-gpu";

using Cases = std::vector<std::unique_ptr<verify::Case>>;

Result<Cases> problems(const verify::Family& family, const verify::FlagValues& values, const Options& o) {
  Cases list;
  if (!values.empty() && !o.cases.empty()) {
    return Status(TESSERA_INVALID_ARGUMENT, "--cases and a problem by its own flags exclude each other");
  }
  if (!values.empty()) {
    auto described = family.described(values);
    if (!described.ok()) return described.status();
    list.push_back(std::move(*described));
    return list;
  }
  for (auto& c : family.suite(kSuite)) {
    const bool wanted = o.cases.empty() ? c->dtype() == DType::kBFloat16 : c->name.find(o.cases) != std::string::npos;
    if (wanted) list.push_back(std::move(c));
  }
  if (list.empty()) {
    return Status(TESSERA_INVALID_ARGUMENT, format("no case of suite {} has '{}' in its name", kSuite, o.cases));
  }
  return list;
}

// What sets a choice apart from the others of its problem: the kernel, and the fields that are not the same in all of
// them.
class ShortNames {
 public:
  explicit ShortNames(const std::vector<engine::Choice>& space) {
    for (const engine::Choice& choice : space) {
      for_each(choice,
               [&](const std::string& name, const std::string& value) { values_[choice.kernel][name].insert(value); });
    }
  }

  std::string of(const engine::Choice& choice) const {
    std::string text = choice.kernel;
    for_each(choice, [&](const std::string& name, const std::string& value) {
      const auto kernel = values_.find(choice.kernel);
      if (kernel == values_.end() || kernel->second.at(name).size() < 2 || value == "false") return;
      text += value == "true" ? " " + name : format(" {}={}", name, value);
    });
    return text;
  }

 private:
  template <class Visit>
  static void for_each(const engine::Choice& choice, const Visit& visit) {
    for (const engine::StepConfig& step : choice.config) {
      const Json fields = engine::json_of(step.fields);
      for (const auto& [name, value] : fields.items()) {
        visit(step.step == "main" ? name : step.step + "." + name, value.dump());
      }
    }
  }

  std::map<std::string, std::map<std::string, std::set<std::string>>> values_;
};

int dry_run(const Options& o, const Cases& list) {
  if (o.arch == "cpu") return fail(kBadUsage, "the CPU has nothing to tune; --arch is a GPU's");
  const Result<engine::Device> device = engine::cuda_device(o.arch);
  if (!device.ok()) return fail(kBadUsage, device.status().message());
  Table table(
      {{"problem", Table::Align::kLeft}, {"Configs"}, {"of", Table::Align::kLeft}, {"default", Table::Align::kLeft}});
  Json json{{"arch", o.arch}, {"problems", Json::array()}};
  for (const auto& c : list) {
    const engine::SearchSpace space = c->search_space(*device);
    std::map<std::string, int> count;
    Json configs = Json::array();
    for (const engine::Choice& choice : space.choices) {
      ++count[choice.kernel];
      configs.push_back({{"kernel", choice.kernel}, {"config", engine::json_of(choice.config)}});
    }
    std::string kernels;
    for (const auto& [kernel, times] : count) {
      kernels += format("{}{} {}", kernels.empty() ? "" : ", ", times, kernel);
    }
    table.add({c->name, format("{}", space.choices.size()), kernels,
               space.choices.empty() ? paint(Style::kWarn, "no kernel serves it")
                                     : ShortNames(space.choices).of(space.choices.front())});
    json["problems"].push_back({{"problem", c->name}, {"configs", configs}});
  }
  if (o.json != "-") {
    print("what a search on {} would choose from; nothing was run\n", o.arch);
    table.print();
  }
  return write_json(o.json, json);
}

// A line that is drawn over if stderr is a terminal; otherwise one for each generation.
class Ticker {
 public:
  Ticker(std::string label, bool always) : label_(std::move(label)), draws_(always || isatty(STDERR_FILENO) != 0) {}
  ~Ticker() { finish(); }
  Ticker(const Ticker&) = delete;
  Ticker& operator=(const Ticker&) = delete;

  void show(const engine::SearchProgress& p) {
    if (!draws_ && p.generation == generation_) return;  // the final rounds count as one more
    generation_ = p.generation;
    const auto us = [](double seconds) { return seconds > 0 ? format("{:.1f} us", seconds * 1e6) : "-"; };
    const std::string stage = p.final ? "final rounds" : format("generation {}", p.generation);
    const std::string text = format("{}: {}, candidate {}, {} disqualified, best {}, default {}", label_, stage,
                                    p.tried, p.disqualified, us(p.best), us(p.fallback));
    print(stderr, "{}{}{}", draws_ ? "\r\033[K" : "", text, draws_ ? "" : "\n");
    std::fflush(stderr);
    drawn_ = draws_;
  }
  void finish() {
    if (drawn_) print(stderr, "\r\033[K");
    drawn_ = false;
  }

 private:
  std::string label_;
  bool draws_;
  bool drawn_ = false;
  int generation_ = -1;
};

struct Row {
  std::string problem;
  std::string failure;  // empty: tuned
  std::string fallback, winner;
  double default_us = 0, us = 0;
};

Json json_of(const engine::Choice& choice) {
  return {{"kernel", choice.kernel}, {"config", engine::json_of(choice.config)}};
}

Json json_of(const engine::Trial& t, const std::vector<engine::Choice>& space) {
  Json json = json_of(space[static_cast<std::size_t>(t.candidate)]);
  json["generation"] = t.generation;
  json["state"] = engine::name_of(t.state);
  if (!t.reason.empty()) json["reason"] = t.reason;
  if (t.samples > 0) json["samples"] = t.samples;
  if (t.seconds > 0) json["us"] = t.seconds * 1e6;
  return json;
}

// How the trials ended, and every one that computed something wrong or broke.
void print_trials(const engine::SearchResult& found, const std::vector<engine::Choice>& space, const ShortNames& names,
                  int lost) {
  std::map<std::string, int> count;
  for (const engine::Trial& t : found.trials) ++count[engine::name_of(t.state)];
  std::string text;
  for (const auto& [state, times] : count) text += format("{}{} {}", text.empty() ? "" : ", ", times, state);
  print("  {} of {} Configs tried in {} generation{}: {}\n", found.trials.size(), space.size(), found.generations,
        found.generations == 1 ? "" : "s", text);
  for (const engine::Trial& t : found.trials) {
    if (t.state != engine::Trial::State::kWrong && t.state != engine::Trial::State::kFailed) continue;
    print("  {} {}: {}\n", paint(Style::kBad, engine::name_of(t.state)),
          names.of(space[static_cast<std::size_t>(t.candidate)]), t.reason);
  }
  if (lost > 0) print("  the process with the GPU was lost {} time{} and restarted\n", lost, lost == 1 ? "" : "s");
}

Status keep(const TuneTarget& target, const verify::Case& c, const engine::Choice& winner, const Row& row, Json& json) {
  const engine::TuningKey key = c.tuning_key(target.multiprocessors);
  engine::TuningEntry entry;
  entry.gpu = target.gpu;
  entry.driver = target.driver;
  entry.family = key.family;
  entry.source = key.source;
  entry.problem_class = key.problem_class;
  entry.kernel = winner.kernel;
  entry.config = engine::text_of(winner.config);
  entry.microseconds = row.us;
  entry.default_microseconds = row.default_us;
  entry.problem = c.describe();
  entry.date = results::today();
  entry.version = tessera_version();
  json["class"] = entry.problem_class;
  Result<engine::TuningTable> table =
      engine::TuningTable::open(engine::tuning_table_file(), engine::TuningTable::Access::kWrite);
  return table.ok() ? table->put(entry) : table.status();
}

Status tune_one(const Options& o, const TuneTarget& target, const verify::Case& c, Row& row, Json& json) {
  const Result<engine::SearchSpace> asked = ask_space(o.device, c);
  if (!asked.ok()) return asked.status();
  const engine::SearchSpace& space = *asked;
  if (space.choices.empty()) return {TESSERA_UNSUPPORTED, "no kernel on this GPU serves it"};
  const ShortNames names(space.choices);
  std::vector<std::vector<int>> genes;
  for (const engine::Choice& choice : space.choices) genes.push_back(engine::genes_of(choice));
  TuneWorker worker(o.device, c, space.choices, o.budget);
  Ticker ticker(c.name, o.progress);
  engine::SearchOptions options;
  options.seed = o.seed;
  options.progress = [&](const engine::SearchProgress& p) { ticker.show(p); };
  const Result<engine::SearchResult> found = engine::search(genes, space.offered, worker, options);
  ticker.finish();
  if (!found.ok()) return found.status();
  print("{}\n", paint(Style::kBold, c.name));
  print_trials(*found, space.choices, names, worker.lost());
  json["trials"] = Json::array();
  for (const engine::Trial& t : found->trials) json["trials"].push_back(json_of(t, space.choices));
  const engine::Choice& winner = space.choices[static_cast<std::size_t>(found->winner)];
  if (const std::string wrong = worker.check_problem(found->winner); !wrong.empty()) {
    return {TESSERA_INTERNAL,
            format("the winner is wrong on the problem itself and is not kept: {}: {}", names.of(winner), wrong)};
  }
  row.fallback = names.of(space.choices.front());
  row.winner = names.of(winner);
  row.default_us = found->fallback_seconds * 1e6;
  row.us = found->seconds * 1e6;
  json["default"] = json_of(space.choices.front());
  json["default"]["us"] = row.default_us;
  json["winner"] = json_of(winner);
  json["winner"]["us"] = row.us;
  return keep(target, c, winner, row, json);
}

void print_summary(const std::vector<Row>& rows) {
  Table table({{"problem", Table::Align::kLeft},
               {"default", Table::Align::kLeft},
               {"us"},
               {"winner", Table::Align::kLeft},
               {"us"},
               {"gain"}});
  for (const Row& row : rows) {
    if (!row.failure.empty()) {
      table.add({row.problem, paint(Style::kBad, row.failure)});
      continue;
    }
    const double gain = row.us > 0 ? row.default_us / row.us - 1 : 0;
    table.add({row.problem, row.fallback, format("{:.1f}", row.default_us), row.winner, format("{:.1f}", row.us),
               format("{:+.1f}%", 100 * gain)});
  }
  print("\n");
  table.print();
}

int run(const verify::Family& family, const verify::FlagValues& values, const Options& o) {
  const Result<Cases> list = problems(family, values, o);
  if (!list.ok()) return fail(kBadUsage, list.status().message());
  if (o.dry_run) return dry_run(o, *list);
  const Result<TuneTarget> target = ask_target(o.device);
  if (!target.ok()) return fail(target.status());
  // Checked first, before minutes are spent on a result that could not be kept.
  const std::string file = engine::tuning_table_file();
  if (const auto table = engine::TuningTable::open(file, engine::TuningTable::Access::kWrite); !table.ok()) {
    return fail(kCheckFailed, table.status().message());
  }
  print("{}; {} problem{}, at most about {:.0f} s each; table {}\n", target->name, list->size(),
        list->size() == 1 ? "" : "s", o.budget, file);
  std::vector<Row> rows;
  Json json{{"date", results::today()}, {"version", tessera_version()},
            {"device", target->name},   {"driver", target->driver},
            {"seed", o.seed},           {"budget_s", o.budget},
            {"problems", Json::array()}};
  for (const auto& c : *list) {
    Row row;
    row.problem = c->name;
    Json one{{"problem", c->name}};
    if (const Status s = tune_one(o, *target, *c, row, one); !s.ok()) one["failed"] = row.failure = s.message();
    rows.push_back(row);
    json["problems"].push_back(std::move(one));
  }
  print_summary(rows);
  if (const int code = write_json(o.json, json); code != kSuccess) return code;
  const auto failures = std::count_if(rows.begin(), rows.end(), [](const Row& r) { return !r.failure.empty(); });
  if (failures > 0) return fail(kCheckFailed, format("{} of {} problems were not tuned", failures, rows.size()));
  return kSuccess;
}

int list_table(const Options& o) {
  const std::string file = engine::tuning_table_file();
  Json entries = Json::array();
  Table table({{"problems like", Table::Align::kLeft},
               {"us"},
               {"default"},
               {"kernel", Table::Align::kLeft},
               {"GPU", Table::Align::kLeft},
               {"driver"},
               {"date", Table::Align::kLeft},
               {"", Table::Align::kLeft},
               {"Config", Table::Align::kLeft}});
  // No table yet is an empty list; one that cannot be read is a failure.
  if (!file.empty() && access(file.c_str(), F_OK) == 0) {
    const auto opened = engine::TuningTable::open(file, engine::TuningTable::Access::kRead);
    if (!opened.ok()) return fail(kCheckFailed, opened.status().message());
    const Result<std::vector<engine::TuningEntry>> all = opened->entries();
    if (!all.ok()) return fail(kCheckFailed, all.status().message());
    const std::set<std::string> current = current_sources();
    for (const engine::TuningEntry& e : *all) {
      const bool stale = current.count(e.source) == 0 || !engine::config_from_text(e.config);
      table.add({e.problem_class, format("{:.1f}", e.microseconds), format("{:.1f}", e.default_microseconds), e.kernel,
                 e.gpu, format("{}", e.driver), e.date, stale ? paint(Style::kWarn, "stale: other kernels") : "",
                 e.config});
      entries.push_back({{"family", e.family},
                         {"class", e.problem_class},
                         {"problem", e.problem},
                         {"kernel", e.kernel},
                         {"config", Json::parse(e.config, nullptr, false)},
                         {"us", e.microseconds},
                         {"default_us", e.default_microseconds},
                         {"gpu", e.gpu},
                         {"driver", e.driver},
                         {"source", e.source},
                         {"date", e.date},
                         {"version", e.version},
                         {"stale", stale}});
    }
  }
  if (!table.empty()) table.print();
  print("{} {} in {}{}\n", entries.size(), entries.size() == 1 ? "entry" : "entries", file.empty() ? "no file" : file,
        engine::tuning_forbidden() ? "; TESSERA_NO_TUNING turns them off" : "");
  return write_json(o.json, {{"file", file}, {"entries", entries}});
}

int clear_table(const Options& o) {
  const std::string file = engine::tuning_table_file();
  int removed = 0;
  if (!file.empty() && access(file.c_str(), F_OK) == 0) {
    auto opened = engine::TuningTable::open(file, engine::TuningTable::Access::kWrite);
    if (!opened.ok()) return fail(kCheckFailed, opened.status().message());
    const Result<int> cleared = opened->clear();
    if (!cleared.ok()) return fail(kCheckFailed, cleared.status().message());
    removed = *cleared;
  }
  print("removed {} {} from {}\n", removed, removed == 1 ? "entry" : "entries", file.empty() ? "no file" : file);
  return write_json(o.json, {{"file", file}, {"removed", removed}});
}

void add_search_flags(App app, Options& o) {
  app.add_option("--device", o.device, "cuda or cuda:N").type_name("DEVICE").shows_default();
  app.add_option("--cases", o.cases, "Cases of suite bench-gpu with this in their name").type_name("FILTER");
  app.add_option("--budget", o.budget, "Seconds for each problem, roughly")
      .type_name("SECONDS")
      .range(1.0, 86400.0)
      .shows_default();
  app.add_option("--seed", o.seed, "Of the search: which candidates are tried, given the same times")
      .type_name("N")
      .shows_default();
  app.add_flag("--dry-run", o.dry_run, "Only say what would be searched; needs no GPU");
  app.add_option("--arch", o.arch, "--dry-run: for this architecture").type_name("ARCH").shows_default();
  app.add_flag("--progress", o.progress, "Draw the progress line even if stderr is no terminal");
}

// The first of the family's examples, which explain shows all of.
std::string tune_examples(const verify::Family& family) {
  const std::string lines = example_lines("tessera tune", family);
  return lines.substr(0, lines.find('\n', 1));
}

}  // namespace

Command add_tune(App parent) {
  auto o = std::make_shared<Options>();
  const App app = parent.add_subcommand("tune", "Search for the fastest Config on this GPU, and keep it");
  app.add_flag("--list", o->list, "What the tuning table holds");
  app.add_flag("--clear", o->clear, "Remove all that it holds").excludes("--list");
  app.add_option("--json", o->json, "Write all figures to this file").output_file();
  const auto run_parsed = std::make_shared<Run>();
  for (const verify::Family* family : verify::families()) {
    const App sub = app.add_subcommand(family->name, format("Tune kernels of {}", family->name));
    sub.fallthrough();  // --json
    const auto values = sub.add_flags(family->flags());
    add_search_flags(sub, *o);
    sub.footer(format(
        "Every candidate is compiled, then checked against the fp64 oracle, and only then timed, in turns with the "
        "best\n"
        "so far. Without --cases and without a problem of your own, all bf16 cases of suite bench-gpu are tuned.\n\n"
        "Examples:{1}\n"
        "  tessera tune {0} --cases bf16 --budget 120 --json tune.json\n"
        "  tessera tune {0} --dry-run --arch sm_90a",
        family->name, tune_examples(*family)));
    sub.callback([=] { *run_parsed = [=] { return run(*family, *values, *o); }; });
  }
  app.footer(
      "The winner goes into the tuning table, tuning.sqlite beside the compiled kernels (TESSERA_TUNING_TABLE: "
      "another\n"
      "file), and later plans on this GPU with this driver and these kernels take it. TESSERA_NO_TUNING=1 turns that\n"
      "off.\n\n"
      "Examples:\n"
      "  tessera tune attention --d 128 --sq 8192 --hq 16 --b 2 --causal\n"
      "  tessera tune --list\n"
      "  tessera tune --clear");
  return {app, [=] {
            if (*run_parsed && (o->list || o->clear)) return fail(kBadUsage, "--list and --clear tune nothing");
            if (o->list) return list_table(*o);
            if (o->clear) return clear_table(*o);
            if (*run_parsed) return (*run_parsed)();
            return fail(kBadUsage, "say what to tune, e.g. `tessera tune attention`, or --list or --clear");
          }};
}

}  // namespace tessera::tools
