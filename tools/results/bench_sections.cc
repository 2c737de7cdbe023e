// The report's sections that put what `tessera bench` measured beside the comparison with peers.
#include <algorithm>
#include <set>

#include "base/format.h"
#include "results/charts.h"
#include "results/html.h"
#include "results/sections.h"

namespace tessera::results {
namespace {

// "over fa2" columns: the peer's time divided by ours, for each peer that ran.
void add_ratio_heads(std::vector<std::string>& head, const std::vector<std::string>& entrants) {
  for (const std::string& e : entrants) {
    if (!is_ours(e)) head.push_back("over " + e);
  }
}

void add_ratios(std::vector<std::string>& line, const View& view, const std::string& cell,
                const std::vector<std::string>& entrants) {
  for (const std::string& e : entrants) {
    if (is_ours(e)) continue;
    const TimingRow *ours = view.find(cell, ours_beside(e)), *r = view.find(cell, e);
    const bool both = ours != nullptr && ours->ok() && ours->median > 0 && r != nullptr && r->ok() && r->median > 0;
    line.push_back(both ? ratio_cell(r->median / ours->median) : "-");
  }
}

std::string bandwidth_table(const View& view) {
  const std::vector<std::string> entrants = view.ran();
  std::vector<std::string> head{view.how.cell_title};
  head.insert(head.end(), entrants.begin(), entrants.end());
  add_ratio_heads(head, entrants);
  HtmlTable table(head);
  for (const std::string& cell : view.cells()) {
    const TimingRow* ours = view.find(cell, "tessera");
    std::vector<std::string> line{ours != nullptr ? shape_cell(*ours) : escaped(cell)};
    for (const std::string& e : entrants) {
      const TimingRow* r = view.find(cell, e);
      if (r == nullptr || !r->ok()) {
        line.push_back(status_cell(r));
        continue;
      }
      std::string text = microseconds(r->median);
      if (r->graph > 0) text += " / " + microseconds(r->graph);
      line.push_back(figures_cell(text + format(" / {:.2f}", r->bandwidth() / 1e12)));
    }
    add_ratios(line, view, cell, entrants);
    table.row(line);
  }
  const std::string through = served_through(view);
  return format("<p class=\"soft\">{}{}</p>", escaped(view.how.caption),
                through.empty() ? "" : " Tessera ran " + escaped(through) + " op.") +
         table.done();
}

std::string bench_bandwidth_table(const Presentation& how, const std::vector<TimingRow>& bench) {
  HtmlTable table({how.label, "median, us", "GB/s", "of the measured copy"});
  bool any = false;
  for (const TimingRow& r : bench) {
    if (!how.takes(r) || !r.ok()) continue;
    any = true;
    table.row({shape_cell(r), microseconds(r.median), format("{:.0f}", r.bandwidth() / 1e9),
               format("{:.0f} %", 100 * r.part_of_ceiling)});
  }
  return any ? "<p></p>" + table.done() : "";
}

// Names of the fields that any of the rows has, in the order of their first appearance.
template <class Rows>
std::vector<std::string> field_names(const Rows& rows) {
  std::vector<std::string> names;
  for (const TimingRow& r : rows) {
    for (auto at = r.fields.begin(); at != r.fields.end(); ++at) {
      if (std::find(names.begin(), names.end(), at.key()) == names.end()) names.push_back(at.key());
    }
  }
  return names;
}

// "tokens per s": a title can be broken at spaces.
std::string title_of(std::string field) {
  std::replace(field.begin(), field.end(), '_', ' ');
  return field;
}
void add_titles(std::vector<std::string>& head, const std::vector<std::string>& fields) {
  for (const std::string& field : fields) head.push_back(title_of(field));
}

void add_fields(std::vector<std::string>& line, const TimingRow& row, const std::vector<std::string>& names) {
  for (const std::string& name : names) {
    const std::string text = field_text(row.fields, name);
    line.push_back(text.find(' ') == std::string::npos ? escaped(text) : figures_cell(text));  // a list may be broken
  }
}

// "12.3 / 456.7 / 1.23": microseconds, TFLOP/s and TB/s; "-" for what was not counted.
std::string speed_text(const TimingRow& r) {
  return format("{} / {} / {}", microseconds(r.median), r.flops > 0 ? format("{:.1f}", r.rate() / 1e12) : "-",
                r.bytes > 0 ? format("{:.2f}", r.bandwidth() / 1e12) : "-");
}

// Of the entrants that are deterministic, or of the others: all of them are too wide for one table.
std::string plain_table(const View& view, bool deterministic) {
  std::vector<std::string> entrants = view.ran();
  std::erase_if(entrants, [&](const std::string& e) { return is_deterministic(e) != deterministic; });
  if (entrants.empty()) return {};
  // Words for the shape say what the fields do.
  const bool has_words =
      std::all_of(view.rows.begin(), view.rows.end(), [](const TimingRow& r) { return shape_text(r) != r.cell; });
  const std::vector<std::string> fields = has_words ? std::vector<std::string>() : field_names(view.rows);
  std::vector<std::string> head{has_words ? (deterministic ? "deterministic " : "") + view.how.label : "cell"};
  add_titles(head, fields);
  head.insert(head.end(), entrants.begin(), entrants.end());
  add_ratio_heads(head, entrants);
  HtmlTable table(head);
  for (const std::string& cell : view.cells()) {
    const auto first = std::find_if(view.rows.begin(), view.rows.end(), [&](const auto& r) { return r.cell == cell; });
    std::vector<std::string> line{has_words ? shape_cell(*first) : escaped(cell)};
    add_fields(line, *first, fields);
    for (const std::string& e : entrants) {
      const TimingRow* r = view.find(cell, e);
      line.push_back(r != nullptr && r->ok() ? figures_cell(speed_text(*r)) : status_cell(r));
    }
    add_ratios(line, view, cell, entrants);
    table.row(line);
  }
  return table.done();
}

// Takes the fields that all rows share out of `fields`, since a table with all of them is too wide, and says what they are.
std::string take_shared(std::vector<std::string>& fields, const std::vector<TimingRow>& rows) {
  if (rows.size() < 2) return {};
  std::string told;
  std::erase_if(fields, [&](const std::string& name) {
    const std::string text = field_text(rows.front().fields, name);
    const bool shared =
        std::all_of(rows.begin(), rows.end(), [&](const TimingRow& r) { return field_text(r.fields, name) == text; });
    if (shared) told += format("{}{}: {}", told.empty() ? "" : ", ", title_of(name), text);
    return shared;
  });
  return told.empty() ? "" : format("<p class=\"soft\">In all rows: {}.</p>", escaped(told));
}

std::string plain_bench_table(const std::vector<TimingRow>& rows) {
  std::vector<std::string> fields = field_names(rows);
  const std::string shared = take_shared(fields, rows);
  constexpr std::size_t kMostFields = 6;  // more are too wide, and the name says them, too
  if (fields.size() > kMostFields) fields.clear();
  std::vector<std::string> head{"case in tessera bench"};
  add_titles(head, fields);
  for (const char* title : {"us / TFLOP/s / TB/s", "p95, us", "of the ceiling"}) head.emplace_back(title);
  HtmlTable table(head);
  for (const TimingRow& r : rows) {
    std::vector<std::string> line{long_cell(r.cell)};
    add_fields(line, r, fields);
    if (r.ok()) {
      line.insert(line.end(),
                  {figures_cell(speed_text(r)), microseconds(r.p95), format("{:.0f} %", 100 * r.part_of_ceiling)});
    } else {
      line.insert(line.end(), {status_cell(&r), "", ""});
    }
    table.row(line);
  }
  return "<p></p>" + shared + table.done();
}

}  // namespace

std::string served_through(const View& view) {
  std::set<std::string> ways;
  for (const TimingRow* r : view.ours()) {
    if (r->ok() && !r->detail.empty()) ways.insert(r->detail);
  }
  std::string text;
  for (const std::string& way : ways) text += (text.empty() ? "" : " and ") + way;
  return text;
}

std::string roofline_section(const Comparison& c, const RunRow& bench) {
  const Json ceilings = bench.facts.value("ceilings", Json::object());
  const double bandwidth = number_at(ceilings, "copy_bytes_per_s");
  std::vector<std::pair<std::string, double>> peaks;
  for (auto at = ceilings.begin(); at != ceilings.end(); ++at) {
    if (at.value().is_number() && at.key() != "copy_bytes_per_s")
      peaks.emplace_back(at.key(), at.value().get<double>());
  }
  if (bandwidth == 0 || peaks.empty()) return {};
  const bool has_wgmma =
      std::any_of(peaks.begin(), peaks.end(), [](const auto& peak) { return peak.first.starts_with("wgmma"); });
  std::vector<std::string> families;
  for (const TimingRow& r : c.rows) {
    if (std::find(families.begin(), families.end(), r.family) == families.end()) families.push_back(r.family);
  }
  std::string out;
  for (const std::string& family : families) {
    const std::vector<std::string> entrants = entrants_of(c.rows, family);
    std::vector<Series> series;
    for (const std::string& entrant : entrants) {
      Series s{entrant, {}, false};
      for (const TimingRow& r : c.rows) {
        if (r.family != family || r.entrant != entrant || !r.ok() || r.bytes <= 0 || r.rate() <= 0) continue;
        s.points.emplace_back(r.flops / r.bytes, r.rate());
      }
      if (!s.points.empty()) series.push_back(std::move(s));
    }
    if (series.empty()) continue;
    if (families.size() > 1) out += "<h3>" + escaped(family) + "</h3>";
    out += legend_of(entrants) + "<div class=\"picture\">" + roofline_chart(series, bandwidth, peaks) + "</div>";
  }
  if (out.empty()) return out;
  return "<h2>Roofline</h2>" + out +
         format(
             "<p class=\"soft\">Each point is a shape. The ceilings were measured on this GPU by <code>tessera "
             "bench</code>: a copy at {:.2f} TB/s, and the tensor cores doing nothing but products through {}.</p>",
             bandwidth / 1e12,
             has_wgmma ? "mma.sync and through Hopper's wgmma"
                       : "mma.sync; points above are Hopper's wgmma, whose ceiling this record does not have");
}

std::string bandwidth_sections(const Comparison* c, const std::vector<TimingRow>& bench) {
  std::string out, section;
  for (const Presentation& how : presentations()) {
    if (how.form != Form::kBandwidth) continue;
    std::string tables;
    for (const View* view : c != nullptr ? c->of_form(Form::kBandwidth) : std::vector<const View*>()) {
      if (view->how.family == how.family && view->how.op == how.op) tables += bandwidth_table(*view);
    }
    tables += bench_bandwidth_table(how, bench);
    if (tables.empty()) continue;
    if (how.section != section) out += "<h2>" + escaped(how.section) + "</h2>";
    section = how.section;
    out += tables;
  }
  return out;
}

std::string plain_sections(const Comparison* c, const std::vector<TimingRow>& bench) {
  std::vector<View> views;
  if (c != nullptr) {
    for (const View* view : c->of_form(Form::kPlain)) views.push_back(*view);
  }
  // Cases of `tessera bench` whose op has a presentation are not listed one by one: the comparison has their shapes.
  std::vector<TimingRow> unpresented;
  for (const TimingRow& r : bench) {
    if (!is_presented(r.family, r.op)) unpresented.push_back(r);
  }
  std::vector<View> benches = views_of(unpresented);
  std::string out;
  std::string section;
  for (const View& view : views) {
    if (view.how.section != section) {
      section = view.how.section;
      out += "<h2>" + escaped(section) + "</h2><p class=\"soft\">Microseconds around the call / TFLOP/s / TB/s.</p>";
    } else {
      out += "<p></p>";
    }
    out += plain_table(view, false);
    if (const std::string table = plain_table(view, true); !table.empty()) out += "<p></p>" + table;
    for (View& b : benches) {
      if (b.how.family != view.how.family || b.how.op != view.how.op) continue;
      out += plain_bench_table(b.rows);
      b.rows.clear();
    }
  }
  for (const View& b : benches) {
    if (!b.rows.empty()) out += "<h2>" + escaped(b.how.section) + "</h2>" + plain_bench_table(b.rows);
  }
  return out;
}

std::string products_section(const History& history, const std::string& gpu) {
  const std::vector<RunRow> runs = history.runs("products", gpu);
  if (runs.empty()) return {};
  HtmlTable table({"operation and sizes", "unit", "Tessera", "PyTorch", "over PyTorch", "others"});
  for (const Json& row : runs.front().facts.value("products", Json::array())) {
    const std::string unit = text_at(row, "unit");
    const double work = number_at(row, "work");
    const auto figure = [&](double seconds) {
      if (unit == "us") return format("{:.1f}", seconds * 1e6);
      return format("{:.0f}", work / seconds / (unit == "TFLOP/s" ? 1e12 : 1e9));
    };
    double ours = 0, theirs = 0;
    std::string others;
    const Json entrants = row.value("entrants", Json::object());
    for (auto at = entrants.begin(); at != entrants.end(); ++at) {
      const double seconds = number_at(at.value(), "median_s");
      if (seconds <= 0) continue;
      if (at.key() == "tessera") ours = seconds;
      // PyTorch's best way: it may also be given rows that are padded.
      if (at.key().starts_with("pytorch")) theirs = theirs > 0 ? std::min(theirs, seconds) : seconds;
      if (at.key() != "tessera" && at.key() != "pytorch") {
        others += (others.empty() ? "" : ", ") + at.key() + " " + figure(seconds);
      }
    }
    const bool both = ours > 0 && theirs > 0;
    table.row({long_cell(text_at(row, "name")), escaped(unit), ours > 0 ? figure(ours) : "-",
               theirs > 0 ? figure(theirs) : "-", both ? ratio_cell(theirs / ours) : "-", long_cell(others)});
  }
  return format(
      "<h2>Products, MLPs, experts, losses and norms</h2><p class=\"soft\">{}. Beside PyTorch, whose best time counts: "
      "medians, each result compared with PyTorch's first. \"padded\" has room behind each row, \"1376\" is the same "
      "product with sizes that are multiples of 16, \"copy\" moves as many bytes as the op must.</p>{}",
      escaped(runs.front().date), table.done());
}

std::string training_section(const History& history, const std::string& gpu) {
  const std::vector<RunRow> runs = history.runs("training", gpu);
  if (runs.empty()) return {};
  const std::vector<TimingRow> rows = history.timings(runs.front().id);
  // Times of the stages, "mlp_ms", have a table of their own: both together are too wide.
  std::vector<std::string> fields = field_names(rows), stages;
  for (const std::string& name : fields) {
    if (name.ends_with("_ms")) stages.push_back(name);
  }
  std::erase_if(fields, [](const std::string& name) { return name.ends_with("_ms"); });
  const auto table_of = [&](const std::vector<std::string>& names) {
    std::vector<std::string> head{"row", "ms"};
    add_titles(head, names);
    HtmlTable table(head);
    for (const TimingRow& r : rows) {
      std::vector<std::string> line{escaped(r.cell), r.ok() ? format("{:.2f}", r.median * 1e3) : status_cell(&r)};
      add_fields(line, r, names);
      table.row(line);
    }
    return table.done();
  };
  return "<h2>Training steps</h2><p class=\"soft\">" + escaped(runs.front().date) +
         ". Milliseconds of a whole step (forward, backward, clipping, optimizer) of a transformer neural process: "
         "medians. A row is the model's size and what of it Tessera computes: sdpa is PyTorch alone, with the "
         "attention of "
         "FlashAttention-2 or cuDNN; attention, mlp, mixture and norms replace that part, all replaces them together; "
         "speedup is over sdpa-cudnn. The stages were timed by themselves, forward and backward, and summed over the "
         "layers.</p><div class=\"tables\">" +
         table_of(fields) + (stages.empty() ? "" : table_of(stages)) + "</div>";
}

}  // namespace tessera::results
