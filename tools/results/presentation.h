// How the report shows the rows of a family's op. The table in presentation.cc is all that the report knows about a
// family. Rows that no entry takes are shown in a plain table with all their fields, so a new family needs no entry.
#pragma once

#include <string>
#include <vector>

#include "results/timing.h"

namespace tessera::results {

enum class Form {
  kCharts,     // speed over `x`, one chart per group; ratios as a table of groups by x
  kLatency,    // microseconds of every entrant
  kBandwidth,  // microseconds and bytes per second of every entrant, then the op's cases in `tessera bench`
  kPlain,      // one line per cell with all its fields: for rows that no entry takes
};

struct Axis {
  std::string field;   // "seq_k"
  std::string title;   // "sequence length"
  std::string symbol;  // "S", as in "S = 512"
};

// A field whose values separate charts.
struct Group {
  std::string field;
  std::string symbol = {};  // numbers: "D", as in "D = 128"
  std::string yes = {};     // booleans: the text for true ...
  std::string no = {};      // ... and for false
};

struct Presentation {
  // Which rows: those of this family and op that carry the tag and have the fields below. An empty tag takes any.
  std::string family;
  std::string op;
  std::string tag = {};

  Form form = Form::kPlain;
  std::string label = {};    // the op, in tables and titles: "forward"
  std::string section = {};  // the heading; entries with the same one share a section
  std::string caption = {};  // below the heading

  // kCharts
  Axis x = {};
  std::vector<Group> groups = {};
  Json bytes_where = Json::object();    // "Bytes moved" lists the rows with these values
  Json picture_where = Json::object();  // README's picture draws the rows with these values
  std::string shapes = {};              // README: "16,384 tokens", as in "32 shapes of 16,384 tokens"

  // kBandwidth
  std::string cell_title = {};      // "one query"
  std::string readme_caption = {};  // README: the sentence before the table, without its colon

  bool takes(const TimingRow& row) const;
  // True if ratios to the peers are summed up. Latencies of small shapes are not: the host's part dominates them.
  bool compared() const { return form != Form::kLatency; }
};

const std::vector<Presentation>& presentations();

// True if an entry shows this family's op, whatever the tag.
bool is_presented(const std::string& family, const std::string& op);

// The entry for rows that none of presentations() takes.
Presentation plain_presentation(const std::string& family, const std::string& op);

// "forward", or "gemm grouped" for an op without an entry.
std::string op_label(const std::string& family, const std::string& op);

// True if the row's fields have all of these values.
bool matches(const TimingRow& row, const Json& values);

// "D = 128", "causal"
std::string group_text(const Group& group, const Json& value);

// "32 sequences of 512 tokens, 8 heads of 64, causal"; the cell's name if the family has no words for its shapes.
std::string shape_text(const TimingRow& row);

// What an entrant is: "cuDNN, through PyTorch's scaled_dot_product_attention"; empty for a name that is not known.
std::string entrant_text(const std::string& entrant);
// "cuDNN"
std::string entrant_name(const std::string& entrant);

// Kinds of hostile inputs that end a case's name: "logits_1e4", "one_hot", ...
const std::vector<std::string>& hostile_kinds();

}  // namespace tessera::results
