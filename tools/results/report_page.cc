#include "results/report_page.h"

#include <algorithm>

#include "base/format.h"
#include "results/charts.h"
#include "results/html.h"
#include "results/sections.h"

namespace tessera::results {
namespace {

// What was compared, and how to read it.
std::string reading_section(const Comparison& c) {
  std::string names;
  for (const std::string& entrant : entrants_of(c.rows, "")) {
    if (const std::string text = entrant_text(entrant); !text.empty()) {
      names += "<dt>" + escaped(entrant) + "</dt><dd>" + escaped(text) + "</dd>";
    }
  }
  return "<h2>How to read this</h2><ul><li>All entrants ran in one process on the same GPU and the same tensors, in "
         "turn, "
         "with the L2 cache flushed before each call; a time is the median.</li><li>A ratio is the other's time "
         "divided by "
         "Tessera's. At 1.20, Tessera does 20 % more work per second; below 1, framed in red, it is slower. No shape "
         "is left "
         "out.</li><li>A result is compared with fp64 before it is timed. One that is wrong is marked and has no "
         "time.</li><li>Numbers are bf16 unless a shape says otherwise; TFLOP/s count only the work that the mask "
         "leaves.</li></ul>" +
         (names.empty() ? "" : "<dl>" + names + "</dl>");
}

std::string gpu_sections(const History& history, const std::string& gpu) {
  const std::optional<Comparison> c = newest_comparison(history, gpu);
  const std::vector<RunRow> benches = history.runs("bench", gpu);
  const std::vector<TimingRow> bench = benches.empty() ? std::vector<TimingRow>() : history.timings(benches.front().id);
  std::string out;
  if (c) {
    out += format("<h2>{}</h2><p class=\"soft\">{}, Tessera {}, {} measurements.</p>", escaped(gpu_title(c->run)),
                  escaped(c->run.date), escaped(c->run.version), c->rows.size());
    out += headline(*c) + reading_section(*c) + speed_sections(*c) + ratio_section(*c) + latency_sections(*c) +
           unfused_section(history, gpu);
    std::vector<RunRow> measured = history.runs("evidence", gpu);  // it measures the ceilings, too
    measured.insert(measured.begin(), benches.begin(), benches.end());
    const auto newest = std::max_element(measured.begin(), measured.end(),
                                         [](const RunRow& a, const RunRow& b) { return a.date < b.date; });
    if (newest != measured.end()) out += roofline_section(*c, *newest);
    out += bytes_section(*c) + accuracy_section(*c) + determinism_section(*c);
  } else {
    out += format("<h2>{}</h2><p>No comparison with peers is recorded.</p>", escaped(gpu));
  }
  const Comparison* compared = c ? &*c : nullptr;
  out += bandwidth_sections(compared, bench) + plain_sections(compared, bench) + products_section(history, gpu) +
         training_section(history, gpu);
  out += traffic_section(history, gpu) + verify_section(history, gpu) + fuzz_section(history, gpu) +
         mutation_section(history, gpu) + evidence_section(history, gpu) + history_section(history, gpu);
  if (c) out += environment_section(c->run);
  return out;
}

}  // namespace

std::string gpu_title(const RunRow& run) {
  const std::string name = text_at(run.facts.value("environment", Json::object()), "gpu");
  return name.empty() ? run.gpu : name;
}

std::string html_report(const History& history, const std::vector<KernelState>& kernels) {
  std::string body =
      "<h1>Tessera: what was measured</h1><p>Tessera is a library of fused kernels for transformers: attention "
      "forward, backward and decode, matrix products with their epilogues, MLPs, mixtures of experts, losses and "
      "norms, "
      "compiled at run time for the GPU at hand. This page shows how fast they are beside other libraries, how far "
      "their results are from fp64, and what was checked.</p>";
  const std::vector<std::string> gpus = history.gpus();
  if (gpus.empty()) body += "<p>Nothing has been recorded.</p>";
  for (const std::string& gpu : gpus) body += gpu_sections(history, gpu);
  body += kernel_section(kernels);
  return "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" "
         "content=\"width=device-width,initial-scale=1\"><title>Tessera: what was measured</title><link rel=\"icon\" "
         "href=\"data:,\"><style>" +
         page_style() + chart_style() + "</style></head><body>" + body + "</body></html>\n";
}

}  // namespace tessera::results
