// `tessera tune`: searches the forward's candidates on the GPU at hand and keeps the winner in the tuning table.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>

#include "cases/cases.h"
#include "cli/commands.h"
#include "cli/console.h"
#include "cli/kernel_record.h"
#include "cli/tune_worker.h"
#include "select/attention.h"
#include "tessera/tessera.h"
#include "tune/tuned.h"

namespace tessera::cli {
namespace {

struct Options {
  std::string device = "cuda";
  std::string arch = "sm_90a";
  std::string cases;
  std::string dtype = "bf16";
  std::int64_t dim = 128, dim_v = -1, seq = 2048, seq_k = -1, heads = 16, heads_kv = -1, batch = 8;
  bool causal = false;
  bool one_problem = false;  // described by flags
  float softcap = 0;
  double budget = 60;
  std::uint64_t seed = 1;
  bool dry_run = false;
  bool progress = false;
  bool list = false;
  bool clear = false;
  std::string json;
};

constexpr const char* kSuite = "bench-gpu";

cases::Case described(const Options& o) {
  cases::Case c;
  AttentionProblem& p = c.problem;
  p.op = AttentionOp::kForward;
  p.dtype = o.dtype == "fp16" ? DType::kFloat16 : DType::kBFloat16;
  p.batch = o.batch;
  p.seq_q = o.seq;
  p.seq_k = o.seq_k < 0 ? o.seq : o.seq_k;
  p.heads_q = o.heads;
  p.heads_kv = o.heads_kv < 0 ? o.heads : o.heads_kv;
  p.dim_qk = o.dim;
  p.dim_v = o.dim_v < 0 ? o.dim : o.dim_v;
  p.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(p.dim_qk)));
  p.causal = o.causal;
  p.alignment = p.seq_q == p.seq_k ? Alignment::kTopLeft : Alignment::kBottomRight;
  p.softcap = o.softcap;
  c.name = select::describe(p);
  return c;
}

Result<std::vector<cases::Case>> problems(const Options& o) {
  if (o.one_problem && !o.cases.empty()) {
    return Status(TESSERA_INVALID_ARGUMENT, "--cases and a problem by its own flags exclude each other");
  }
  if (o.one_problem) {
    const cases::Case c = described(o);
    if (c.problem.heads_q % c.problem.heads_kv != 0) {
      return Status(TESSERA_INVALID_ARGUMENT,
                    fmt::format("--heads {} is no multiple of --heads-kv {}", o.heads, o.heads_kv));
    }
    return std::vector<cases::Case>{c};
  }
  std::vector<cases::Case> list;
  for (cases::Case& c : cases::suite(kSuite)) {
    const bool wanted =
        o.cases.empty() ? c.problem.dtype == DType::kBFloat16 : c.name.find(o.cases) != std::string::npos;
    if (c.problem.op == AttentionOp::kForward && wanted) list.push_back(std::move(c));
  }
  if (list.empty()) {
    return Status(TESSERA_INVALID_ARGUMENT,
                  fmt::format("no forward case of suite {} has '{}' in its name", kSuite, o.cases));
  }
  return list;
}

// What sets a Config apart, without what the problem sets.
std::string short_text(const select::ForwardConfig& config) {
  if (const auto* c = std::get_if<AttentionForwardConfig>(&config)) {
    return fmt::format("portable {}x{} w{}{}", c->block_q, c->block_k, c->warps, c->in_halves ? " halves" : "");
  }
  const auto& c = std::get<AttentionForwardSm90Config>(config);
  return fmt::format("sm90 {}x{} s{} q{}{}{}{}{}{}{}", block_q_of(c), c.block_k, c.stages, c.q_stages,
                     c.split ? fmt::format(" split{}", c.consumers) : "",
                     c.blocks > 1 ? fmt::format(" {} blocks", c.blocks) : "", c.narrowest_panel == 16 ? " panel16" : "",
                     c.ping_pong ? " ping-pong" : "", c.polynomial > 0 ? fmt::format(" poly{}", c.polynomial) : "",
                     c.tickets ? " tickets" : "");
}

