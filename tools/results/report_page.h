// Pages made from the history: the HTML report, and README's tables and picture.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "results/history.h"
#include "results/kernel_record.h"

namespace tessera::results {

// One self-contained file that contains no script and makes no request.
std::string html_report(const History& history, const std::vector<KernelState>& kernels);

// Markdown for README: the newest comparison of each GPU. Empty if there is none. Only families with an entry in
// presentations() are in it.
std::string readme_tables(const History& history);

// README's charts of speed, from the newest comparison of the first GPU that has one. Nothing if none has.
std::optional<std::string> readme_picture(const History& history);

// "NVIDIA H200": the GPU's own name, or the folder's if the run does not say.
std::string gpu_title(const RunRow& run);

}  // namespace tessera::results
