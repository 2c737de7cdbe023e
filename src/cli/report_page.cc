#include "cli/report_page.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "cli/charts.h"

namespace tessera::cli {
namespace {

// The page's own style. Charts bring theirs.
constexpr const char* kStyle =
    ":root{color-scheme:light "
    "dark;--back:#fff;--ink:#212529;--soft:#5c636a;--edge:#d5d8dc;--good:#2b8a3e;--bad:#c92a2a;"
    "--band:#f1f3f5}"
    "@media(prefers-color-scheme:dark){:root{--back:#16181b;--ink:#f1f3f5;--soft:#adb5bd;--edge:#343a40;--good:#69db7c;"
    "--bad:#ff8787;--band:#212529}}"
    "*{box-sizing:border-box}body{margin:0 auto;max-width:1120px;padding:16px;background:var(--back);color:var(--ink);"
    "font:15px/1.5 system-ui,sans-serif}h1{font-size:1.5rem}h2{font-size:1.2rem;margin-top:2.2em;border-bottom:1px "
    "solid "
    "var(--edge)}h3{font-size:1rem}p,li{max-width:75ch}.soft,figcaption{color:var(--soft)}"
    ".charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(270px,1fr));gap:10px}"
    ".wide{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.9rem}"
    "th,td{padding:3px 9px;text-align:right;border-bottom:1px solid var(--edge);white-space:nowrap}"
    "th:first-child,td:first-child{text-align:left}thead th{background:var(--band)}"
    ".loss{outline:2px solid var(--bad);outline-offset:-2px;font-weight:700}.bad{color:var(--bad);font-weight:700}"
    ".good{color:var(--good)}.legend span{margin-right:14px;white-space:nowrap}";

bool is_ours(const std::string& entrant) { return entrant.rfind("tessera", 0) == 0; }

// A comparison, by op and cell.
struct Comparison {
  RunRow run;
  std::vector<TimingRow> rows;
  std::vector<std::string> entrants;  // in the order of the file