int offered_of(const AttentionProblem& problem, const select::Device& device) {
  return static_cast<int>(select::select_attention(problem, device).candidates.size());
}

int dry_run(const Options& o, const std::vector<cases::Case>& list) {
  const Result<select::Device> device = select::cuda_device(o.arch);
  if (!device.ok()) return fail(kBadUsage, device.status().message());
  Table table(
      {{"problem", Table::Align::kLeft}, {"Configs"}, {"portable"}, {"sm90"}, {"default", Table::Align::kLeft}});
  Json json{{"arch", o.arch}, {"problems", Json::array()}};
  for (const cases::Case& c : list) {
    const std::vector<select::ForwardConfig> space = select::forward_search_space(c.problem, *device);
    const auto portable = std::count_if(space.begin(), space.end(), [](const select::ForwardConfig& config) {
      return std::holds_alternative<AttentionForwardConfig>(config);
    });
    Json configs = Json::array();
    for (const select::ForwardConfig& config : space) configs.push_back(select::instance_of(config).config);
    table.add({c.name, fmt::format("{}", space.size()), fmt::format("{}", portable),
               fmt::format("{}", static_cast<std::ptrdiff_t>(space.size()) - portable),
               space.empty() ? paint(Style::kWarn, "no kernel serves it") : short_text(space.front())});
    json["problems"].push_back({{"problem", c.name}, {"configs", configs}});
  }
  fmt::print("what a search on {} would choose from; nothing was run\n", o.arch);
  table.print();
  return write_json(o.json, json);
}

// A line that is drawn over where stderr is a terminal; elsewhere one for each generation.
class Ticker {
 public:
  Ticker(std::string label, bool always) : label_(std::move(label)), draws_(always || isatty(STDERR_FILENO) != 0) {}
  ~Ticker() { finish(); }
  Ticker(const Ticker&) = delete;
  Ticker& operator=(const Ticker&) = delete;

