// One measured time, and how the result files spell it.
//
// A row names its family, its op and its fields; no family has columns of its own. Files written before rows had
// "fields" hold attention's dimensions at the row's top level, and they are read too.
#pragma once

#include <string>
#include <vector>

#include "results/json.h"

namespace tessera::results {

struct TimingRow {
  std::string family;             // "attention"
  std::string op;                 // "forward": without the family's name
  std::string cell;               // the case's name, unique within family, op and entrant
  std::string entrant;            // "tessera", "tessera-det", or a peer's name
  std::string status;             // "ok", "wrong", "refused", "failed"
  std::string detail;             // why it is not ok; if a decode step is ok, which op ran it
  Json fields = Json::object();   // {"dtype": "bf16", "batch": 8, "seq_q": 2048, ...}
  std::vector<std::string> tags;  // suites the cell belongs to: "table", "small", ...
  double median = 0, p05 = 0, p95 = 0, p99 = 0, graph = 0, host = 0;  // seconds; 0: not measured
  double flops = 0, bytes = 0, unfused_bytes = 0;                     // of one call
  double error = 0;                                                   // divided by the allowed error
  double part_of_ceiling = 0;

  bool ok() const { return status == "ok"; }
  double rate() const { return median > 0 ? flops / median : 0; }
  double bandwidth() const { return median > 0 ? bytes / median : 0; }
  bool has_tag(const std::string& tag) const;
};

// A field's value for people: strings without quotes, everything else as JSON; "" if it is absent.
std::string field_text(const Json& fields, const std::string& name);

// A row of peers.json: one TimingRow per entrant.
std::vector<TimingRow> timings_of_peers_row(const Json& row);

// A case of bench.json or evidence.json.
TimingRow timing_of_bench_case(const Json& row);

}  // namespace tessera::results
