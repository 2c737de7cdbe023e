#include "results/presentation.h"

#include <algorithm>

namespace tessera::results {
namespace {

void add_attention(std::vector<Presentation>& list) {
  Presentation speed{
      .family = "attention",
      .op = "forward",
      .tag = "table",
      .form = Form::kCharts,
      .label = "forward",
      .section = "Speed by sequence length",
      .caption =
          "TFLOP/s of useful work on 16,384 tokens: medians with L2 flushed, entrants in round-robin order. Each point "
          "shows its value.",
      .x = {"seq_k", "sequence length", "S"},
      .groups = {{.field = "dim_qk", .symbol = "D"}, {.field = "causal", .yes = "causal", .no = "no mask"}},
      .bytes_where = {{"dim_qk", 128}, {"causal", false}},
      .picture_where = {{"causal", true}},
      .shapes = "16,384 tokens"};
  list.push_back(speed);
  speed.op = speed.label = "backward";
  list.push_back(speed);

  Presentation small{.family = "attention",
                     .op = "forward",
                     .tag = "small",
                     .form = Form::kLatency,
                     .label = "forward",
                     .section = "Small shapes",
                     .caption = "Time around the call / replayed from a graph / host time of the call."};
  list.push_back(small);
  small.op = small.label = "backward";
  list.push_back(small);

  list.push_back({.family = "attention",
                  .op = "decode",
                  .form = Form::kBandwidth,
                  .label = "decode",
                  .section = "Decode bandwidth",
                  .caption =
                      "Microseconds around the call with L2 flushed / replayed from a graph without a flush / TB/s "
                      "of the first, with K and V counted once.",
                  .cell_title = "one query",
                  .readme_caption = "Decode, one query, microseconds around the call and TB/s with K and V read once"});
}

}  // namespace

bool Presentation::takes(const TimingRow& row) const {
  if (row.family != family || row.op != op || (!tag.empty() && !row.has_tag(tag))) return false;
  if (!x.field.empty()) {
    const auto at = row.fields.find(x.field);
    if (at == row.fields.end() || !at->is_number() || at->get<double>() <= 0) return false;
  }
  return std::all_of(groups.begin(), groups.end(), [&](const Group& g) { return row.fields.contains(g.field); });
}

const std::vector<Presentation>& presentations() {
  static const std::vector<Presentation> table = [] {
    std::vector<Presentation> list;
    add_attention(list);
    return list;
  }();
  return table;
}

bool is_presented(const std::string& family, const std::string& op) {
  const auto& table = presentations();
  return std::any_of(table.begin(), table.end(),
                     [&](const Presentation& p) { return p.family == family && p.op == op; });
}

Presentation plain_presentation(const std::string& family, const std::string& op) {
  std::string label = op.empty() || op == family ? family : family + " " + op;
  return {.family = family, .op = op, .form = Form::kPlain, .label = label, .section = label};
}

std::string op_label(const std::string& family, const std::string& op) {
  for (const Presentation& p : presentations()) {
    if (p.family == family && p.op == op) return p.label;
  }
  return plain_presentation(family, op).label;
}

bool matches(const TimingRow& row, const Json& values) {
  for (auto at = values.begin(); at != values.end(); ++at) {
    const auto found = row.fields.find(at.key());
    if (found == row.fields.end() || *found != at.value()) return false;
  }
  return true;
}

std::string group_text(const Group& group, const Json& value) {
  if (value.is_boolean()) {
    const std::string& text = value.get<bool>() ? group.yes : group.no;
    if (!text.empty()) return text;
  }
  const std::string text = value.is_string() ? value.get<std::string>() : value.dump();
  return (group.symbol.empty() ? group.field : group.symbol) + " = " + text;
}

const std::vector<std::string>& hostile_kinds() {
  static const std::vector<std::string> kinds{"logits_120", "logits_1e4", "logits_1e10", "logits_minus_120",
                                              "one_hot",    "constant",   "huge_values"};
  return kinds;
}

}  // namespace tessera::results
