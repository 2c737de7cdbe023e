// Pages made from the history: the HTML report, README's tables, and its picture.
#pragma once

#include <optional>
#include <string>

#include "cli/history.h"
#include "cli/kernel_record.h"

namespace tessera::cli {

// One self-contained file: no script, no request.
std::string html_report(const History& history, const std::vector<KernelState>& kernels);

// Markdown for README: the newest comparison of each GPU; nothing where there is none.
std::string readme_tables(const History& history);

// Speed by length beside the peers, head dims 64, 80, 128 and 256, causal; nothing where no comparison is recorded.
std::optional<std::string> readme_picture(const History& history);

}  // namespace tessera::cli