  void show(const tune::SearchProgress& p) {
    if (!draws_ && p.generation == generation_) return;  // the final rounds count as one more
    generation_ = p.generation;
    const auto us = [](double seconds) { return seconds > 0 ? fmt::format("{:.1f} us", seconds * 1e6) : "-"; };
    const std::string stage = p.final ? "final rounds" : fmt::format("generation {}", p.generation);
    const std::string text = fmt::format("{}: {}, candidate {}, {} disqualified, best {}, default {}", label_, stage,
                                         p.tried, p.disqualified, us(p.best), us(p.fallback));
    fmt::print(stderr, "{}{}{}", draws_ ? "\r\033[K" : "", text, draws_ ? "" : "\n");
    std::fflush(stderr);
    drawn_ = draws_;
  }
  void finish() {
    if (drawn_) fmt::print(stderr, "\r\033[K");
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
  select::ForwardConfig fallback, winner;
  double default_us = 0, us = 0;
};

Json json_of(const tune::Trial& t, const std::vector<select::ForwardConfig>& space) {
  Json json{{"config", select::instance_of(space[static_cast<std::size_t>(t.candidate)]).config},
            {"generation", t.generation},
            {"state", tune::name_of(t.state)}};
  if (!t.reason.empty()) json["reason"] = t.reason;
  if (t.samples > 0) json["samples"] = t.samples;
  if (t.seconds > 0) json["us"] = t.seconds * 1e6;
  return json;
}

// How the trials ended, and every one that computed something wrong or broke.
void print_trials(const tune::SearchResult& found, const std::vector<select::ForwardConfig>& space, int lost) {
  std::map<std::string, int> count;
  for (const tune::Trial& t : found.trials) ++count[tune::name_of(t.state)];
  std::string text;
  for (const auto& [state, times] : count) text += fmt::format("{}{} {}", text.empty() ? "" : ", ", times, state);
  fmt::print("  {} of {} Configs tried in {} generation{}: {}\n", found.trials.size(), space.size(), found.generations,
             found.generations == 1 ? "" : "s", text);
  for (const tune::Trial& t : found.trials) {
    if (t.state != tune::Trial::State::kWrong && t.state != tune::Trial::State::kFailed) continue;
    fmt::print("  {} {}: {}\n", paint(Style::kBad, tune::name_of(t.state)),
               short_text(space[static_cast<std::size_t>(t.candidate)]), t.reason);
  }
  if (lost > 0)
    fmt::print("  the process with the GPU was lost {} time{} and started anew\n", lost, lost == 1 ? "" : "s");
}

Status tune_one(const Options& o, const TuneTarget& target, const cases::Case& c, Row& row, Json& json) {
  const std::vector<select::ForwardConfig> space = select::forward_search_space(c.problem, target.device);
  if (space.empty()) return {TESSERA_UNSUPPORTED, "no kernel on this GPU serves it"};
  std::vector<std::vector<int>> genes;
  for (const select::ForwardConfig& config : space) genes.push_back(select::genes_of(config));
  TuneWorker worker(o.device, c, space, o.budget);
  Ticker ticker(c.name, o.progress);
  tune::SearchOptions options;
  options.seed = o.seed;
  options.progress = [&](const tune::SearchProgress& p) { ticker.show(p); };
  const Result<tune::SearchResult> found = tune::search(genes, offered_of(c.problem, target.device), worker, options);
  ticker.finish();
  if (!found.ok()) return found.status();
  fmt::print("{}\n", paint(Style::kBold, c.name));
  print_trials(*found, space, worker.lost());
  json["trials"] = Json::array();
  for (const tune::Trial& t : found->trials) json["trials"].push_back(json_of(t, space));
  if (const std::string wrong = worker.check_problem(found->winner); !wrong.empty()) {
    return {TESSERA_INTERNAL, fmt::format("the winner is wrong on the problem itself and is not kept: {}: {}",
                                          short_text(space[static_cast<std::size_t>(found->winner)]), wrong)};
  }
  row.fallback = space.front();
  row.winner = space[static_cast<std::size_t>(found->winner)];
  row.default_us = found->fallback_seconds * 1e6;
  row.us = found->seconds * 1e6;

  tune::Entry entry;
  entry.gpu = target.gpu;
  entry.driver = target.driver;
  entry.source = tune::source_hash();
  entry.problem_class = tune::class_of(c.problem, target.multiprocessors);
  entry.config = select::instance_of(row.winner).config;
  entry.microseconds = row.us;
  entry.default_microseconds = row.default_us;
  entry.problem = select::describe(c.problem);
  entry.date = today();
  entry.version = tessera_version();
  json["class"] = entry.problem_class;
  json["default"] = {{"config", select::instance_of(row.fallback).config}, {"us", row.default_us}};
  json["winner"] = {{"config", entry.config}, {"us", row.us}};
  Result<tune::Table> table = tune::Table::open(tune::table_file(), tune::Table::Access::kWrite);
  return table.ok() ? table->put(entry) : table.status();
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
    table.add({row.problem, short_text(row.fallback), fmt::format("{:.1f}", row.default_us), short_text(row.winner),
               fmt::format("{:.1f}", row.us), fmt::format("{:+.1f}%", 100 * gain)});
  }
  fmt::print("\n");
  table.print();
}

