// A comparison with peers, cut into the parts that the report shows, and Tessera's speed as a ratio to each peer's.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "results/history.h"
#include "results/presentation.h"

namespace tessera::results {

bool is_ours(const std::string& entrant);  // "tessera", "tessera-det"
// "cudnn-det": gradients that are bitwise equal from run to run.
bool is_deterministic(const std::string& entrant);
// Which of ours a peer is compared with.
std::string ours_beside(const std::string& peer);

// The rows that one presentation takes.
struct View {
  Presentation how;
  std::vector<TimingRow> rows;
  std::vector<std::string> entrants;  // all of the family's, in the order of the file

  std::vector<std::string> peers() const;  // entrants that are not ours
  std::vector<std::string> ran() const;    // entrants that have a row here
  std::vector<std::string> cells() const;  // each once, in the order of the file
  const TimingRow* find(const std::string& cell, const std::string& entrant) const;
  std::vector<const TimingRow*> ours() const;  // the rows of "tessera"
};

// Views in the order of presentations(), then one for each family and op whose rows none of those takes. Views without
// rows are left out.
std::vector<View> views_of(const std::vector<TimingRow>& rows);

struct Comparison {
  RunRow run;
  std::vector<TimingRow> rows;
  std::vector<View> views;

  std::vector<const View*> of_form(Form form) const;
};

Comparison comparison_of(const History& history, const RunRow& run);
std::optional<Comparison> newest_comparison(const History& history, const std::string& gpu);

// Entrants of the rows, in the order of the file; an empty family selects all rows.
std::vector<std::string> entrants_of(const std::vector<TimingRow>& rows, const std::string& family);

struct Ratio {
  std::string cell;
  double value = 0;  // the peer's time divided by ours
};

constexpr const char* kBest = "best";  // as a peer: the fastest of those whose result was right

// Cells that both computed right.
std::vector<Ratio> ratios(const View& view, const std::string& ours, const std::string& peer);

// The view's peers, and kBest if there are several.
std::vector<std::string> rivals(const View& view);

struct Summary {
  double mean = 0, least = 0, most = 0;  // geometric mean, minimum and maximum
  std::string worst;                     // the cell of the minimum
  int losses = 0, cells = 0;
};
Summary summary_of(const std::vector<Ratio>& list);

}  // namespace tessera::results
