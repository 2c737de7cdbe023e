// Pieces of HTML that the report's sections share.
#pragma once

#include <string>
#include <vector>

#include "results/timing.h"

namespace tessera::results {

std::string escaped(const std::string& text);  // for HTML and SVG

// The page's own CSS. Charts bring theirs.
std::string page_style();

// A table; cells may hold markup, and one that begins with "<td" replaces its whole element.
class HtmlTable {
 public:
  explicit HtmlTable(const std::vector<std::string>& head);
  void row(const std::vector<std::string>& cells);
  std::string done() const { return text_ + "</tbody></table></div>"; }

 private:
  std::string text_;
};

// The row's shape in words, with its name as a tooltip.
std::string shape_cell(const TimingRow& row);
// "12.3 / 456.7 / 1.23", which may be broken at its slashes.
std::string figures_cell(const std::string& text);
// Text that may be long: it is broken into lines.
std::string long_cell(const std::string& text, const char* style = "");

// A ratio on a background that is green above 1 and red below it, stronger further away. Losses are framed.
std::string ratio_cell(double ratio);

// A count that is red unless it is 0.
std::string failures_cell(int count);

// Why a cell has no time; null means that the entrant did not run it.
std::string status_cell(const TimingRow* row);

std::string microseconds(double seconds);  // "12.3"
std::string bytes_text(double bytes);      // "3.4 MB"

}  // namespace tessera::results
