#include "results/comparison.h"

#include <algorithm>
#include <cmath>

namespace tessera::results {
namespace {

void add_once(std::vector<std::string>& list, const std::string& text) {
  if (std::find(list.begin(), list.end(), text) == list.end()) list.push_back(text);
}

}  // namespace

bool is_ours(const std::string& entrant) { return entrant.starts_with("tessera"); }

bool is_deterministic(const std::string& entrant) { return entrant.ends_with("-det"); }

std::string ours_beside(const std::string& peer) { return is_deterministic(peer) ? "tessera-det" : "tessera"; }

std::vector<std::string> View::peers() const {
  std::vector<std::string> list;
  for (const std::string& e : entrants) {
    if (!is_ours(e)) list.push_back(e);
  }
  return list;
}

std::vector<std::string> View::ran() const {
  std::vector<std::string> list;
  for (const std::string& e : entrants) {
    if (std::any_of(rows.begin(), rows.end(), [&](const TimingRow& r) { return r.entrant == e; })) list.push_back(e);
  }
  return list;
}

std::vector<std::string> View::cells() const {
  std::vector<std::string> list;
  for (const TimingRow& r : rows) add_once(list, r.cell);
  return list;
}

const TimingRow* View::find(const std::string& cell, const std::string& entrant) const {
  for (const TimingRow& r : rows) {
    if (r.cell == cell && r.entrant == entrant) return &r;
  }
  return nullptr;
}

std::vector<const TimingRow*> View::ours() const {
  std::vector<const TimingRow*> list;
  for (const TimingRow& r : rows) {
    if (r.entrant == "tessera") list.push_back(&r);
  }
  return list;
}

std::vector<std::string> entrants_of(const std::vector<TimingRow>& rows, const std::string& family) {
  std::vector<std::string> list;
  for (const TimingRow& r : rows) {
    if (family.empty() || r.family == family) add_once(list, r.entrant);
  }
  return list;
}

std::vector<View> views_of(const std::vector<TimingRow>& rows) {
  std::vector<View> views;
  for (const Presentation& p : presentations()) views.push_back({p, {}, {}});
  const std::size_t presented = views.size();
  for (const TimingRow& r : rows) {
    bool taken = false;
    for (std::size_t n = 0; n < presented; ++n) {
      if (!views[n].how.takes(r)) continue;
      views[n].rows.push_back(r);
      taken = true;
    }
    if (taken) continue;
    const auto same = [&](const View& v) { return v.how.family == r.family && v.how.op == r.op; };
    auto plain = std::find_if(views.begin() + static_cast<std::ptrdiff_t>(presented), views.end(), same);
    if (plain == views.end()) plain = views.insert(plain, {plain_presentation(r.family, r.op), {}, {}});
    plain->rows.push_back(r);
  }
  std::erase_if(views, [](const View& v) { return v.rows.empty(); });
  for (View& v : views) v.entrants = entrants_of(rows, v.how.family);
  return views;
}

std::vector<const View*> Comparison::of_form(Form form) const {
  std::vector<const View*> list;
  for (const View& v : views) {
    if (v.how.form == form) list.push_back(&v);
  }
  return list;
}

Comparison comparison_of(const History& history, const RunRow& run) {
  Comparison c{run, history.timings(run.id), {}};
  c.views = views_of(c.rows);
  return c;
}

std::optional<Comparison> newest_comparison(const History& history, const std::string& gpu) {
  const std::vector<RunRow> runs = history.runs("peers", gpu);
  if (runs.empty()) return std::nullopt;
  return comparison_of(history, runs.front());
}

std::vector<Ratio> ratios(const View& view, const std::string& ours, const std::string& peer) {
  std::vector<Ratio> list;
  for (const TimingRow* cell : view.ours()) {
    const TimingRow* mine = view.find(cell->cell, ours);
    if (mine == nullptr || !mine->ok() || mine->median <= 0) continue;
    double theirs = 0;
    for (const std::string& name : view.entrants) {
      if (peer == kBest ? is_ours(name) : name != peer) continue;
      const TimingRow* r = view.find(cell->cell, name);
      if (r != nullptr && r->ok() && (theirs == 0 || r->median < theirs)) theirs = r->median;
    }
    if (theirs > 0) list.push_back({cell->cell, theirs / mine->median});
  }
  return list;
}

std::vector<std::string> rivals(const View& view) {
  std::vector<std::string> list = view.peers();
  if (list.size() > 1) list.emplace_back(kBest);
  return list;
}

Summary summary_of(const std::vector<Ratio>& list) {
  Summary s;
  s.cells = static_cast<int>(list.size());
  double logs = 0;
  for (const Ratio& r : list) {
    logs += std::log(r.value);
    s.losses += r.value < 1 ? 1 : 0;
    s.most = std::max(s.most, r.value);
    if (s.worst.empty() || r.value < s.least) {
      s.least = r.value;
      s.worst = r.cell;
    }
  }
  if (!list.empty()) s.mean = std::exp(logs / static_cast<double>(list.size()));
  return s;
}

}  // namespace tessera::results
