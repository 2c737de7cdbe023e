// Charts as SVG text. chart_style() gives their classes the colours of the light and of the dark theme.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace tessera::results {

// CSS of the charts: colours of the series s0, s1, ..., axes and text.
std::string chart_style();
// The class of an entrant's series: a name has the same one in every chart.
std::string series_class(const std::string& entrant);

struct Series {
  std::string name;
  std::vector<std::pair<double, double>> points;  // x, y
  bool dashed = false;
};

// x (positive) on a scale of powers of two, y from 0 up. Every point shows its value as a tooltip.
std::string line_chart(const std::string& title, const std::string& x_title, const std::string& unit,
                       const std::vector<Series>& series);

// How much faster we are than a peer at one op, over all its shapes.
struct RatioBar {
  std::string label;  // "forward, over cudnn"
  std::string peer;   // its colour
  double mean, least, most;
  std::string note;  // behind the bar
};
// One bar per line, from 1 to the mean, with a line from the least to the most; on a logarithmic scale.
std::string ratio_chart(const std::vector<RatioBar>& bars);

// Log-log: operations per second over operations per byte, below the ceilings given by the bandwidth in bytes per
// second and by each peak in operations per second. Points are positive.
std::string roofline_chart(const std::vector<Series>& series, double bandwidth,
                           const std::vector<std::pair<std::string, double>>& peaks);

// The charts side by side in one SVG file that contains its style.
std::string picture_of(const std::vector<std::string>& charts, const std::vector<std::string>& legend);

std::string legend_of(const std::vector<std::string>& entrants);  // HTML

}  // namespace tessera::results
