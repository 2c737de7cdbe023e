// `tessera cache`: compiled kernels on disk.
#include "jit/cache.h"

#include <ctime>
#include <memory>

#include "base/format.h"
#include "program/commands.h"
#include "program/console.h"

namespace tessera::tools {
namespace {

std::string time_text(std::int64_t seconds) {
  const std::time_t time = seconds;
  std::tm parts{};
  localtime_r(&time, &parts);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%d %H:%M", &parts);
  return text;
}

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
    table.add({e.valid ? e.kernel : e.file, e.target, bytes_text(static_cast<double>(e.bytes)), time_text(e.modified),
               e.valid ? "" : paint(Style::kWarn, "not valid: will be replaced")});
    entries.push_back({{"file", e.file},
                       {"kernel", e.kernel},
                       {"target", e.target},
                       {"bytes", e.bytes},
                       {"modified", e.modified},
                       {"valid", e.valid}});
  }
  if (!table.empty()) table.print();
  print("{} {}, {} in {}\n", count, count == 1 ? "entry" : "entries", bytes_text(static_cast<double>(total)),
        cache.directory().empty() ? "no folder" : cache.directory());
  return write_json(json_file, {{"directory", cache.directory()}, {"bytes", total}, {"entries", entries}});
}

int clear(const std::string& json_file) {
  const jit::DiskCache cache = jit::DiskCache::from_environment();
  const Result<int> removed = cache.clear();
  if (!removed.ok()) return fail(kCheckFailed, removed.status().message());
  print("removed {} {} from {}\n", *removed, *removed == 1 ? "file" : "files", cache.directory());
  return write_json(json_file, {{"directory", cache.directory()}, {"removed", *removed}});
}

int path(const std::string& json_file) {
  const jit::CacheState state = jit::DiskCache::from_environment().state();
  if (state.directory.empty()) return fail(kCheckFailed, state.reason);
  print("{}\n", state.directory);
  return write_json(json_file, {{"directory", state.directory},
                                {"readable", state.readable},
                                {"writable", state.writable},
                                {"reason", state.reason}});
}

}  // namespace

Command add_cache(App parent) {
  auto json = std::make_shared<std::string>();
  const App app = parent.add_subcommand("cache", "List or clear the compiled kernels on disk");
  app.add_option("--json", *json, "Write the answer to this file").output_file();
  app.require_subcommand();
  const App list_app = app.add_subcommand("list", "What is there, and how large");
  const App clear_app = app.add_subcommand("clear", "Remove all entries");
  const App path_app = app.add_subcommand("path", "Print the folder");
  for (const App& sub : {list_app, clear_app, path_app}) sub.fallthrough();  // --json may come last
  app.footer(
      "The folder is TESSERA_CACHE_DIR, else $XDG_CACHE_HOME/tessera, else ~/.cache/tessera.\n\n"
      "Examples:\n"
      "  tessera cache list\n"
      "  tessera cache clear\n"
      "  du -sh \"$(tessera cache path)\"");
  return {app, [=] {
            if (clear_app.parsed()) return clear(*json);
            if (path_app.parsed()) return path(*json);
            return list(*json);
          }};
}

}  // namespace tessera::tools
