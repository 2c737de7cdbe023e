// The sections of the HTML report. Each is empty if there is nothing to show.
#pragma once

#include <string>
#include <vector>

#include "results/comparison.h"
#include "results/history.h"
#include "results/kernel_record.h"

namespace tessera::results {

// The comparison with peers (comparison_sections.cc).
std::string headline(const Comparison& c);
std::string speed_sections(const Comparison& c);
std::string ratio_section(const Comparison& c);
// From peers_unfused.json (`python -m tessera.bench --peers math,flex`).
std::string unfused_section(const History& history, const std::string& gpu);
std::string latency_sections(const Comparison& c);
std::string bytes_section(const Comparison& c);
std::string accuracy_section(const Comparison& c);
std::string determinism_section(const Comparison& c);
std::string environment_section(const RunRow& run);

// The comparison beside what `tessera bench` measured (bench_sections.cc). `c` may be null.
std::string roofline_section(const Comparison& c, const RunRow& bench);
std::string bandwidth_sections(const Comparison* c, const std::vector<TimingRow>& bench);
std::string plain_sections(const Comparison* c, const std::vector<TimingRow>& bench);
// Whole training steps, from training.json (`python -m tessera.bench --suite np`).
std::string training_section(const History& history, const std::string& gpu);
// From products.json (`python -m tessera.bench --suite products`).
std::string products_section(const History& history, const std::string& gpu);

// Records over time (record_sections.cc).
std::string verify_section(const History& history, const std::string& gpu);
std::string evidence_section(const History& history, const std::string& gpu);
std::string fuzz_section(const History& history, const std::string& gpu);
std::string mutation_section(const History& history, const std::string& gpu);
std::string traffic_section(const History& history, const std::string& gpu);
std::string history_section(const History& history, const std::string& gpu);
std::string kernel_section(const std::vector<KernelState>& kernels);

// One combination of the values of a view's groups: {64, true}.
using GroupValues = std::vector<Json>;
std::vector<GroupValues> groups_of(const View& view);
// "D = 64, causal"
std::string text_of(const View& view, const GroupValues& values);
// One chart of speed over the view's x axis; empty if nothing was timed.
std::string speed_chart(const View& view, const GroupValues& values);

// Which op served Tessera's rows: "through the forward"; empty if the file does not say.
std::string served_through(const View& view);

}  // namespace tessera::results
