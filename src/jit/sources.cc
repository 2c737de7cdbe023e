#include "jit/sources.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>
#include <system_error>

#include "base/format.h"
#include "jit/hash.h"

namespace tessera::jit {
namespace {

namespace fs = std::filesystem;

const Source* find(std::string_view path, const std::vector<Source>& list) {
  const auto at = std::find_if(list.begin(), list.end(), [&](const Source& source) { return source.path == path; });
  return at == list.end() ? nullptr : &*at;
}

KernelSources read_folder(const std::string& folder) {
  const auto refused = [&](const std::string& reason) {
    return KernelSources{
        {}, folder, Status(TESSERA_COMPILE_FAILED, format("TESSERA_KERNEL_SOURCES is '{}': {}", folder, reason))};
  };
  KernelSources sources{{}, folder, {}};
  std::error_code error;
  for (fs::recursive_directory_iterator at(folder, error), end; !error && at != end; at.increment(error)) {
    const fs::path& path = at->path();
    if (path.extension() != ".h" && path.extension() != ".cuh") continue;
    std::ifstream in(path, std::ios::binary);
    std::ostringstream text;
    text << in.rdbuf();
    if (!in) return refused("cannot read " + path.string());
    sources.files.push_back({path.lexically_relative(folder).generic_string(), text.str()});
  }
  if (error) return refused(error.message());
  // The host compiles the .h files too (Params, Configs, limits) and was built with its own; .cuh files are for the
  // device alone.
  for (const Source& built : embedded_sources()) {
    if (!built.path.ends_with(".h")) continue;
    const Source* here = find(built.path, sources.files);
    if (here == nullptr) return refused(format("there is no {} in it", built.path));
    if (strip_comments(here->text) != strip_comments(built.text)) {
      return refused(
          format("its {} is not the one that the library was built with; rebuild the library with it", built.path));
    }
  }
  return sources;
}

// The paths in lines of the form #include "path".
std::vector<std::string_view> included_by(std::string_view text) {
  std::vector<std::string_view> paths;
  constexpr std::string_view kDirective = "#include \"";
  for (std::size_t at = text.find(kDirective); at != std::string_view::npos; at = text.find(kDirective, at)) {
    at += kDirective.size();
    const std::size_t end = text.find('"', at);
    if (end == std::string_view::npos) break;
    paths.push_back(text.substr(at, end - at));
  }
  return paths;
}

}  // namespace

// Never destroyed: a thread may still compile while the process exits.
const KernelSources& kernel_sources() {
  static const auto* const embedded = new KernelSources{embedded_sources(), {}, {}};
  const char* const folder = std::getenv("TESSERA_KERNEL_SOURCES");
  if (folder == nullptr || *folder == '\0') return *embedded;
  static std::mutex mutex;
  static auto* const folders = new std::map<std::string, KernelSources>;
  const std::lock_guard lock(mutex);
  const auto known = folders->find(folder);
  return known != folders->end() ? known->second : folders->emplace(folder, read_folder(folder)).first->second;
}

std::vector<const Source*> reachable(std::string_view header, const std::vector<Source>& extra) {
  std::map<std::string_view, const Source*> found;
  std::vector<std::string_view> pending = {header};
  while (!pending.empty()) {
    const std::string_view path = pending.back();
    pending.pop_back();
    if (found.count(path) > 0) continue;
    const Source* source = find(path, extra);
    if (source == nullptr) source = find(path, kernel_sources().files);
    if (source == nullptr) continue;
    found.emplace(source->path, source);
    for (std::string_view next : included_by(source->text)) pending.push_back(next);
  }
  std::vector<const Source*> list;
  for (const auto& [path, source] : found) list.push_back(source);
  return list;
}

std::string strip_comments(std::string_view text) {
  std::string out;
  char quote = 0;  // inside a literal: the character that ends it
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    const char next = i + 1 < text.size() ? text[i + 1] : '\0';
    if (quote != 0) {
      out += c;
      if (c == '\\' && next != '\0') {
        out += next;
        ++i;
      } else if (c == quote) {
        quote = 0;
      }
      continue;
    }
    // ' also separates digits: it opens a literal only if it does not follow a digit or a letter.
    const bool after_word = i > 0 && std::isalnum(static_cast<unsigned char>(text[i - 1])) != 0;
    if (c == '"' || (c == '\'' && !after_word)) {
      quote = c;
      out += c;
    } else if (c == '/' && next == '/') {
      while (i + 1 < text.size() && text[i + 1] != '\n') ++i;
    } else if (c == '/' && next == '*') {
      const std::size_t end = text.find("*/", i + 2);
      i = end == std::string_view::npos ? text.size() : end + 1;
      out += ' ';
    } else if (std::isspace(static_cast<unsigned char>(c)) != 0) {
      // The end of a line matters to directives; other blanks only separate words.
      if (!out.empty() && out.back() == ' ') out.pop_back();
      if (!out.empty() && out.back() != '\n') out += c == '\n' ? '\n' : ' ';
    } else {
      out += c;
    }
  }
  return out;
}

std::string code_hash(std::string_view header) {
  std::string all;
  for (const Source* source : reachable(header, {})) {
    all += source->path + '\n' + strip_comments(source->text) + '\0';
  }
  return hash_of(all).hex();
}

}  // namespace tessera::jit
