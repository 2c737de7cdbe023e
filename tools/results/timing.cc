#include "results/timing.h"

#include <algorithm>

namespace tessera::results {
namespace {

// Files without "family" hold attention alone.
std::string family_of(const Json& row) {
  const std::string family = text_at(row, "family");
  return family.empty() ? "attention" : family;
}

// bench.json writes "attention_forward", peers.json "forward".
std::string op_of(const Json& row, const std::string& family) {
  const std::string op = text_at(row, "op");
  return op.starts_with(family + "_") ? op.substr(family.size() + 1) : op;
}

std::vector<std::string> tags_of(const Json& row) {
  std::vector<std::string> tags;
  for (const Json& tag : row.value("tags", Json::array())) {
    if (tag.is_string()) tags.push_back(tag.get<std::string>());
  }
  return tags;
}

void set_work(TimingRow& t, const Json& row) {
  t.flops = number_at(row, "flops");
  t.bytes = number_at(row, "bytes");
  t.unfused_bytes = number_at(row, "unfused_bytes");
}

void set_times(TimingRow& t, const Json& measured) {
  t.median = number_at(measured, "median_s");
  t.p05 = number_at(measured, "p05_s");
  t.p95 = number_at(measured, "p95_s");
  t.p99 = number_at(measured, "p99_s");
  t.graph = number_at(measured, "graph_s");
  t.host = number_at(measured, "host_s");
  t.error = number_at(measured, "error_over_allowed");
  t.part_of_ceiling = number_at(measured, "part_of_ceiling");
}

// The older form of peers.json: batch, seq, heads, dim and causal at the top level, and "small" instead of tags.
Json older_peers_fields(const Json& row) {
  const auto value = [&](const char* key) { return row.value(key, Json(0)); };
  return {{"dtype", text_at(row, "dtype")},
          {"batch", value("batch")},
          {"seq_q", text_at(row, "op") == "decode" ? Json(1) : value("seq")},
          {"seq_k", value("seq")},
          {"heads_q", value("heads")},
          {"heads_kv", row.contains("heads_kv") ? value("heads_kv") : value("heads")},
          {"dim_qk", value("dim")},
          {"dim_v", value("dim")},
          {"causal", flag_at(row, "causal")}};
}

std::string older_peers_tag(const Json& row) {
  if (text_at(row, "op") == "decode") return "decode";
  return flag_at(row, "small") ? "small" : "table";
}

// The older form of bench.json: the same names as today's fields, at the top level.
Json older_bench_fields(const Json& row) {
  Json fields = Json::object();
  for (const char* name : {"dtype", "batch", "seq_q", "seq_k", "heads_q", "heads_kv", "dim_qk", "dim_v", "causal"}) {
    if (row.contains(name)) fields[name] = row[name];
  }
  return fields;
}

}  // namespace

bool TimingRow::has_tag(const std::string& tag) const { return std::find(tags.begin(), tags.end(), tag) != tags.end(); }

std::string field_text(const Json& fields, const std::string& name) {
  const auto at = fields.find(name);
  if (at == fields.end() || at->is_null()) return "";
  return at->is_string() ? at->get<std::string>() : at->dump();
}

std::vector<TimingRow> timings_of_peers_row(const Json& row) {
  TimingRow t;
  t.family = family_of(row);
  t.op = op_of(row, t.family);
  t.cell = text_at(row, "cell");
  if (row.contains("fields")) {
    t.fields = row["fields"];
    t.tags = tags_of(row);
  } else {
    t.fields = older_peers_fields(row);
    t.tags = {older_peers_tag(row)};
  }
  set_work(t, row);
  std::vector<TimingRow> list;
  const Json entrants = row.value("entrants", Json::object());
  for (auto at = entrants.begin(); at != entrants.end(); ++at) {
    const Json& measured = at.value();
    t.entrant = at.key();
    t.status = text_at(measured, "status");
    t.detail = text_at(measured, "detail");
    if (const std::string op = text_at(measured, "through"); !op.empty()) t.detail = "through the " + op;
    set_times(t, measured);
    list.push_back(t);
  }
  return list;
}

TimingRow timing_of_bench_case(const Json& row) {
  TimingRow t;
  t.family = family_of(row);
  t.op = op_of(row, t.family);
  t.cell = text_at(row, "name");
  t.entrant = "tessera";
  t.fields = row.contains("fields") ? row["fields"] : older_bench_fields(row);
  t.tags = tags_of(row);
  set_work(t, row);
  set_times(t, row);
  t.detail = row.contains("wrong") ? text_at(row, "wrong") : text_at(row, "refused");
  t.status = row.contains("wrong") ? "wrong" : row.contains("refused") ? "refused" : "ok";
  return t;
}

}  // namespace tessera::results
