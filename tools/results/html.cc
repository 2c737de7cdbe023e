#include "results/html.h"

#include <algorithm>
#include <cmath>

#include "base/format.h"
#include "results/presentation.h"

namespace tessera::results {

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

std::string page_style() {
  return ":root{color-scheme:light "
         "dark;--back:#fff;--ink:#212529;--soft:#5c636a;--edge:#d5d8dc;--good:#2b8a3e;--bad:#c92a2a;"
         "--band:#f1f3f5}"
         "@media(prefers-color-scheme:dark){:root{--back:#16181b;--ink:#f1f3f5;--soft:#adb5bd;--edge:#343a40;"
         "--good:#69db7c;--bad:#ff8787;--band:#212529}}"
         "*{box-sizing:border-box}body{margin:0 auto;max-width:1680px;padding:16px 24px;background:var(--back);"
         "color:var(--ink);font:15px/1.5 system-ui,sans-serif}h1{font-size:1.5rem}h2{font-size:1.2rem;"
         "margin-top:2.2em;border-bottom:1px solid "
         "var(--edge)}h3{font-size:1rem}p,li{max-width:75ch}.soft,figcaption{color:var(--soft)}"
         ".charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(max(min(260px,100%),23%),1fr));gap:10px}"
         ".tables{display:flex;flex-wrap:wrap;gap:16px 32px;align-items:flex-start}.tables>*{min-width:0}"
         ".picture{max-width:1000px}"
         ".wide{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.9rem}"
         "th,td{padding:3px 9px;text-align:right;border-bottom:1px solid var(--edge);white-space:nowrap}"
         "th:first-child,td:first-child{text-align:left}thead th{background:var(--band);white-space:normal}"
         ".loss{outline:2px solid var(--bad);outline-offset:-2px;font-weight:700}"
         ".bad{color:var(--bad);font-weight:700}"
         ".shape{white-space:normal;overflow-wrap:anywhere;text-align:left;min-width:15em}"
         ".figures{white-space:normal;min-width:6.5em}"
         ".long{white-space:normal;overflow-wrap:anywhere;text-align:left;min-width:16em;max-width:60em}"
         "dt{font-weight:600}dl{display:grid;grid-template-columns:max-content 1fr;gap:2px 14px}dd{margin:0}"
         ".good{color:var(--good)}.legend span{margin-right:14px;white-space:nowrap}";
}

HtmlTable::HtmlTable(const std::vector<std::string>& head) {
  text_ = "<div class=\"wide\"><table><thead><tr>";
  for (const std::string& h : head) text_ += "<th>" + escaped(h) + "</th>";
  text_ += "</tr></thead><tbody>";
}

void HtmlTable::row(const std::vector<std::string>& cells) {
  text_ += "<tr>";
  for (const std::string& c : cells) text_ += c.starts_with("<td") ? c : "<td>" + c + "</td>";
  text_ += "</tr>";
}

std::string shape_cell(const TimingRow& row) {
  return format("<td class=\"shape\" title=\"{}\">{}</td>", escaped(row.cell), escaped(shape_text(row)));
}

std::string figures_cell(const std::string& text) { return format("<td class=\"figures\">{}</td>", escaped(text)); }

std::string long_cell(const std::string& text, const char* style) {
  return format("<td class=\"long {}\">{}</td>", style, escaped(text));
}

std::string ratio_cell(double ratio) {
  const double far = std::min(1.0, std::abs(std::log2(ratio)));
  const char* colour = ratio >= 1 ? "43,138,62" : "201,42,42";
  return format("<td{} style=\"background:rgba({},{:.2f})\">{:.2f}</td>", ratio < 1 ? " class=\"loss\"" : "", colour,
                0.08 + 0.6 * far, ratio);
}

std::string failures_cell(int count) { return count > 0 ? format("<td class=\"bad\">{}</td>", count) : "0"; }

std::string status_cell(const TimingRow* row) {
  if (row == nullptr) return "-";
  return format("<td class=\"{}\" title=\"{}\">{}</td>", row->status == "wrong" ? "bad" : "soft", escaped(row->detail),
                escaped(row->status));
}

std::string microseconds(double seconds) { return format("{:.1f}", seconds * 1e6); }

std::string bytes_text(double bytes) {
  if (bytes < 1e3) return format("{:.0f} B", bytes);
  if (bytes < 1e6) return format("{:.1f} kB", bytes / 1e3);
  if (bytes < 1e9) return format("{:.1f} MB", bytes / 1e6);
  return format("{:.2f} GB", bytes / 1e9);
}

}  // namespace tessera::results