  std::vector<std::string> peers() const {
    std::vector<std::string> list;
    for (const std::string& e : entrants) {
      if (!is_ours(e)) list.push_back(e);
    }
    return list;
  }
  const TimingRow* find(const std::string& op, const std::string& cell, const std::string& entrant) const {
    for (const TimingRow& r : rows) {
      if (r.op == op && r.cell == cell && r.entrant == entrant) return &r;
    }
    return nullptr;
  }
  // Cells of an op in order, as Tessera's rows.
  std::vector<const TimingRow*> cells(const std::string& op, bool small) const {
    std::vector<const TimingRow*> list;
    for (const TimingRow& r : rows) {
      if (r.op == op && r.small == small && r.entrant == "tessera") list.push_back(&r);
    }
    return list;
  }
};

// Ops whose ratios are summed up, and which of their cells: a decode step is always a small one.
struct Compared {
  const char* op;
  bool small;
};
constexpr Compared kCompared[] = {{"forward", false}, {"backward", false}, {"decode", true}};

struct Ratio {
  std::string cell;
  double value = 0;  // the peer's time over ours
};

// peer "best": the fastest of those that were right.
std::vector<Ratio> ratios(const Comparison& c, const std::string& op, bool small, const std::string& ours,
                          const std::string& peer) {
  std::vector<Ratio> list;
  for (const TimingRow* cell : c.cells(op, small)) {
    const TimingRow* mine = c.find(op, cell->cell, ours);
    if (mine == nullptr || !mine->ok()) continue;
    double theirs = 0;
    for (const std::string& name : c.entrants) {
      if (peer == "best" ? is_ours(name) : name != peer) continue;
      const TimingRow* r = c.find(op, cell->cell, name);
      if (r != nullptr && r->ok() && (theirs == 0 || r->median < theirs)) theirs = r->median;
    }
    if (theirs > 0) list.push_back({cell->cell, theirs / mine->median});
  }
  return list;
}

struct Summary {
  double mean = 0, least = 0;
  std::string worst;
  int losses = 0, cells = 0;
};

Summary summary_of(const std::vector<Ratio>& list) {
  Summary s;
  s.cells = static_cast<int>(list.size());
  double logs = 0;
  for (const Ratio& r : list) {
    logs += std::log(r.value);
    s.losses += r.value < 1 ? 1 : 0;
    if (s.worst.empty() || r.value < s.least) {
      s.least = r.value;
      s.worst = r.cell;
    }
  }
  if (!list.empty()) s.mean = std::exp(logs / static_cast<double>(list.size()));
  return s;
}

std::optional<Comparison> newest_comparison(const History& history, const std::string& gpu) {
  const std::vector<RunRow> runs = history.runs("peers", gpu);
  if (runs.empty()) return std::nullopt;
  Comparison c;
  c.run = runs.front();
  c.rows = history.timings(c.run.id);
  for (const TimingRow& r : c.rows) {
    if (std::find(c.entrants.begin(), c.entrants.end(), r.entrant) == c.entrants.end()) c.entrants.push_back(r.entrant);
  }
  return c;
}

std::string mask_of(bool causal) { return causal ? "causal" : "no mask"; }

std::vector<Series> speed_series(const Comparison& c, const std::string& op, std::int64_t dim, bool causal) {
  std::vector<Series> list;
  for (const std::string& entrant : c.entrants) {
    Series s{entrant, {}, entrant == "tessera-det"};
    for (const TimingRow& r : c.rows) {
      if (r.op == op && r.dim == dim && r.causal == causal && !r.small && r.entrant == entrant && r.ok()) {
        s.points.emplace_back(static_cast<double>(r.seq), r.rate() / 1e12);
      }
    }
    if (!s.points.empty()) list.push_back(std::move(s));
  }
  return list;
}

std::set<std::int64_t> dims_of(const Comparison& c) {
  std::set<std::int64_t> dims;
  for (const TimingRow& r : c.rows) {
    if (!r.small) dims.insert(r.dim);
  }
  return dims;
}

// A table of HTML; cells may hold markup.
class HtmlTable {
 public:
  explicit HtmlTable(const std::vector<std::string>& head) {
    text_ = "<div class=\"wide\"><table><thead><tr>";
    for (const std::string& h : head) text_ += "<th>" + escaped(h) + "</th>";
    text_ += "</tr></thead><tbody>";
  }
  void row(const std::vector<std::string>& cells) {
    text_ += "<tr>";
    for (const std::string& c : cells) text_ += c.rfind("<td", 0) == 0 ? c : "<td>" + c + "</td>";
    text_ += "</tr>";
  }
  std::string done() const { return text_ + "</tbody></table></div>"; }

