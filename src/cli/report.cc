// `tessera report`: what was measured, as one HTML file; README's tables and picture from the same records.
#include <fmt/format.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>

#include "cli/commands.h"
#include "cli/console.h"
#include "cli/device.h"
#include "cli/report_page.h"

namespace tessera::cli {
namespace {

constexpr const char* kBegin = "<!-- made by `tessera report --readme`: do not edit -->\n";
constexpr const char* kEnd = "<!-- end of what `tessera report` made -->";

struct Options {
  std::string results = "results";
  std::string history;
  std::string output = "report.html";
  std::string readme;
  std::string picture;
  std::string json;
  bool check = false;
};

std::string read_file(const std::string& file) {
  std::ifstream in(file);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

bool write_file(const std::string& file, const std::string& text) {
  std::ofstream out(file);
  out << text;
  out.close();
  return static_cast<bool>(out);
}

// With the part between the two marks made anew; empty where the marks are not there.
std::string with_tables(const std::string& text, const std::string& tables) {
  const std::size_t begin = text.find(kBegin);
  const std::size_t end = text.find(kEnd);
  if (begin == std::string::npos || end == std::string::npos || end < begin) return {};
  return text.substr(0, begin) + kBegin + tables + text.substr(end);
}

// Writes the file, or with `check` only says whether it is as it would be written.
int bring_up_to_date(const std::string& file, const std::string& text, bool check) {
  if (check) {
    if (read_file(file) == text) return kSuccess;
    return fail(kCheckFailed, fmt::format("{} is not what the results say: `make results` brings it up to date", file));
  }
  if (!write_file(file, text)) return fail(kBadUsage, fmt::format("cannot write {}", file));
  fmt::print("{}\n", file);
  return kSuccess;
}

int run(const Options& o) {
  Result<History> history = History::open(o.history.empty() ? ":memory:" : o.history);
  if (!history.ok()) return fail(kBadUsage, history.status().message());
  const Result<int> added = history->import_results(o.results);
  if (!added.ok()) return fail(kBadUsage, added.status().message());

  int code = kSuccess;
  if (!o.readme.empty()) {
    const std::string text = with_tables(read_file(o.readme), readme_tables(*history));
    if (text.empty()) return fail(kBadUsage, fmt::format("{} has no part that begins with {}", o.readme, kBegin));
    code = std::max(code, bring_up_to_date(o.readme, text, o.check));
  }
  if (const auto picture = readme_picture(*history); !o.picture.empty() && picture) {
    code = std::max(code, bring_up_to_date(o.picture, *picture, o.check));
  }
  if (o.readme.empty() && o.picture.empty()) {
    const std::string page = html_report(*history, kernel_states(o.results));
    code = bring_up_to_date(o.output, page, o.check);
  }
  if (code != kSuccess) return code;
  Json json{{"new_runs", *added}, {"gpus", history->gpus()}, {"runs", Json::array()}};
  for (const RunRow& r : history->runs("", "")) {
    json["runs"].push_back(
        {{"kind", r.kind}, {"gpu", r.gpu}, {"date", r.date}, {"version", r.version}, {"suite", r.suite}});
  }
  return write_json(o.json, json);
}

}  // namespace

Command add_report(CLI::App& parent) {
  auto o = std::make_shared<Options>();
  CLI::App* app = parent.add_subcommand("report", "Write what was measured as one HTML file");
  app->add_option("--results", o->results, "Folder of results, one subfolder for each GPU")
      ->type_name("DIR")
      ->capture_default_str();
  app->add_option("--history", o->history, "SQLite file that keeps every run imported; default: none, only the results")
      ->type_name("FILE");
  app->add_option("--output", o->output, "The page")->type_name("FILE")->capture_default_str();
  app->add_option("--readme", o->readme, "Instead: bring the tables in this file up to date")->type_name("FILE");
  app->add_option("--picture", o->picture, "Instead: write the picture of speed by length")->type_name("FILE");
  app->add_flag("--check", o->check, "Write nothing; fail where a file is not what the results say");
  app->add_option("--json", o->json, "Write the list of runs to this file")->type_name("FILE");
  app->footer(
      "The page has everything in it: no script, no request. It follows the reader's choice of light or dark.\n\n"
      "Examples:\n"
      "  tessera report --output report.html\n"
      "  tessera report --history history.db\n"
      "  tessera report --readme README.md --picture docs/speed.svg --check");
  return {app, [o] { return run(*o); }};
}

}  // namespace tessera::cli
