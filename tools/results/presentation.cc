#include "results/presentation.h"

#include <algorithm>
#include <cstdint>
#include <map>

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
          "TFLOP/s of useful work on 16,384 tokens, by head dim D and sequence length S: medians with L2 flushed, "
          "entrants in round-robin order. Each point "
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

  Presentation other{.family = "attention",
                     .op = "forward",
                     .tag = "odd",
                     .form = Form::kPlain,
                     .label = "forward, other shapes",
                     .section = "Other shapes"};
  list.push_back(other);
  other.op = "backward";
  other.label = "backward, other shapes";
  list.push_back(other);

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

std::string with_commas(std::int64_t n) {
  std::string text = std::to_string(n);
  for (auto at = static_cast<std::ptrdiff_t>(text.size()) - 3; at > 0; at -= 3) {
    text.insert(static_cast<std::size_t>(at), ",");
  }
  return text;
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

std::string shape_text(const TimingRow& row) {
  const auto number = [&](const char* name) -> std::int64_t {
    const auto at = row.fields.find(name);
    return at != row.fields.end() && at->is_number_integer() ? at->get<std::int64_t>() : 0;
  };
  const std::int64_t batch = number("batch"), queries = number("seq_q"), keys = number("seq_k");
  const std::int64_t heads = number("heads_q"), heads_kv = number("heads_kv"), dim = number("dim_qk");
  if (row.family != "attention" || batch == 0 || queries == 0 || keys == 0 || heads == 0 || dim == 0) return row.cell;
  const auto count = [](std::int64_t n, const std::string& one) {
    return with_commas(n) + " " + one + (n == 1 ? "" : "s");
  };
  const std::string dtype = field_text(row.fields, "dtype");
  std::string text = (dtype == "bf16" ? "" : dtype + ", ") + count(batch, "sequence");
  if (queries == keys) {
    text += " of " + count(keys, "token");
  } else {
    text += ", " + (queries == 1 ? "one query" : with_commas(queries) + " queries") + " on " + count(keys, "key");
  }
  text += heads_kv == heads ? ", " + count(heads, "head") : ", " + count(heads, "query head");
  text += " of " + std::to_string(dim);
  if (heads_kv != heads) text += " on " + count(heads_kv, "KV head");
  if (number("dim_v") != dim) text += ", values of " + std::to_string(number("dim_v"));
  if (row.fields.value("causal", false)) text += ", causal";
  // What else sets the case apart is in its name: "dec/bf16/b1_.../page16+lens7,9".
  const std::string last = row.cell.substr(row.cell.rfind('/') + 1);
  const bool is_shape = row.cell.find('/') == std::string::npos || last.find("_h") != std::string::npos;
  for (std::size_t at = 0; !is_shape && at < last.size();) {
    const std::size_t end = std::min(last.find('+', at), last.size());
    const std::string part = last.substr(at, end - at);
    if (!part.starts_with("causal")) text += ", " + part;
    at = end + 1;
  }
  return text;
}

std::string entrant_text(const std::string& entrant) {
  static const std::map<std::string, std::string> known{
      {"tessera", "Tessera"},
      {"tessera-det", "Tessera with gradients that are bitwise equal from run to run"},
      {"fa2", "FlashAttention-2, through PyTorch's scaled_dot_product_attention"},
      {"fa2-det", "FlashAttention-2 with torch.use_deterministic_algorithms"},
      {"cudnn", "cuDNN, through PyTorch's scaled_dot_product_attention"},
      {"cudnn-det", "cuDNN with torch.use_deterministic_algorithms"},
      {"efficient", "memory-efficient attention, through PyTorch's scaled_dot_product_attention"},
      {"math", "matrix products and a softmax of their own, unfused, in PyTorch"},
      {"flex", "PyTorch's FlexAttention, compiled"},
      {"fa3", "FlashAttention-3"},
      {"fa3-det", "FlashAttention-3 with its deterministic backward"},
      {"fa4", "FlashAttention-4"},
      {"fa4-det", "FlashAttention-4 with its deterministic backward"},
      {"flash_attn", "the flash_attn package"},
      {"flashinfer", "FlashInfer"},
      {"cublas", "cuBLAS, through PyTorch"}};
  const auto at = known.find(entrant);
  return at != known.end() ? at->second : "";
}

std::string entrant_name(const std::string& entrant) {
  const std::string text = entrant_text(entrant);
  return text.empty() ? entrant : text.substr(0, std::min(text.find(','), text.find(" with ")));
}

const std::vector<std::string>& hostile_kinds() {
  static const std::vector<std::string> kinds{"logits_120", "logits_1e4", "logits_1e10", "logits_minus_120",
                                              "one_hot",    "constant",   "huge_values"};
  return kinds;
}

}  // namespace tessera::results
