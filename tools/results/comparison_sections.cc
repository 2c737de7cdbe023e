// The report's sections about the comparison with peers.
#include <algorithm>
#include <map>
#include <set>

#include "base/format.h"
#include "results/charts.h"
#include "results/html.h"
#include "results/sections.h"

namespace tessera::results {
namespace {

double x_of(const View& view, const TimingRow& row) { return row.fields.at(view.how.x.field).get<double>(); }

GroupValues values_of(const View& view, const TimingRow& row) {
  GroupValues values;
  for (const Group& g : view.how.groups) values.push_back(row.fields.at(g.field));
  return values;
}

std::vector<Series> speed_series(const View& view, const GroupValues& values) {
  std::vector<Series> list;
  for (const std::string& entrant : view.entrants) {
    Series s{entrant, {}, is_deterministic(entrant)};
    for (const TimingRow& r : view.rows) {
      if (r.entrant == entrant && r.ok() && values_of(view, r) == values) {
        s.points.emplace_back(x_of(view, r), r.rate() / 1e12);
      }
    }
    std::sort(s.points.begin(), s.points.end());
    if (!s.points.empty()) list.push_back(std::move(s));
  }
  return list;
}

// "backward", or "deterministic backward" beside a peer that is.
std::string label_beside(const View& view, const std::string& peer) {
  return (is_deterministic(peer) ? "deterministic " : "") + view.how.label;
}

// Groups by x values: Tessera's speed divided by one peer's.
std::string ratio_table(const View& view, const std::string& peer) {
  std::map<std::string, double> by_cell;
  for (const Ratio& r : ratios(view, ours_beside(peer), peer)) by_cell[r.cell] = r.value;
  if (by_cell.empty()) return {};
  std::set<double> columns;
  for (const TimingRow& r : view.rows) columns.insert(x_of(view, r));
  std::vector<std::string> head{format("{}, {}", label_beside(view, peer), peer)};
  for (const double x : columns) head.push_back(format("{} = {}", view.how.x.symbol, x));
  HtmlTable table(head);
  for (const GroupValues& values : groups_of(view)) {
    std::vector<std::string> line{escaped(text_of(view, values))};
    for (const double x : columns) {
      std::string cell = "-";
      for (const TimingRow* r : view.ours()) {
        if (values_of(view, *r) != values || x_of(view, *r) != x) continue;
        const auto known = by_cell.find(r->cell);
        cell = known != by_cell.end() ? ratio_cell(known->second)
               : !r->ok()             ? status_cell(r)
                                      : status_cell(view.find(r->cell, peer));
      }
      line.push_back(cell);
    }
    table.row(line);
  }
  return table.done();
}

// Of every chart and peer, side by side.
std::string ratio_tables(const Comparison& c) {
  std::string out;
  for (const View* view : c.of_form(Form::kCharts)) {
    for (const std::string& peer : view->peers()) out += ratio_table(*view, peer);
  }
  return out.empty() ? out : "<div class=\"tables\">" + out + "</div>";
}

std::string shape_cell_of(const View& view, const std::string& cell) {
  const TimingRow* row = view.find(cell, "tessera");
  return row != nullptr ? shape_cell(*row) : escaped(cell);
}

// Of the entrants that are deterministic, or of the others: all of them are too wide for one table.
std::string latency_table(const View& view, bool deterministic) {
  std::vector<std::string> entrants = view.ran();
  std::erase_if(entrants, [&](const std::string& e) { return is_deterministic(e) != deterministic; });
  if (entrants.empty()) return {};
  std::vector<std::string> head{format("{}{}, microseconds", deterministic ? "deterministic " : "", view.how.label)};
  for (const std::string& e : entrants) head.push_back(e);
  HtmlTable table(head);
  for (const std::string& cell : view.cells()) {
    std::vector<std::string> line{shape_cell_of(view, cell)};
    for (const std::string& e : entrants) {
      const TimingRow* r = view.find(cell, e);
      if (r == nullptr || !r->ok()) {
        line.push_back(status_cell(r));
        continue;
      }
      std::string text = microseconds(r->median);
      if (r->graph > 0) text += " / " + microseconds(r->graph);
      if (r->host > 0) text += format(" / {:.0f}", r->host * 1e6);
      line.push_back(figures_cell(text));
    }
    table.row(line);
  }
  return table.done();
}

// Families and ops of the rows: those with a presentation first.
std::vector<std::pair<std::string, std::string>> ops_of(const std::vector<TimingRow>& rows) {
  std::vector<std::pair<std::string, std::string>> list;
  const auto add = [&](const std::string& family, const std::string& op) {
    const std::pair<std::string, std::string> one{family, op};
    if (std::find(list.begin(), list.end(), one) == list.end()) list.push_back(one);
  };
  for (const Presentation& p : presentations()) add(p.family, p.op);
  for (const TimingRow& r : rows) add(r.family, r.op);
  return list;
}

}  // namespace

std::vector<GroupValues> groups_of(const View& view) {
  std::set<GroupValues> groups;
  for (const TimingRow& r : view.rows) groups.insert(values_of(view, r));
  return {groups.begin(), groups.end()};
}

std::string text_of(const View& view, const GroupValues& values) {
  std::string text;
  for (std::size_t n = 0; n < values.size(); ++n) {
    text += (n == 0 ? "" : ", ") + group_text(view.how.groups[n], values[n]);
  }
  return text;
}

std::string speed_chart(const View& view, const GroupValues& values) {
  const std::vector<Series> series = speed_series(view, values);
  if (series.empty()) return {};
  return line_chart(view.how.label + ", " + text_of(view, values), view.how.x.title, "TFLOP/s", series);
}

std::string headline(const Comparison& c) {
  std::vector<RatioBar> bars;
  HtmlTable table({"Tessera's speed over", "op", "geometric mean", "minimum", "where", "behind in"});
  for (const View& view : c.views) {
    if (!view.how.compared()) continue;
    for (const std::string& peer : rivals(view)) {
      const Summary s = summary_of(ratios(view, ours_beside(peer), peer));
      if (s.cells == 0) continue;
      const TimingRow* worst = view.find(s.worst, "tessera");
      if (peer != kBest) {
        bars.push_back({label_beside(view, peer) + ", over " + entrant_name(peer), peer, s.mean, s.least, s.most,
                        format("{:.2f}x ({:.2f} to {:.2f}), {}", s.mean, s.least, s.most,
                               s.losses == 0 ? format("all {} ahead", s.cells)
                                             : format("behind in {} of {}", s.losses, s.cells))});
      }
      table.row({peer == kBest ? "the best of them" : escaped(entrant_name(peer)), escaped(label_beside(view, peer)),
                 format("<td class=\"{}\">{:.3f}</td>", s.mean >= 1 ? "good" : "bad", s.mean),
                 format("<td class=\"{}\">{:.3f}</td>", s.least >= 1 ? "good" : "bad", s.least),
                 worst != nullptr ? shape_cell(*worst) : "-", format("{} of {}", s.losses, s.cells)});
    }
  }
  if (bars.empty()) return table.done();
  return "<p>How many times as fast as the others Tessera is: the bar ends at the geometric mean over all shapes, the "
         "line "
         "goes from the worst shape to the best.</p><div class=\"picture\">" +
         ratio_chart(bars) + "</div>" + table.done();
}

std::string speed_sections(const Comparison& c) {
  std::string out, section;
  for (const View* view : c.of_form(Form::kCharts)) {
    if (view->how.section != section) {
      section = view->how.section;
      out += format("<h2>{}</h2><p class=\"soft\">{}</p>", escaped(section), escaped(view->how.caption)) +
             legend_of(view->entrants);
    }
    out += format("<h3>{}</h3><div class=\"charts\">", escaped(view->how.label));
    for (const GroupValues& values : groups_of(*view)) out += speed_chart(*view, values);
    out += "</div>";
  }
  return out;
}

std::string ratio_section(const Comparison& c) {
  const std::string tables = ratio_tables(c);
  if (tables.empty()) return tables;
  return "<h2>Ratios</h2><p class=\"soft\">Tessera's speed divided by the peer's. Below 1, framed in red, Tessera is "
         "slower.</p>" +
         tables;
}

std::string unfused_section(const History& history, const std::string& gpu) {
  const std::vector<RunRow> runs = history.runs("peers_unfused", gpu);
  if (runs.empty()) return {};
  const std::string tables = ratio_tables(comparison_of(history, runs.front()));
  if (tables.empty()) return tables;
  return format(
      "<h2>Beside PyTorch without a fused library</h2><p class=\"soft\">math: SDPA's own matrix products and softmax, "
      "which store the scores. flex: FlexAttention, which PyTorch compiles for the shape. Tessera's speed divided by "
      "theirs, on some of the shapes; {}.</p>{}",
      escaped(runs.front().date), tables);
}

std::string latency_sections(const Comparison& c) {
  std::string out, section;
  for (const View* view : c.of_form(Form::kLatency)) {
    if (view->how.section != section) {
      section = view->how.section;
      out += format("{}<h2>{}</h2><p class=\"soft\">{}</p><div class=\"tables\">", out.empty() ? "" : "</div>",
                    escaped(section), escaped(view->how.caption));
    }
    out += latency_table(*view, false) + latency_table(*view, true);
  }
  return out.empty() ? out : out + "</div>";
}

std::string bytes_section(const Comparison& c) {
  HtmlTable table({"shape", "op", "compulsory", "unfused", "times as much"});
  bool any = false;
  for (const View* view : c.of_form(Form::kCharts)) {
    for (const TimingRow* r : view->ours()) {
      if (!matches(*r, view->how.bytes_where) || r->bytes <= 0) continue;
      any = true;
      table.row({shape_cell(*r), escaped(view->how.label), bytes_text(r->bytes), bytes_text(r->unfused_bytes),
                 format("{:.0f}", r->unfused_bytes / r->bytes)});
    }
  }
  if (!any) return {};
  return "<h2>Bytes moved</h2><p class=\"soft\">Compulsory: each tensor is read or written once. Unfused: a pipeline "
         "that "
         "stores its intermediate results.</p>" +
         table.done();
}

std::string accuracy_section(const Comparison& c) {
  HtmlTable table({"entrant", "op", "median error", "largest error", "right", "wrong"});
  for (const auto& [family, op] : ops_of(c.rows)) {
    for (const std::string& e : entrants_of(c.rows, family)) {
      std::vector<double> errors;
      int wrong = 0;
      for (const TimingRow& r : c.rows) {
        if (r.family != family || r.op != op || r.entrant != e) continue;
        if (r.ok()) errors.push_back(r.error);
        wrong += r.status == "wrong" ? 1 : 0;
      }
      if (errors.empty() && wrong == 0) continue;
      std::sort(errors.begin(), errors.end());
      table.row({escaped(e), escaped(op_label(family, op)),
                 errors.empty() ? "-" : format("{:.2f}", errors[errors.size() / 2]),
                 errors.empty() ? "-" : format("{:.2f}", errors.back()), format("{}", errors.size()),
                 failures_cell(wrong)});
    }
  }
  return "<h2>Accuracy beside the peers</h2><p class=\"soft\">Error against fp64 divided by the allowed error, which "
         "is three times that of plain arithmetic in the same precision. A result at 1 or above counts as wrong and is "
         "not timed.</p>" +
         table.done();
}

std::string determinism_section(const Comparison& c) {
  std::string out;
  for (const View& view : c.views) {
    if (!view.how.compared()) continue;
    const std::vector<Ratio> list = ratios(view, "tessera-det", "tessera");
    if (list.empty()) continue;
    const Summary s = summary_of(list);
    HtmlTable table({"shape", "deterministic over fast"});
    for (const Ratio& r : list) table.row({shape_cell_of(view, r.cell), format("{:.2f}", r.value)});
    const TimingRow* worst = view.find(s.worst, "tessera");
    out += format(
        "<p>Deterministic {}: {:.2f} of the fast one's speed in the geometric mean, {:.2f} in the worst case "
        "({}).</p><details><summary>every shape</summary>{}</details>",
        escaped(view.how.label), s.mean, s.least, escaped(worst != nullptr ? shape_text(*worst) : s.worst),
        table.done());
  }
  return out.empty() ? out : "<h2>What determinism costs</h2>" + out;
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

}  // namespace tessera::results
