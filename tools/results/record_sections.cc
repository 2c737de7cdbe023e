// The report's sections about what was verified, and about earlier runs.
#include <algorithm>
#include <map>

#include "base/format.h"
#include "results/html.h"
#include "results/sections.h"

namespace tessera::results {
namespace {

// Passed and failed cases by kind of input.
std::string hostile_tables(const std::vector<VerdictRow>& verdicts) {
  struct Worst {
    int passed = 0, failed = 0;
    double error = 0;
  };
  std::map<std::string, Worst> by_kind;
  std::string failures;
  for (const VerdictRow& v : verdicts) {
    std::string kind = "other cases";
    for (const std::string& k : hostile_kinds()) {
      if (v.name.ends_with(k)) kind = k;
    }
    Worst& w = by_kind[v.name.substr(0, v.name.find('/')) + " " + kind];
    (v.outcome == "passed" ? w.passed : w.failed)++;
    w.error = std::max(w.error, v.error);
    if (v.outcome != "passed") failures += "<li>" + escaped(v.name) + ": " + escaped(v.detail) + "</li>";
  }
  HtmlTable table({"hostile inputs", "passed", "failed", "worst error"});
  for (const auto& [kind, w] : by_kind) {
    table.row({escaped(kind), format("{}", w.passed), failures_cell(w.failed), format("{:.2f}", w.error)});
  }
  std::string out = "<h3>Hostile inputs</h3>" + table.done();
  if (!failures.empty()) out += "<p class=\"bad\">Failed:</p><ul>" + failures + "</ul>";
  return out;
}

}  // namespace

std::string verify_section(const History& history, const std::string& gpu) {
  std::map<std::string, RunRow> newest;
  for (const RunRow& r : history.runs("verify", gpu)) newest.emplace(r.suite, r);
  if (newest.empty()) return {};
  HtmlTable table({"suite", "date", "passed", "failed", "refused", "worst error", "where"});
  for (const auto& [suite, run] : newest) {
    const auto count = [&run = run](const char* key) { return static_cast<int>(number_at(run.facts, key)); };
    table.row({escaped(suite), escaped(run.date), format("{}", count("passed")), failures_cell(count("failed")),
               format("{}", count("refused")), format("{:.2f}", number_at(run.facts, "worst_error_over_allowed")),
               long_cell(text_at(run.facts, "worst_case"))});
  }
  std::string out =
      "<h2>Verified against the fp64 oracle</h2><p class=\"soft\">Errors divided by what the accuracy rule "
      "allows; 1 is the limit. Refused are cases that no kernel of the architecture serves, such as fp32 on a GPU: the "
      "call "
      "returns an error that says why, and writes nothing. Suites named after an architecture, such as full_sm_80, ran "
      "that architecture's code on this GPU.</p>" +
      table.done();
  if (const auto hostile = newest.find("hostile"); hostile != newest.end()) {
    out += hostile_tables(history.verdicts(hostile->second.id));
  }
  return out;
}

std::string evidence_section(const History& history, const std::string& gpu) {
  const std::vector<RunRow> runs = history.runs("evidence", gpu);
  if (runs.empty()) return {};
  HtmlTable table({"case", "op", "p50, us", "p95, us", "p99, us", "graph, us", "host, us", "error"});
  int wrong = 0, cases = 0;
  for (const TimingRow& r : history.timings(runs.front().id)) {
    if (r.status == "refused") continue;
    ++cases;
    const std::string error = format("{:.2f}", r.error), op = op_label(r.family, r.op);
    if (r.ok()) {
      table.row({shape_cell(r), escaped(op), microseconds(r.median), microseconds(r.p95), microseconds(r.p99),
                 microseconds(r.graph), microseconds(r.host), error});
    } else {
      ++wrong;
      table.row({shape_cell(r), escaped(op), status_cell(&r), "", "", "", "", error});
    }
  }
  const Json& facts = runs.front().facts;
  const auto calls = static_cast<int>(number_at(facts, "calls")),
             equal = static_cast<int>(number_at(facts, "equal_calls"));
  std::string judged;
  if (calls > 0) {
    judged = format(
        "{} single calls, launch included, none flushed: {} gave the bits of a result that the oracle judged, {} "
        "differ "
        "from one by at most {:.2f} of what the oracle leaves. ",
        calls, equal, calls - equal, number_at(facts, "largest_difference"));
  }
  return format(
      "<h2>Single calls, all of them judged</h2><p>{} cases. {}{} were wrong.</p><details><summary>every "
      "case</summary>{}</details>",
      cases, judged, wrong, table.done());
}

std::string fuzz_section(const History& history, const std::string& gpu) {
  const std::vector<RunRow> runs = history.runs("fuzz", gpu);
  if (runs.empty()) return {};
  const Json& facts = runs.front().facts;
  const auto count = [&](const char* key) { return static_cast<int>(number_at(facts, key)); };
  return format(
      "<h2>Random problems</h2><p>{} small problems drawn at random, of {} kernel instances, were compared with the "
      "oracle ({}): {} failed.</p>",
      count("problems"), count("instances"), escaped(runs.front().date), count("failed"));
}

std::string mutation_section(const History& history, const std::string& gpu) {
  const std::vector<RunRow> runs = history.runs("break_kernels", gpu);
  if (runs.empty()) return {};
  const Json& facts = runs.front().facts;
  const auto count = [&](const char* key) { return static_cast<int>(number_at(facts, key)); };
  return format(
      "<h2>Kernels broken on purpose</h2><p>To show that the checks catch what they are for, {} kernels were broken, "
      "one "
      "change at a time (a tile skipped, a barrier dropped, a row left out; {} are races): the checks noticed {} of "
      "them.</p>",
      count("caught") + count("missed"), count("races"), count("caught"));
}

std::string traffic_section(const History& history, const std::string& gpu) {
  const std::vector<RunRow> runs = history.runs("dram_bytes", gpu);
  if (runs.empty()) return {};
  HtmlTable table({"B, S, H, D", "", "", "read", "written", "counted", "measured / counted"});
  for (const Json& c : runs.front().facts.value("calls", Json::array())) {
    const auto size = [&](const char* key) { return static_cast<int>(number_at(c, key)); };
    const double read = number_at(c, "read"), written = number_at(c, "written"), counted = number_at(c, "counted");
    table.row({format("{}, {}, {}, {}", size("batch"), size("seq"), size("heads"), size("dim")),
               escaped(text_at(c, "op")), escaped(text_at(c, "way")), bytes_text(read), bytes_text(written),
               bytes_text(counted), format("{:.2f}", (read + written) / counted)});
  }
  return "<h2>Bytes that went through memory</h2><p>Measured by Nsight Compute over every kernel of a call, fp16. "
         "Fused "
         "is one Tessera call; unfused is two matrix products and a softmax of PyTorch, and their gradients. Counted "
         "is "
         "what must be moved at least: every tensor once, and unfused, the scores and probabilities.</p>" +
         table.done();
}

std::string history_section(const History& history, const std::string& gpu) {
  const std::vector<RunRow> runs = history.runs("peers", gpu);
  if (runs.size() < 2) return {};
  // A column for each compared view of any run. The newest run comes first, so it decides the order.
  std::vector<std::string> columns;
  std::vector<std::map<std::string, double>> means;
  for (const RunRow& run : runs) {
    std::map<std::string, double>& mean = means.emplace_back();
    for (const View& view : comparison_of(history, run).views) {
      if (!view.how.compared()) continue;
      const std::string& label = view.how.label;
      if (std::find(columns.begin(), columns.end(), label) == columns.end()) columns.push_back(label);
      const Summary s = summary_of(ratios(view, "tessera", kBest));
      if (s.cells > 0) mean[label] = s.mean;
    }
  }
  std::vector<std::string> head{"date", "version"};
  for (const std::string& label : columns) head.push_back(label + " over the best");
  HtmlTable table(head);
  for (std::size_t n = 0; n < runs.size(); ++n) {
    std::vector<std::string> line{escaped(runs[n].date), escaped(runs[n].version)};
    for (const std::string& label : columns) {
      const auto at = means[n].find(label);
      line.push_back(at != means[n].end() ? format("{:.3f}", at->second) : "-");
    }
    table.row(line);
  }
  return "<h2>Over time</h2>" + table.done();
}

std::string kernel_section(const std::vector<KernelState>& kernels) {
  using Verified = KernelState::Verified;
  HtmlTable table({"kernel", "hash of its code", "verified"});
  for (const KernelState& k : kernels) {
    const char* prefix = k.verified == Verified::kYes       ? ""
                         : k.verified == Verified::kChanged ? "changed since it was verified: "
                                                            : "never";
    table.row({escaped(k.header), k.hash.substr(0, 12),
               long_cell(prefix + k.where, k.verified == Verified::kYes ? "good" : "bad")});
  }
  return "<h2>Which code was verified</h2>" + table.done();
}

}  // namespace tessera::results
