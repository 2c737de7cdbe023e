// `tessera report`: everything that was measured as one HTML file, and README's tables and picture from the same
// results.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>

#include "base/format.h"
#include "program/commands.h"
#include "program/console.h"
#include "results/history.h"
#include "results/kernel_record.h"
#include "results/report_page.h"
#include "verify/family.h"

namespace tessera::tools {
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

// The text with the part between the two marks replaced; empty if it has no such marks.
std::string with_tables(const std::string& text, const std::string& tables) {
  const std::size_t begin = text.find(kBegin);
  const std::size_t end = text.find(kEnd);
  if (begin == std::string::npos || end == std::string::npos || end < begin) return {};
  return text.substr(0, begin) + kBegin + tables + text.substr(end);
}

// Writes the file. With `check`, only fails if the file is not what would be written.
int write_or_check(const std::string& file, const std::string& text, bool check) {
  if (check) {
    if (read_file(file) == text) return kSuccess;
    return fail(kCheckFailed, format("{} is not what the results say: `make results` updates it", file));
  }
  if (!write_file(file, text)) return fail(kBadUsage, format("cannot write {}", file));
  print("{}\n", file);
  return kSuccess;
}

int run(const Options& o) {
  if (!std::filesystem::is_directory(o.results)) {
    return fail(kBadUsage, format("there is no folder '{}'; --results names the one with the results", o.results));
  }
  Result<results::History> history = results::History::open(o.history.empty() ? ":memory:" : o.history);
  if (!history.ok()) return fail(kBadUsage, history.status().message());
  const Result<int> added = history->import_results(o.results);
  if (!added.ok()) return fail(kBadUsage, added.status().message());

  int code = kSuccess;
  if (!o.readme.empty()) {
    const std::string given = read_file(o.readme);
    if (given.empty()) return fail(kBadUsage, format("cannot read {}", o.readme));
    const std::string text = with_tables(given, results::readme_tables(*history));
    if (text.empty()) return fail(kBadUsage, format("{} has no part that begins with {}", o.readme, kBegin));
    code = std::max(code, write_or_check(o.readme, text, o.check));
  }
  if (!o.picture.empty()) {
    const auto picture = results::readme_picture(*history);
    if (!picture) return fail(kBadUsage, format("{} has no speed beside peers to draw", o.results));
    code = std::max(code, write_or_check(o.picture, *picture, o.check));
  }
  if (o.readme.empty() && o.picture.empty()) {
    const std::string page =
        results::html_report(*history, results::kernel_states(o.results, verify::kernel_headers()));
    code = write_or_check(o.output, page, o.check);
  }
  if (code != kSuccess) return code;
  Json json{{"new_runs", *added}, {"gpus", history->gpus()}, {"runs", Json::array()}};
  for (const results::RunRow& r : history->runs("", "")) {
    json["runs"].push_back(
        {{"kind", r.kind}, {"gpu", r.gpu}, {"date", r.date}, {"version", r.version}, {"suite", r.suite}});
  }
  return write_json(o.json, json);
}

}  // namespace

Command add_report(App parent) {
  auto o = std::make_shared<Options>();
  const App app = parent.add_subcommand("report", "Write everything that was measured as one HTML file");
  app.add_option("--results", o->results, "Folder of results, one subfolder for each GPU")
      .type_name("DIR")
      .shows_default();
  app.add_option("--history", o->history,
                 "SQLite file that keeps every imported run; without it, only the results are shown")
      .type_name("FILE");
  app.add_option("--output", o->output, "HTML file to write").output_file().shows_default();
  app.add_option("--readme", o->readme, "Update the tables in this file instead of writing the page").type_name("FILE");
  app.add_option("--picture", o->picture, "Write the charts of speed to this SVG file instead of writing the page")
      .output_file();
  app.add_flag("--check", o->check, "Write nothing; fail if a file is not what the results say");
  app.add_option("--json", o->json, "Write the list of runs to this file").output_file();
  app.footer(
      "The page is self-contained: it has no script and makes no request. It follows the reader's light or dark "
      "theme.\n\n"
      "Examples:\n"
      "  tessera report --output report.html\n"
      "  tessera report --history history.db\n"
      "  tessera report --readme README.md --picture docs/speed.svg --check");
  return {app, [o] { return run(*o); }};
}

}  // namespace tessera::tools
