#include "results/charts.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>

#include "base/format.h"
#include "results/html.h"

namespace tessera::results {
namespace {

constexpr double kWidth = 330, kHeight = 220, kLeft = 42, kRight = 10, kTop = 26, kBottom = 30;

// The area between the axes, and the two scales that map values onto it.
struct Frame {
  double x_min, x_max, y_min, y_max;
  double width = kWidth, height = kHeight;
  double x(double v) const { return kLeft + (v - x_min) / (x_max - x_min) * (width - kLeft - kRight); }
  double y(double v) const { return height - kBottom - (v - y_min) / (y_max - y_min) * (height - kTop - kBottom); }
};

// 1, 2 or 5 times a power of ten, so that the range has about four steps.
double step_for(double range) {
  const double raw = range / 4;
  const double power = std::pow(10, std::floor(std::log10(raw)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= raw) return factor * power;
  }
  return 10 * power;
}

std::string short_number(double v) {
  if (v >= 1024 && std::fmod(v, 1024) == 0) return format("{:.0f}k", v / 1024);
  return format("{:g}", v);
}

std::string open_svg(double width, double height, const std::string& label) {
  return format("<svg class=\"chart\" viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"{}\">", width, height,
                escaped(label));
}

std::string grid_line(double x1, double y1, double x2, double y2) {
  return format("<line class=\"grid\" x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\"/>", x1, y1, x2, y2);
}

const char* dashes(const std::string& entrant) { return entrant.ends_with("-det") ? " dashed" : ""; }

std::string text_at(double x, double y, const char* anchor, const std::string& text, const char* style = "tick") {
  return format("<text class=\"{}\" x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\">{}</text>", style, x, y, anchor,
                escaped(text));
}

}  // namespace

std::string series_class(const std::string& entrant) {
  static const std::map<std::string, int> known{{"tessera", 0},   {"tessera-det", 1}, {"fa2", 2},       {"cudnn", 3},
                                                {"efficient", 4}, {"math", 5},        {"flex", 6},      {"fa3", 4},
                                                {"fa4", 7},       {"flash_attn", 2},  {"flashinfer", 6}};
  if (const auto at = known.find(entrant); at != known.end()) return format("s{}", at->second);
  // A peer's deterministic lines are dashed ones of its colour.
  if (entrant.ends_with("-det")) return series_class(entrant.substr(0, entrant.size() - 4));
  // Any other name takes one of the peers' colours, chosen by its letters alone.
  unsigned sum = 0;
  for (const char c : entrant) sum = sum * 31 + static_cast<unsigned char>(c);
  return format("s{}", 2 + sum % 6);
}

std::string chart_style() {
  constexpr const char* kLight[] = {"#d9480f", "#f08c00", "#1864ab", "#2b8a3e",
                                    "#5f3dc4", "#868e96", "#0b7285", "#a61e4d"};
  constexpr const char* kDark[] = {"#ff922b", "#ffd43b", "#4dabf7", "#69db7c",
                                   "#b197fc", "#adb5bd", "#3bc9db", "#f783ac"};
  const auto colours = [](const char* const(&list)[8]) {
    std::string text;
    for (int n = 0; n < 8; ++n) {
      text += format(".s{0}{{stroke:{1}}}.f{0}{{fill:{1}}}", n, list[n]);
    }
    return text;
  };
  return ".chart{width:100%;height:auto;font-family:system-ui,sans-serif}.grid{stroke:#d5d8dc;stroke-width:1}"
         ".tick{font-size:10px;fill:#5c636a}.big{font-size:12px}.title{font-size:12px;font-weight:600;fill:#212529}"
         ".line{fill:none;stroke-width:1.8}.dashed{stroke-dasharray:4 "
         "3}.roof{fill:none;stroke:#5c636a;stroke-width:1.5}" +
         colours(kLight) +
         "@media(prefers-color-scheme:dark){.grid{stroke:#343a40}.tick{fill:#adb5bd}.title{fill:#f1f3f5}"
         ".roof{stroke:#adb5bd}" +
         colours(kDark) + "}";
}

std::string line_chart(const std::string& title, const std::string& x_title, const std::string& unit,
                       const std::vector<Series>& series) {
  double x_min = 1e300, x_max = -1e300, y_max = 0;
  std::vector<double> columns;
  for (const Series& s : series) {
    for (const auto& [x, y] : s.points) {
      x_min = std::min(x_min, std::log2(x));
      x_max = std::max(x_max, std::log2(x));
      y_max = std::max(y_max, y);
      columns.push_back(x);
    }
  }
  std::string out = open_svg(kWidth, kHeight, title);
  out += text_at(kLeft - 34, 15, "start", title, "title");
  if (columns.empty()) return out + text_at(kWidth / 2, kHeight / 2, "middle", "nothing was measured") + "</svg>";
  if (x_max == x_min) x_max = x_min + 1;
  const Frame frame{x_min, x_max, 0, y_max * 1.08};
  const double step = step_for(frame.y_max);
  for (double v = 0; v <= frame.y_max; v += step) {
    out += grid_line(kLeft, frame.y(v), kWidth - kRight, frame.y(v));
    out += text_at(kLeft - 5, frame.y(v) + 3, "end", short_number(v));
  }
  std::sort(columns.begin(), columns.end());
  columns.erase(std::unique(columns.begin(), columns.end()), columns.end());
  for (const double x : columns) {
    out += text_at(frame.x(std::log2(x)), kHeight - kBottom + 14, "middle", short_number(x));
  }
  out += text_at(kWidth - kRight, kHeight - 3, "end", x_title + "; " + unit);
  for (const Series& s : series) {
    std::string path;
    for (const auto& [x, y] : s.points) {
      path += format("{}{:.1f},{:.1f}", path.empty() ? "" : " ", frame.x(std::log2(x)), frame.y(y));
    }
    const std::string colour = series_class(s.name);
    out += format("<polyline class=\"line {}{}\" points=\"{}\"/>", colour, s.dashed ? " dashed" : "", path);
    for (const auto& [x, y] : s.points) {
      out += format(
          "<circle class=\"f{}\" cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"2.6\"><title>{} at {}: {:.4g} {}</title></circle>",
          colour.substr(1), frame.x(std::log2(x)), frame.y(y), escaped(s.name), short_number(x), y, unit);
    }
  }
  return out + "</svg>";
}

std::string ratio_chart(const std::vector<RatioBar>& bars) {
  constexpr double kLine = 26, kBars = 490, kNotes = 260, kHead = 30;
  std::size_t longest = 0;
  for (const RatioBar& b : bars) longest = std::max(longest, b.label.size());
  const double labels = 40 + 7.2 * static_cast<double>(longest), wide = labels + kBars + kNotes;
  double least = 0.8, most = 1.25;
  for (const RatioBar& b : bars) {
    least = std::min(least, b.least);
    most = std::max(most, b.most);
  }
  const double low = std::log2(least), high = std::log2(most);
  const double height = kHead + kLine * static_cast<double>(bars.size()) + 6;
  const auto x_of = [&](double v) { return labels + (std::log2(v) - low) / (high - low) * kBars; };
  std::string out = open_svg(wide, height, "how many times as fast as each peer, by op");
  double last = -100;
  for (const double v : {0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0}) {
    if (v < least || v > most || x_of(v) - last < 34) continue;
    last = x_of(v);
    out += format("<line class=\"{}\" x1=\"{:.1f}\" y1=\"{}\" x2=\"{:.1f}\" y2=\"{}\"/>", v == 1 ? "roof" : "grid",
                  last, kHead - 8, last, height);
    out += text_at(last, 14, "middle", v == 1 ? "equal" : format("{:g}x", v));
  }
  out += text_at(labels - 10, 14, "end", "slower");
  for (std::size_t n = 0; n < bars.size(); ++n) {
    const RatioBar& b = bars[n];
    const double y = kHead + kLine * (static_cast<double>(n) + 0.5);
    const double from = std::min(x_of(1), x_of(b.mean)), to = std::max(x_of(1), x_of(b.mean));
    out += text_at(labels - 16, y + 4, "end", b.label, "title");
    out += format("<rect class=\"f{}\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"14\" opacity=\"0.75\"/>",
                  series_class(b.peer).substr(1), from, y - 7, std::max(to - from, 1.0));
    out += format("<line class=\"roof\" x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\"/>", x_of(b.least), y,
                  x_of(b.most), y);
    out += text_at(wide - kNotes + 12, y + 4, "start", b.note, "tick big");
  }
  return out + "</svg>";
}

std::string roofline_chart(const std::vector<Series>& series, double bandwidth,
                           const std::vector<std::pair<std::string, double>>& peaks) {
  constexpr double kWide = 900, kTall = 380;
  double top = 1, x_max = 100, x_min = 10, y_min = 1e300;
  for (const auto& peak : peaks) top = std::max(top, peak.second);
  for (const Series& s : series) {
    for (const auto& [x, y] : s.points) {
      x_max = std::max(x_max, x);
      x_min = std::min(x_min, x);
      y_min = std::min(y_min, y);
      top = std::max(top, y);
    }
  }
  if (y_min > top) y_min = top / 100;
  const Frame frame{std::floor(std::log10(x_min)),
                    std::ceil(std::log10(x_max)),
                    std::floor(std::log10(y_min)),
                    std::log10(top * 1.4),
                    kWide,
                    kTall};
  std::string out = open_svg(kWide, kTall, "roofline");
  for (double v = frame.x_min; v <= frame.x_max; v += 1) {
    out += grid_line(frame.x(v), kTop, frame.x(v), kTall - kBottom);
    const bool is_last = v + 1 > frame.x_max;
    out += text_at(frame.x(v), kTall - kBottom + 14, is_last ? "end" : "middle", format("{:g}", std::pow(10, v)));
  }
  for (double v = std::ceil(frame.y_min); v <= frame.y_max; v += 1) {
    out += grid_line(kLeft, frame.y(v), kWide - kRight, frame.y(v));
    out += text_at(kLeft - 5, frame.y(v) + 3, "end", format("{:g}", std::pow(10, v) / 1e12));
  }
  out += text_at(kWide - kRight, kTall - 3, "end", "operations per byte of compulsory traffic; TFLOP/s");
  for (const auto& [_, peak] : peaks) {
    std::string path;
    for (double v = frame.x_min; v <= frame.x_max + 1e-9; v += (frame.x_max - frame.x_min) / 120) {
      const double y = std::log10(std::min(peak, bandwidth * std::pow(10, v)));
      if (y >= frame.y_min) path += format("{:.1f},{:.1f} ", frame.x(v), frame.y(y));
    }
    out += format("<polyline class=\"roof\" points=\"{}\"/>", path);
  }
  // Ceilings so close that their names would overlap share a line: "mma.sync bf16, mma.sync fp16: 635 TFLOP/s".
  std::vector<std::pair<std::string, double>> sorted = peaks;
  std::sort(sorted.begin(), sorted.end(), [](const auto& a, const auto& b) { return a.second > b.second; });
  for (std::size_t n = 0; n < sorted.size();) {
    const double peak = sorted[n].second;
    std::string names = sorted[n].first;
    std::size_t next = n + 1;
    for (; next < sorted.size() && frame.y(std::log10(sorted[next].second)) - frame.y(std::log10(peak)) < 11; ++next) {
      names += ", " + sorted[next].first;
    }
    out += text_at(kLeft + 8, frame.y(std::log10(peak)) - 4, "start", format("{}: {:.0f} TFLOP/s", names, peak / 1e12),
                   "tick big");
    n = next;
  }
  for (const Series& s : series) {
    for (const auto& [x, y] : s.points) {
      out += format(
          "<circle class=\"f{}\" cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3\" opacity=\"0.8\"><title>{}: {:.0f} TFLOP/s at "
          "{:.0f} "
          "operations per byte</title></circle>",
          series_class(s.name).substr(1), frame.x(std::log10(x)), frame.y(std::log10(y)), escaped(s.name), y / 1e12, x);
    }
  }
  return out + "</svg>";
}

std::string picture_of(const std::vector<std::string>& charts, const std::vector<std::string>& legend) {
  constexpr std::size_t kAcross = 2;
  const std::size_t rows = (charts.size() + kAcross - 1) / kAcross;
  const double width = kAcross * kWidth, height = static_cast<double>(rows) * kHeight + 26;
  std::string out = format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" width=\"{0}\" "
      "height=\"{1}\"><style>{2}</style>",
      width, height, chart_style());
  double at = 12;
  for (const std::string& name : legend) {
    out += format("<line class=\"line {}{}\" x1=\"{}\" y1=\"13\" x2=\"{}\" y2=\"13\"/>", series_class(name),
                  dashes(name), at, at + 18);
    out += text_at(at + 23, 17, "start", name, "title");
    at += 40 + 8.0 * static_cast<double>(name.size());
  }
  for (std::size_t n = 0; n < charts.size(); ++n) {
    // Each chart is an <svg> element: a position and a size place it.
    std::string chart = charts[n];
    const std::size_t column = n % kAcross, row = n / kAcross;
    const std::string place =
        format("<svg x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" ", static_cast<double>(column) * kWidth,
               26 + static_cast<double>(row) * kHeight, kWidth, kHeight);
    chart.replace(0, std::string("<svg class=\"chart\" ").size(), place);
    out += chart;
  }
  return out + "</svg>\n";
}

std::string legend_of(const std::vector<std::string>& entrants) {
  std::string out = "<p class=\"legend\">";
  for (const std::string& name : entrants) {
    out += format(
        "<span><svg viewBox=\"0 0 20 10\" width=\"20\" height=\"10\" aria-hidden=\"true\"><line class=\"line "
        "{}{}\" x1=\"0\" y1=\"5\" x2=\"20\" y2=\"5\"/></svg> {}</span> ",
        series_class(name), dashes(name), escaped(name));
  }
  return out + "</p>";
}

}  // namespace tessera::results
