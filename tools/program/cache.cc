// `tessera cache`: compiled kernels on disk.
#include "jit/cache.h"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <ctime>
#include <memory>

#include "program/commands.h"
#include "program/console.h"

namespace tessera::tools {
namespace {

int list(const std::string& json_file) {
  const jit::DiskCache cache = jit::DiskCache::from_environment();
  Table table({{"kernel", Table::Align::kLeft},
               {"target", Table::Align::kLeft},
               {"size"},
               {"written", Table::Align::kLeft},
               {"", Table::Align::kLeft}});
  Json entries = Json::array();
  std::uint64_t total = 0;
  std::size_t count = 0;
  for (const jit::CacheEntry& e : cache.list()) {
    total += e.bytes;
    ++count;
    table.add({e.valid ? e.kernel : e.file, e.target, bytes_text(static_cast<double>(e.bytes)),
               fmt::format("{:%Y-%m-%d %H:%M}", fmt::localtime(static_cast<std::time_t>(e.modified))),
               e.valid ? "" : paint(Style::kWarn, "not valid: will be replaced")});
    entries.push_back({{"file", e.file},
                       {"kernel", e.kernel},
                       {"target", e.target},
                       {"bytes", e.bytes},
                       {"modified", e.modified},
                       {"valid", e.valid}});
  }
  if (!table.empty()) table.print();
  fmt::print("{} {}, {} in {}\n", count, count == 1 ? "entry" : "entries", bytes_text(static_cast<double>(total)),
             cache.directory().empty() ? "no folder" : cache.directory());
  return write_json(json_file, {{"directory", cache.directory()}, {"bytes", total}, {"entries", entries}});
}

int clear(const std::string& json_file) {
  const jit::DiskCache cache = jit::DiskCache::from_environment();
  const Result<int> removed = cache.clear();
  if (!removed.ok()) return fail(kCheckFailed, removed.status().message());
  fmt::print("removed {} {} from {}\n", *removed, *removed == 1 ? "file" : "files", cache.directory());
  return write_json(json_file, {{"directory", cache.directory()}, {"removed", *removed}});
}

int path(const std::string& json_file) {
  const jit::CacheState state = jit::DiskCache::from_environment().state();
  if (state.directory.empty()) return fail(kCheckFailed, state.reason);
  fmt::print("{}\n", state.directory);
  return write_json(json_file, {{"directory", state.directory},
                                {"readable", state.readable},
                                {"writable", state.writable},
                                {"reason", state.reason}});
}

}  // namespace

Command add_cache(CLI::App& parent) {
  auto json = std::make_shared<std::string>();
  CLI::App* app = parent.add_subcommand("cache", "List or clear the compiled kernels on disk");
  app->add_option("--json", *json, "Write the answer to this file")->type_name("FILE");
  app->require_subcommand(1);
  CLI::App* list_app = app->add_subcommand("list", "What is there, and how large");
  CLI::App* clear_app = app->add_subcommand("clear", "Remove all entries");
  CLI::App* path_app = app->add_subcommand("path", "Print the folder");
  for (CLI::App* sub : {list_app, clear_app, path_app}) sub->fallthrough();  // --json may come last
  app->footer(
      "The folder is TESSERA_CACHE_DIR, else $XDG_CACHE_HOME/tessera, else ~/.cache/tessera.\n\n"
      "Examples:\n"
      "  tessera cache list\n"
      "  tessera cache clear\n"
      "  du -sh \"$(tessera cache path)\"");
  return {app, [=] {
            if (clear_app->parsed()) return clear(*json);
            if (path_app->parsed()) return path(*json);
            return list(*json);
          }};
}

}  // namespace tessera::tools