int run_attention(const Options& o) {
  const Result<std::vector<cases::Case>> list = problems(o);
  if (!list.ok()) return fail(kBadUsage, list.status().message());
  if (o.dry_run) return dry_run(o, *list);
  const Result<TuneTarget> target = ask_target(o.device);
  if (!target.ok()) return fail(static_cast<ExitCode>(exit_code_of(target.status())), target.status().message());
  // Before minutes are spent on what could not be kept.
  if (const auto table = tune::Table::open(tune::table_file(), tune::Table::Access::kWrite); !table.ok()) {
    return fail(kCheckFailed, table.status().message());
  }
  fmt::print("{}; {} problem{}, at most about {:.0f} s each; table {}\n", target->name, list->size(),
             list->size() == 1 ? "" : "s", o.budget, tune::table_file());
  std::vector<Row> rows;
  Json json{{"date", today()},          {"version", tessera_version()},  {"device", target->name},
            {"driver", target->driver}, {"source", tune::source_hash()}, {"seed", o.seed},
            {"budget_s", o.budget},     {"problems", Json::array()}};
  for (const cases::Case& c : *list) {
    Row row;
    row.problem = c.name;
    Json one{{"problem", c.name}};
    if (const Status s = tune_one(o, *target, c, row, one); !s.ok()) one["failed"] = row.failure = s.message();
    rows.push_back(row);
    json["problems"].push_back(std::move(one));
  }
  print_summary(rows);
  if (const int code = write_json(o.json, json); code != kSuccess) return code;
  const auto failures = std::count_if(rows.begin(), rows.end(), [](const Row& r) { return !r.failure.empty(); });
  if (failures > 0) return fail(kCheckFailed, fmt::format("{} of {} problems were not tuned", failures, rows.size()));
  return kSuccess;
}

