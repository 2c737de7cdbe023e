// README's tables and picture.
#include <algorithm>

#include "base/format.h"
#include "results/charts.h"
#include "results/report_page.h"
#include "results/sections.h"

namespace tessera::results {
namespace {

// Ratios to each peer, for the charted ops of one family.
std::string speed_table(const Comparison& c, const std::vector<const View*>& views) {
  const View& first = *views.front();
  const std::size_t shapes = first.ours().size();
  std::string torch = text_at(c.run.facts.value("environment", Json::object()), "torch");
  std::string out =
      format("{}, {}, PyTorch {}, {}; {} shape{} of {}, Tessera's speed over each peer's:\n\n", gpu_title(c.run),
             c.run.date.substr(0, 10), torch.empty() ? "?" : torch, field_text(first.rows.front().fields, "dtype"),
             shapes, shapes == 1 ? "" : "s", first.how.shapes);
  out += "| | peer | geometric mean | minimum | where | behind in |\n|---|---|---|---|---|---|\n";
  for (const View* view : views) {
    for (const std::string& peer : rivals(*view)) {
      const Summary s = summary_of(ratios(*view, ours_beside(peer), peer));
      if (s.cells == 0) continue;
      out += format("| {}{} | {} | {:.2f} | {:.2f} | `{}` | {} of {} |\n",
                    is_deterministic(peer) ? "deterministic " : "", view->how.label,
                    peer == kBest ? "the best of them" : peer, s.mean, s.least, s.worst, s.losses, s.cells);
    }
  }
  return out;
}

std::string bandwidth_table(const View& view) {
  const std::string through = served_through(view);
  std::string out = format("\n{}{}:\n\n| |", view.how.readme_caption, through.empty() ? "" : ", Tessera " + through);
  std::string rule = "\n|---|";
  for (const std::string& e : view.ran()) {
    out += format(" {} |", e);
    rule += "---|";
  }
  out += rule + "\n";
  for (const std::string& cell : view.cells()) {
    out += format("| `{}` |", cell);
    for (const std::string& e : view.ran()) {
      const TimingRow* r = view.find(cell, e);
      out += r == nullptr ? " - |"
             : !r->ok()   ? format(" {} |", r->status)
                          : format(" {:.1f}, {:.2f} |", r->median * 1e6, r->bandwidth() / 1e12);
    }
    out += "\n";
  }
  return out;
}

// Consecutive views of the same family.
std::vector<std::vector<const View*>> by_family(const std::vector<const View*>& views) {
  std::vector<std::vector<const View*>> list;
  for (const View* view : views) {
    if (list.empty() || list.back().front()->how.family != view->how.family) list.emplace_back();
    list.back().push_back(view);
  }
  return list;
}

bool in_picture(const View& view, const GroupValues& values) {
  return std::any_of(view.rows.begin(), view.rows.end(), [&](const TimingRow& r) {
    for (std::size_t n = 0; n < values.size(); ++n) {
      if (r.fields.at(view.how.groups[n].field) != values[n]) return false;
    }
    return matches(r, view.how.picture_where);
  });
}

}  // namespace

std::string readme_tables(const History& history) {
  std::string out;
  for (const std::string& gpu : history.gpus()) {
    const std::optional<Comparison> c = newest_comparison(history, gpu);
    if (!c) continue;
    const std::vector<const View*> charted = c->of_form(Form::kCharts);
    for (const std::vector<const View*>& views : by_family(charted)) out += speed_table(*c, views);
    if (!charted.empty()) {
      out += format("\n![{}, beside the peers](docs/speed.svg)\n", charted.front()->how.section);
    }
    for (const View* view : charted) {
      const Summary cost = summary_of(ratios(*view, "tessera-det", "tessera"));
      if (cost.cells == 0) continue;
      out += format("\nThe deterministic {} runs at {:.2f} of the fast one's speed, {:.2f} at the least.\n",
                    view->how.label, cost.mean, cost.least);
    }
    for (const View* view : c->of_form(Form::kBandwidth)) out += bandwidth_table(*view);
  }
  return out;
}

std::optional<std::string> readme_picture(const History& history) {
  for (const std::string& gpu : history.gpus()) {
    const std::optional<Comparison> c = newest_comparison(history, gpu);
    if (!c) continue;
    std::vector<std::string> charts, legend;
    for (const View* view : c->of_form(Form::kCharts)) {
      if (legend.empty()) legend = view->entrants;
      for (const GroupValues& values : groups_of(*view)) {
        if (!in_picture(*view, values)) continue;
        if (std::string chart = speed_chart(*view, values); !chart.empty()) charts.push_back(std::move(chart));
      }
    }
    if (!charts.empty()) return picture_of(charts, legend);
  }
  return std::nullopt;
}

}  // namespace tessera::results