 private:
  std::string text_;
};

// Green above 1, red below, stronger further away.
std::string heat(double ratio) {
  const double far = std::min(1.0, std::abs(std::log2(ratio)));
  const char* colour = ratio >= 1 ? "43,138,62" : "201,42,42";
  return fmt::format("<td{} style=\"background:rgba({},{:.2f})\">{:.2f}</td>", ratio < 1 ? " class=\"loss\"" : "",
                     colour, 0.08 + 0.6 * far, ratio);
}

std::string status_cell(const TimingRow* r) {
  if (r == nullptr) return "-";
  if (r->status == "wrong") return fmt::format("<td class=\"bad\" title=\"{}\">wrong</td>", escaped(r->detail));
  return fmt::format("<td class=\"soft\" title=\"{}\">{}</td>", escaped(r->detail), escaped(r->status));
}

std::string headline(const Comparison& c) {
  HtmlTable table({"Tessera's speed over", "op", "geometric mean", "minimum", "where", "behind in"});
  for (const auto& [op, small] : kCompared) {
    std::vector<std::string> rivals = c.peers();
    if (rivals.size() > 1) rivals.emplace_back("best");
    for (const std::string& peer : rivals) {
      const Summary s = summary_of(ratios(c, op, small, "tessera", peer));
      if (s.cells == 0) continue;
      table.row({peer == "best" ? "the best of them" : escaped(peer), op,
                 fmt::format("<td class=\"{}\">{:.3f}</td>", s.mean >= 1 ? "good" : "bad", s.mean),
                 fmt::format("<td class=\"{}\">{:.3f}</td>", s.least >= 1 ? "good" : "bad", s.least), escaped(s.worst),
                 fmt::format("{} of {}", s.losses, s.cells)});
    }
  }
  return table.done();
}

std::string speed_section(const Comparison& c) {
  std::string out =
      "<h2>Speed by sequence length</h2><p class=\"soft\">TFLOP/s of useful work, 16,384 tokens; medians, L2 "
      "flushed, entrants in turn. Points show their value.</p>" +
      legend_of(c.entrants);
  for (const std::string op : {"forward", "backward"}) {
    out += fmt::format("<h3>{}</h3><div class=\"charts\">", op);
    for (const std::int64_t dim : dims_of(c)) {
      for (const bool causal : {false, true}) {
        const std::vector<Series> series = speed_series(c, op, dim, causal);
        if (!series.empty()) {
          out += line_chart(fmt::format("{}, D = {}, {}", op, dim, mask_of(causal)), "TFLOP/s", series);
        }
      }
    }
    out += "</div>";
  }
  return out;
}

std::string heat_section(const Comparison& c) {
  std::string out =
      "<h2>Ratios</h2><p class=\"soft\">Tessera's speed over the peer's; below 1, framed in red, Tessera is "
      "behind.</p>";
  std::set<std::int64_t> lengths;
  for (const TimingRow& r : c.rows) {
    if (!r.small) lengths.insert(r.seq);
  }
  for (const std::string op : {"forward", "backward"}) {
    for (const std::string& peer : c.peers()) {
      std::map<std::string, double> by_cell;
      for (const Ratio& r : ratios(c, op, false, "tessera", peer)) by_cell[r.cell] = r.value;
      if (by_cell.empty()) continue;
      std::vector<std::string> head{fmt::format("{}, {}", op, peer)};
      for (const std::int64_t s : lengths) head.push_back(fmt::format("S = {}", s));
      HtmlTable table(head);
      for (const std::int64_t dim : dims_of(c)) {
        for (const bool causal : {false, true}) {
          std::vector<std::string> line{fmt::format("D = {}, {}", dim, mask_of(causal))};
          for (const std::int64_t s : lengths) {
            std::string cell = "-";
            for (const TimingRow* r : c.cells(op, false)) {
              if (r->dim != dim || r->causal != causal || r->seq != s) continue;
              const auto known = by_cell.find(r->cell);
              cell = known != by_cell.end() ? heat(known->second)
                     : !r->ok()             ? status_cell(r)
                                            : status_cell(c.find(op, r->cell, peer));
            }
            line.push_back(cell);
          }
          table.row(line);
        }
      }
      out += "<p></p>" + table.done();
    }
  }
  return out;
}

std::string small_section(const Comparison& c) {
  std::string out;
  for (const std::string op : {"forward", "backward"}) {
    const std::vector<const TimingRow*> cells = c.cells(op, true);
    if (cells.empty()) continue;
    std::vector<std::string> head{fmt::format("{}, microseconds", op)};
    for (const std::string& e : c.entrants) head.push_back(e);
    HtmlTable table(head);
    for (const TimingRow* cell : cells) {
      std::vector<std::string> line{escaped(cell->cell)};
      for (const std::string& e : c.entrants) {
        const TimingRow* r = c.find(op, cell->cell, e);
        if (r == nullptr || !r->ok()) {
          line.push_back(status_cell(r));
          continue;
        }
        std::string text = fmt::format("{:.1f}", r->median * 1e6);
        if (r->graph > 0) text += fmt::format(" / {:.1f}", r->graph * 1e6);
        if (r->host > 0) text += fmt::format(" / {:.0f}", r->host * 1e6);
        line.push_back(text);
      }
      table.row(line);
    }
    out += "<p></p>" + table.done();
  }
  return out.empty()
             ? out
             : "<h2>Small shapes</h2><p class=\"soft\">Around the call / replayed from a graph / host time of the "
               "call.</p>" +
                   out;
}

std::string roofline_section(const Comparison& c, const History& history, const std::string& gpu) {
  const std::vector<RunRow> benches = history.runs("bench", gpu);
  if (benches.empty()) return {};
  const Json ceilings = benches.front().facts.value("ceilings", Json::object());
  double bandwidth = 0;
  std::vector<std::pair<std::string, double>> peaks;
  for (auto at = ceilings.begin(); at != ceilings.end(); ++at) {
    if (!at.value().is_number()) continue;
    if (at.key() == "copy_bytes_per_s") {
      bandwidth = at.value().get<double>();
    } else {
      peaks.emplace_back(at.key(), at.value().get<double>());
    }
  }
  if (bandwidth == 0 || peaks.empty()) return {};
  std::vector<Series> series;
  for (const std::string& entrant : c.entrants) {
    Series s{entrant, {}, false};
    for (const TimingRow& r : c.rows) {
      if (r.entrant == entrant && r.ok() && r.bytes > 0) s.points.emplace_back(r.flops / r.bytes, r.rate());
    }
    series.push_back(std::move(s));
  }
  return "<h2>Roofline</h2>" + legend_of(c.entrants) + "<div class=\"wide\">" +
         roofline_chart(series, bandwidth, peaks) +
         fmt::format(
             "</div><p class=\"soft\">Ceilings measured on the card by <code>tessera bench</code>: a copy of {:.2f} "
             "TB/s, and the tensor cores through mma.sync, which Hopper's own wgmma can pass.</p>",
             bandwidth / 1e12);
}

std::string bytes_section(const Comparison& c) {
  HtmlTable table({"shape", "op", "compulsory", "unfused", "times as much"});
  for (const std::string op : {"forward", "backward"}) {
    for (const TimingRow* r : c.cells(op, false)) {
      if (!r->causal && r->dim == 128) {
        table.row({escaped(r->cell), op, bytes_text(r->bytes), bytes_text(r->unfused_bytes),
                   fmt::format("{:.0f}", r->unfused_bytes / r->bytes)});
      }
    }
  }
  return "<h2>Bytes moved</h2><p class=\"soft\">Each tensor once, beside a pipeline that stores its scores.</p>" +
         table.done();
}

std::string accuracy_section(const Comparison& c) {
  HtmlTable table({"entrant", "op", "median error", "largest error", "right", "wrong"});
  for (const std::string op : {"forward", "backward", "decode"}) {
    for (const std::string& e : c.entrants) {
      std::vector<double> errors;
      int wrong = 0;
      for (const TimingRow& r : c.rows) {
        if (r.op != op || r.entrant != e) continue;
        if (r.ok()) errors.push_back(r.error);
        wrong += r.status == "wrong" ? 1 : 0;
      }
      if (errors.empty() && wrong == 0) continue;
      std::sort(errors.begin(), errors.end());
      table.row({escaped(e), op, errors.empty() ? "-" : fmt::format("{:.2f}", errors[errors.size() / 2]),
                 errors.empty() ? "-" : fmt::format("{:.2f}", errors.back()), fmt::format("{}", errors.size()),
                 wrong > 0 ? fmt::format("<td class=\"bad\">{}</td>", wrong) : "0"});
    }
  }
  return "<h2>Accuracy beside the peers</h2><p class=\"soft\">Error against fp64 over what is allowed: three times "
         "that of "
         "plain arithmetic in the same precision. At 1 a result counts as wrong and is not timed.</p>" +
         table.done();
}

std::string determinism_section(const Comparison& c) {
  const std::vector<Ratio> list = ratios(c, "backward", false, "tessera-det", "tessera");
  if (list.empty()) return {};
  const Summary s = summary_of(list);
  HtmlTable table({"shape", "deterministic over fast"});
  for (const Ratio& r : list) table.row({escaped(r.cell), fmt::format("{:.2f}", r.value)});
  return fmt::format(
      "<h2>What determinism costs</h2><p>The deterministic backward runs at {:.2f} of the fast one's speed in "
      "the geometric mean, {:.2f} at the least ({}).</p><details><summary>every shape</summary>{}</details>",
      s.mean, s.least, escaped(s.worst), table.done());
}

std::string verify_section(const History& history, const std::string& gpu) {
  std::map<std::string, RunRow> newest;
  for (const RunRow& r : history.runs("verify", gpu)) newest.emplace(r.suite, r);
  if (newest.empty()) return {};
  HtmlTable table({"suite", "date", "passed", "failed", "refused", "worst error", "where"});
  for (const auto& [suite, run] : newest) {
    const int failed = run.facts.value("failed", 0);
    table.row({escaped(suite), escaped(run.date), fmt::format("{}", run.facts.value("passed", 0)),
               failed > 0 ? fmt::format("<td class=\"bad\">{}</td>", failed) : "0",
               fmt::format("{}", run.facts.value("refused", 0)),
               fmt::format("{:.2f}", run.facts.value("worst_error_over_allowed", 0.0)),
               escaped(run.facts.value("worst_case", std::string()))});
  }
  std::string out =
      "<h2>Verified against the fp64 oracle</h2><p class=\"soft\">Errors over what the rule allows; 1 is the "
      "limit. full_sm_80 and full_sm_75 are those architectures' code on this card.</p>" +
      table.done();
  const auto hostile = newest.find("hostile");
  if (hostile == newest.end()) return out;
  struct Worst {
    int passed = 0, failed = 0;
    double error = 0;
  };
  std::map<std::string, Worst> by_kind;
  std::string failures;
  for (const VerdictRow& v : history.verdicts(hostile->second.id)) {
    static const std::vector<std::string> kinds{"logits_120", "logits_1e4", "logits_1e10", "logits_minus_120",
                                                "one_hot",    "constant",   "huge_values"};
    std::string kind = "rows that see nothing, and the like";
    for (const std::string& k : kinds) {
      if (v.name.ends_with(k)) kind = k;
    }
    Worst& w = by_kind[v.name.substr(0, 3) + " " + kind];
    (v.outcome == "passed" ? w.passed : w.failed)++;
    w.error = std::max(w.error, v.error);
    if (v.outcome != "passed") failures += "<li>" + escaped(v.name) + ": " + escaped(v.detail) + "</li>";
  }
  HtmlTable hostile_table({"hostile inputs", "passed", "failed", "worst error"});
  for (const auto& [kind, w] : by_kind) {
    hostile_table.row({escaped(kind), fmt::format("{}", w.passed),
                       w.failed > 0 ? fmt::format("<td class=\"bad\">{}</td>", w.failed) : "0",
                       fmt::format("{:.2f}", w.error)});
  }
  out += "<h3>Hostile inputs</h3>" + hostile_table.done();
  if (!failures.empty()) out += "<p class=\"bad\">Failed:</p><ul>" + failures + "</ul>";
  return out;
}

// Those who ran a decode step, in the order of the file.
std::vector<std::string> decoders(const Comparison& c) {
  std::vector<std::string> list;
  for (const std::string& e : c.entrants) {
    const auto decodes = [&](const TimingRow& r) { return r.op == "decode" && r.entrant == e; };
    if (std::any_of(c.rows.begin(), c.rows.end(), decodes)) list.push_back(e);
  }
  return list;
}

// Which op served Tessera's decode steps; "" where the file does not say.
std::string decoded_through(const Comparison& c) {
  std::set<std::string> ways;
  for (const TimingRow* r : c.cells("decode", true)) {
    if (r->ok()) ways.insert(r->detail);
  }
  std::string text;
  for (const std::string& way : ways) text += (text.empty() ? "" : " and ") + way;
  return text;
}

std::string decode_beside_peers(const Comparison& c) {
  const std::vector<const TimingRow*> cells = c.cells("decode", true);
  if (cells.empty()) return {};
  const std::vector<std::string> entrants = decoders(c);
  std::vector<std::string> head{"one query"};
  for (const std::string& e : entrants) head.push_back(e);
  for (const std::string& e : entrants) {
    if (!is_ours(e)) head.push_back("Tessera / " + e);
  }
  HtmlTable table(head);
  for (const TimingRow* cell : cells) {
    std::vector<std::string> line{escaped(cell->cell)};
    for (const std::string& e : entrants) {
      const TimingRow* r = c.find("decode", cell->cell, e);
      if (r == nullptr || !r->ok()) {
        line.push_back(status_cell(r));
        continue;
      }
      std::string text = fmt::format("{:.1f}", r->median * 1e6);
      if (r->graph > 0) text += fmt::format(" / {:.1f}", r->graph * 1e6);
      line.push_back(text + fmt::format(" / {:.2f}", r->bandwidth() / 1e12));
    }
    for (const std::string& e : entrants) {
      if (is_ours(e)) continue;
      const TimingRow* r = c.find("decode", cell->cell, e);
      line.push_back(cell->ok() && r != nullptr && r->ok() ? heat(r->median / cell->median) : "-");
    }
    table.row(line);
  }
  const std::string through = decoded_through(c);
  return "<p class=\"soft\">Microseconds around the call, L2 flushed / replayed from a graph, L2 as it is / TB/s of "
         "the first, K and V counted once." +
         (through.empty() ? "" : " Tessera ran " + escaped(through) + ".") + "</p>" + table.done();
}

std::string decode_section(const Comparison* c, const History& history, const std::string& gpu) {
  std::string out = c != nullptr ? decode_beside_peers(*c) : "";
  const std::vector<RunRow> benches = history.runs("bench", gpu);
  HtmlTable table({"decode", "median, us", "GB/s", "of the measured copy"});
  bool any = false;
  for (const TimingRow& r : benches.empty() ? std::vector<TimingRow>() : history.timings(benches.front().id)) {
    if (r.op != "decode" || !r.ok()) continue;
    any = true;
    table.row({escaped(r.cell), fmt::format("{:.1f}", r.median * 1e6), fmt::format("{:.0f}", r.bandwidth() / 1e9),
               fmt::format("{:.0f} %", 100 * r.part_of_ceiling)});
  }
  if (any) out += "<p></p>" + table.done();
  return out.empty() ? out : "<h2>Decode bandwidth</h2>" + out;
}

std::string evidence_section(const History& history, const std::string& gpu) {
  const std::vector<RunRow> runs = history.runs("evidence", gpu);
  if (runs.empty()) return {};
  HtmlTable table({"case", "p50, us", "p95, us", "graph, us", "host, us", "error"});
  int wrong = 0, cases = 0;
  for (const TimingRow& r : history.timings(runs.front().id)) {
    if (r.status == "refused") continue;
    ++cases;
    if (!r.ok()) {
      ++wrong;
      table.row({escaped(r.cell), status_cell(&r), "", "", "", fmt::format("{:.2f}", r.error)});
      continue;
    }
    table.row({escaped(r.cell), fmt::format("{:.1f}", r.median * 1e6), fmt::format("{:.1f}", r.p95 * 1e6),
               fmt::format("{:.1f}", r.graph * 1e6), fmt::format("{:.1f}", r.host * 1e6),
               fmt::format("{:.2f}", r.error)});
  }
  return fmt::format(
      "<h2>Evidence</h2><p>{} cases, each checked and then called a hundred times, launch included; {} "
      "wrong.</p><details><summary>every case</summary>{}</details>",
      cases, wrong, table.done());
}

std::string kernel_section(const std::vector<KernelState>& kernels) {
  HtmlTable table({"kernel", "hash of its code", "verified"});
  for (const KernelState& k : kernels) {
    const bool good = k.verified == KernelState::Verified::kYes;
    table.row({escaped(k.header), k.hash.substr(0, 12),
               fmt::format("<td class=\"{}\">{}{}</td>", good ? "good" : "bad",
                           good                                            ? ""
                           : k.verified == KernelState::Verified::kChanged ? "changed since: "
                                                                           : "never",
                           escaped(k.where))});
  }
  return "<h2>Which code was verified</h2>" + table.done();
}

std::string history_section(const History& history, const std::string& gpu) {
  const std::vector<RunRow> runs = history.runs("peers", gpu);
  if (runs.size() < 2) return {};
  HtmlTable table({"date", "version", "forward over the best", "backward over the best", "decode over the best"});
  for (const RunRow& run : runs) {
    Comparison c;
    c.run = run;
    c.rows = history.timings(run.id);
    for (const TimingRow& r : c.rows) {
      if (std::find(c.entrants.begin(), c.entrants.end(), r.entrant) == c.entrants.end())
        c.entrants.push_back(r.entrant);
    }
    std::vector<std::string> line{escaped(run.date), escaped(run.version)};
    for (const auto& [op, small] : kCompared) {
      const Summary s = summary_of(ratios(c, op, small, "tessera", "best"));
      line.push_back(s.cells > 0 ? fmt::format("{:.3f}", s.mean) : "-");
    }
    table.row(line);
  }
  return "<h2>Over time</h2>" + table.done();
}

std::string environment_section(const RunRow& run) {
  HtmlTable table({"", ""});
  const auto add = [&](const std::string& prefix, const Json& object) {
    for (auto at = object.begin(); at != object.end(); ++at) {
      if (at.value().is_structured() || at.value().is_null()) continue;
      table.row({escaped(prefix + at.key()),
                 escaped(at.value().is_string() ? at.value().get<std::string>() : at.value().dump())});
    }
  };
  add("", run.facts.value("environment", Json::object()));
  add("before: ", run.facts.value("gpu_before", Json::object()));
  add("after: ", run.facts.value("gpu_after", Json::object()));
  return "<h2>Environment</h2>" + table.done();
}

std::string gpu_title(const RunRow& run) {
  const Json environment = run.facts.value("environment", Json::object());
  return environment.value("gpu", run.gpu);
}

// Empty where no decode step was timed.
std::string readme_decode(const Comparison& c) {
  const std::vector<const TimingRow*> cells = c.cells("decode", true);
  if (cells.empty()) return {};
  const std::string through = decoded_through(c);
  std::string out =
      fmt::format("\nDecode, one query, microseconds around the call and TB/s with K and V read once{}:\n\n| |",
                  through.empty() ? "" : ", Tessera " + through);
  std::string rule = "\n|---|";
  for (const std::string& e : decoders(c)) {
    out += fmt::format(" {} |", e);
    rule += "---|";
  }
  out += rule + "\n";
  for (const TimingRow* cell : cells) {
    out += fmt::format("| `{}` |", cell->cell);
    for (const std::string& e : decoders(c)) {
      const TimingRow* r = c.find("decode", cell->cell, e);
      out += r == nullptr ? " - |"
             : !r->ok()   ? fmt::format(" {} |", r->status)
                          : fmt::format(" {:.1f}, {:.2f} |", r->median * 1e6, r->bandwidth() / 1e12);
    }
    out += "\n";
  }
  return out;
}

}  // namespace

std::string html_report(const History& history, const std::vector<KernelState>& kernels) {
  std::string body = "<h1>Tessera: what was measured</h1>";
  const std::vector<std::string> gpus = history.gpus();
  if (gpus.empty()) body += "<p>Nothing has been recorded.</p>";
  for (const std::string& gpu : gpus) {
    const std::optional<Comparison> c = newest_comparison(history, gpu);
    if (c) {
      body += fmt::format("<h2>{}</h2><p class=\"soft\">{}, Tessera {}. Comparison of {} rows.</p>",
                          escaped(gpu_title(c->run)), escaped(c->run.date), escaped(c->run.version), c->rows.size());
      body += headline(*c) + speed_section(*c) + heat_section(*c) + small_section(*c) +
              roofline_section(*c, history, gpu) + bytes_section(*c) + accuracy_section(*c) + determinism_section(*c);
    } else {
      body += fmt::format("<h2>{}</h2><p>No comparison with peers is recorded.</p>", escaped(gpu));
    }
    body += decode_section(c ? &*c : nullptr, history, gpu) + verify_section(history, gpu) +
            evidence_section(history, gpu) + history_section(history, gpu);
    if (c) body += environment_section(c->run);
  }
  body += kernel_section(kernels);
  return "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" "
         "content=\"width=device-width,initial-scale=1\"><title>Tessera: what was measured</title><link rel=\"icon\" "
         "href=\"data:,\"><style>" +
         std::string(kStyle) + chart_style() + "</style></head><body>" + body + "</body></html>\n";
}

std::string readme_tables(const History& history) {
  std::string out;
  for (const std::string& gpu : history.gpus()) {
    const std::optional<Comparison> c = newest_comparison(history, gpu);
    if (!c) continue;
    const Json environment = c->run.facts.value("environment", Json::object());
    const std::vector<TimingRow>& rows = c->rows;
    const std::string dtype = rows.empty() ? "" : rows.front().dtype;
    out +=
        fmt::format("{}, {}, PyTorch {}, {}; 32 shapes of 16,384 tokens, Tessera's speed over each peer's:\n\n",
                    gpu_title(c->run), c->run.date.substr(0, 10), environment.value("torch", std::string("?")), dtype);
    out += "| | peer | geometric mean | minimum | where | behind in |\n|---|---|---|---|---|---|\n";
    for (const std::string op : {"forward", "backward"}) {
      std::vector<std::string> rivals = c->peers();
      if (rivals.size() > 1) rivals.emplace_back("best");
      for (const std::string& peer : rivals) {
        const Summary s = summary_of(ratios(*c, op, false, "tessera", peer));
        if (s.cells == 0) continue;
        out += fmt::format("| {} | {} | {:.2f} | {:.2f} | `{}` | {} of {} |\n", op,
                           peer == "best" ? "the best of them" : peer, s.mean, s.least, s.worst, s.losses, s.cells);
      }
    }
    out += "\n![Speed by sequence length, beside the peers](docs/speed.svg)\n";
    const Summary cost = summary_of(ratios(*c, "backward", false, "tessera-det", "tessera"));
    if (cost.cells > 0) {
      out += fmt::format("\nThe deterministic backward runs at {:.2f} of the fast one's speed, {:.2f} at the least.\n",
                         cost.mean, cost.least);
    }
    out += readme_decode(*c);
  }
  return out;
}

std::optional<std::string> readme_picture(const History& history) {
  for (const std::string& gpu : history.gpus()) {
    const std::optional<Comparison> c = newest_comparison(history, gpu);
    if (!c) continue;
    std::vector<std::string> charts;
    for (const std::string op : {"forward", "backward"}) {
      for (const std::int64_t dim : {64, 80, 128, 256}) {
        const std::vector<Series> series = speed_series(*c, op, dim, true);
        if (!series.empty())
          charts.push_back(line_chart(fmt::format("{}, D = {}, causal", op, dim), "TFLOP/s", series));
      }
    }
    return picture_of(charts, c->entrants);
  }
  return std::nullopt;
}

}  // namespace tessera::cli
