#include "jit/sources.h"

#include <cctype>
#include <map>

#include "jit/hash.h"

namespace tessera::jit {
namespace {

const Source* find(std::string_view path, const std::vector<Source>& extra) {
  for (const std::vector<Source>* list : {&extra, &embedded_sources()}) {
    for (const Source& source : *list) {
      if (source.path == path) return &source;
    }
  }
  return nullptr;
}

// Paths named by lines of the form #include "path".
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

std::vector<const Source*> reachable(std::string_view header, const std::vector<Source>& extra) {
  std::map<std::string_view, const Source*> found;
  std::vector<std::string_view> pending = {header};
  while (!pending.empty()) {
    const std::string_view path = pending.back();
    pending.pop_back();
    if (found.count(path) > 0) continue;
    const Source* source = find(path, extra);
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
  char quote = 0;  // inside a literal, the character that ends it
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
    // ' also separates digits; only one that does not follow a digit or letter opens a literal.
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
      // A line's end matters to directives; other blanks only part words.
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
