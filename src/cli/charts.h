// Charts as SVG text, drawn with classes that chart_style() colours in light and dark.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace tessera::cli {

std::string escaped(const std::string& text);  // for HTML and SVG

// CSS for charts: colours of series s0, s1, ..., axes and text.
std::string chart_style();
// The class of an entrant's series; the same for one name in every chart.
std::string series_class(const std::string& entrant);

struct Series {
  std::string name;
  std::vector<std::pair<double, double>> points;  // x, y
  bool dashed = false;
};

// x on a scale of powers of two, y from 0 up. Every point has its value as a tooltip.
std::string line_chart(const std::string& title, const std::string& unit, const std::vector<Series>& series);

// log-log: operations a byte against operations a second, under the roof of the two ceilings (bytes and operations a
// second).
std::string roofline_chart(const std::vector<Series>& series, double bandwidth,
                           const std::vector<std::pair<std::string, double>>& peaks);

// Side by side in one picture of its own, with its style inside.
std::string picture_of(const std::vector<std::string>& charts, const std::vector<std::string>& legend);

std::string legend_of(const std::vector<std::string>& entrants);  // HTML

}  // namespace tessera::cli