int list_table(const Options& o) {
  const std::string file = tune::table_file();
  Json entries = Json::array();
  Table table({{"problems like", Table::Align::kLeft},
               {"us"},
               {"default"},
               {"Config", Table::Align::kLeft},
               {"GPU", Table::Align::kLeft},
               {"driver"},
               {"date", Table::Align::kLeft},
               {"", Table::Align::kLeft}});
  // None yet is an empty list; one that cannot be read is a failure.
  if (!file.empty() && access(file.c_str(), F_OK) == 0) {
    const Result<tune::Table> opened = tune::Table::open(file, tune::Table::Access::kRead);
    if (!opened.ok()) return fail(kCheckFailed, opened.status().message());
    const Result<std::vector<tune::Entry>> all = opened->entries();
    if (!all.ok()) return fail(kCheckFailed, all.status().message());
    for (const tune::Entry& e : *all) {
      const auto config = select::forward_config_from_text(e.config);
      const bool stale = e.source != tune::source_hash() || !config;
      table.add({e.problem_class, fmt::format("{:.1f}", e.microseconds), fmt::format("{:.1f}", e.default_microseconds),
                 config ? short_text(*config) : e.config, e.gpu, fmt::format("{}", e.driver), e.date,
                 stale ? paint(Style::kWarn, "stale: other kernels") : ""});
      entries.push_back({{"class", e.problem_class},
                         {"problem", e.problem},
                         {"config", e.config},
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
  fmt::print("{} {} in {}{}\n", entries.size(), entries.size() == 1 ? "entry" : "entries",
             file.empty() ? "no file" : file, tune::tuning_forbidden() ? "; TESSERA_NO_TUNING turns them off" : "");
  return write_json(o.json, {{"file", file}, {"entries", entries}});
}

int clear_table(const Options& o) {
  const std::string file = tune::table_file();
  int removed = 0;
  if (!file.empty() && access(file.c_str(), F_OK) == 0) {
    Result<tune::Table> opened = tune::Table::open(file, tune::Table::Access::kWrite);
    if (!opened.ok()) return fail(kCheckFailed, opened.status().message());
    const Result<int> cleared = opened->clear();
    if (!cleared.ok()) return fail(kCheckFailed, cleared.status().message());
    removed = *cleared;
  }
  fmt::print("removed {} {} from {}\n", removed, removed == 1 ? "entry" : "entries", file.empty() ? "no file" : file);
  return write_json(o.json, {{"file", file}, {"removed", removed}});
}

}  // namespace

Command add_tune(CLI::App& parent) {
  auto o = std::make_shared<Options>();
  CLI::App* app = parent.add_subcommand("tune", "Search for the fastest Config on this GPU, and keep it");
  app->add_flag("--list", o->list, "What the tuning table holds");
  app->add_flag("--clear", o->clear, "Remove all that it holds")->excludes("--list");
  app->add_option("--json", o->json, "Write all figures to this file")->type_name("FILE");
  CLI::App* attention = app->add_subcommand("attention", "Tune the attention forward");
  attention->fallthrough();  // --json
  attention->add_option("--device", o->device, "cuda or cuda:N")->type_name("DEVICE")->capture_default_str();
  attention->add_option("--cases", o->cases, "Forward cases of suite bench-gpu with this in their name")
      ->type_name("FILTER");
  const CLI::Validator size = quiet(CLI::Range(std::int64_t{1}, std::int64_t{1} << 29));
  std::vector<CLI::Option*> describing;
  const auto number = [&](const char* flag, std::int64_t& value, const char* text) {
    CLI::Option* option = attention->add_option(flag, value, text)->type_name("N")->check(size);
    describing.push_back(value > 0 ? option->capture_default_str() : option);
  };
  number("--dim", o->dim, "Head dim of q and k");
  number("--dim-v", o->dim_v, "Head dim of v; default: --dim");
  number("--seq", o->seq, "Queries of a sequence");
  number("--seq-k", o->seq_k, "Keys of a sequence; default: --seq");
  number("--heads", o->heads, "Query heads");
  number("--heads-kv", o->heads_kv, "Key heads; default: --heads");
  number("--batch", o->batch, "Sequences");
  describing.push_back(attention->add_flag("--causal", o->causal, "The last query sees the last key"));
  describing.push_back(attention->add_option("--softcap", o->softcap, "0: none")
                           ->check(quiet(CLI::Range(0.0F, 1e6F)))
                           ->capture_default_str());
  describing.push_back(attention->add_option("--dtype", o->dtype, "fp16 or bf16")
                           ->type_name("TYPE")
                           ->check(quiet(CLI::IsMember({"fp16", "bf16"})))
                           ->capture_default_str());
  attention->add_option("--budget", o->budget, "Seconds for each problem, about")
      ->type_name("SECONDS")
      ->check(quiet(CLI::Range(1.0, 86400.0)))
      ->capture_default_str();
  attention->add_option("--seed", o->seed, "Of the search: which candidates are tried, given the same times")
      ->type_name("N")
      ->capture_default_str();
  attention->add_flag("--dry-run", o->dry_run, "Only say what would be searched; needs no GPU");
  attention->add_option("--arch", o->arch, "--dry-run: for this architecture")
      ->type_name("ARCH")
      ->capture_default_str();
  attention->add_flag("--progress", o->progress, "Draw the progress line even where stderr is no terminal");
  attention->footer(
      "Every candidate is compiled, then checked against the fp64 oracle, and only then timed, in turns with the best "
      "so\n"
      "far. Without --cases and without a problem of your own, all bf16 forward cases of suite bench-gpu are tuned.\n\n"
      "Examples:\n"
      "  tessera tune attention --dim 128 --seq 8192 --heads 16 --batch 2 --causal\n"
      "  tessera tune attention --cases fwd/bf16/b2_sq8192 --budget 120 --json tune.json\n"
      "  tessera tune attention --dim 80 --dry-run --arch sm_90a");
  app->footer(
      "The winner goes into the tuning table, tuning.sqlite beside the compiled kernels (TESSERA_TUNING_TABLE: "
      "another\n"
      "file), and later plans on this GPU with this driver and these kernels take it. TESSERA_NO_TUNING=1 turns that\n"
      "off.\n\n"
      "Examples:\n"
      "  tessera tune attention --dim 128 --seq 8192 --heads 16 --batch 2 --causal\n"
      "  tessera tune --list\n"
      "  tessera tune --clear");
  return {app, [=] {
            const bool tunes = attention->parsed();
            if (tunes && (o->list || o->clear)) return fail(kBadUsage, "--list and --clear tune nothing");
            if (o->list) return list_table(*o);
            if (o->clear) return clear_table(*o);
            if (!tunes) return fail(kBadUsage, "say what to tune: `tessera tune attention`, or --list or --clear");
            o->one_problem = std::any_of(describing.begin(), describing.end(),
                                         [](const CLI::Option* option) { return option->count() > 0; });
            return run_attention(*o);
          }};
}

}  // namespace tessera::cli
