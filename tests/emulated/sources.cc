#include "sources.h"

#include <cctype>
#include <regex>
#include <sstream>
#include <utility>
#include <vector>

namespace tessera::emulated {
namespace {

// asm("" : ...) only hides a value from the compiler, and means the same to any.
bool has_instructions(const std::string& text) {
  static const std::regex assembly(R"re(\basm( volatile)?\(\s*("[^"]|[^"\s]))re");
  return std::regex_search(text, assembly);
}

// The lines of a file, those of a definition at its outermost level together.
std::vector<std::string> definitions(const std::string& text) {
  std::vector<std::string> all;
  std::istringstream lines(text);
  std::string line, open;
  while (std::getline(lines, line)) {
    const std::string code = line.substr(0, line.find_last_not_of(' ', line.find("  //")) + 1);
    const bool outermost = !line.empty() && std::isspace(static_cast<unsigned char>(line[0])) == 0;
    const bool alone = line.empty() || line.starts_with("#") || line.starts_with("//") ||
                       line.starts_with("namespace") || line.starts_with("}  // namespace");
    open += line + '\n';
    if (open.size() == line.size() + 1 && alone) {
      all.push_back(std::exchange(open, {}));
    } else if (outermost && !line.starts_with("template") && (code.ends_with(";") || code.ends_with("}"))) {
      all.push_back(std::exchange(open, {}));
    }
  }
  all.push_back(open);
  return all;
}

// `__shared__ T a[n], b;` to references.
std::string with_shared_variables(const std::string& text) {
  static const std::regex dynamic(R"(extern __shared__ (?:__align__\([^)]*\) )?([a-z ]+) (\w+)\[\];)");
  static const std::regex variables(R"(__shared__ (?:__align__\([^)]*\) )?((?:typename )?[\w:]+) ([^;]+);)");
  static const std::regex variable(R"((\w+)((?:\[[^\]]*\])*)(?:, |$))");
  const std::string of_dynamic =
      std::regex_replace(text, dynamic, "$1* const $2 = reinterpret_cast<$1*>(emulated::shared_memory().data);");
  std::string out;
  auto from = of_dynamic.cbegin();
  for (std::sregex_iterator at(of_dynamic.begin(), of_dynamic.end(), variables), end; at != end; ++at) {
    out.append(from, of_dynamic.cbegin() + at->position());
    const std::string type = (*at)[1], names = (*at)[2];
    for (std::sregex_iterator one(names.begin(), names.end(), variable), none; one != none; ++one) {
      out += "auto& " + (*one)[1].str() + " = emulated::of_cta<" + type + (*one)[2].str() +
             ">([] { static const char site = 0; return &site; }()); ";
    }
    from = of_dynamic.cbegin() + at->position() + at->length();
  }
  return out.append(from, of_dynamic.cend());
}

// `using typename A::T, A::f;` one by one: GCC takes all names of such a list for types.
std::string with_single_using(const std::string& text) {
  static const std::regex list(R"(using ((?:typename )?[\w:]+(?:,\s*(?:typename )?[\w:]+)+);)");
  static const std::regex comma(R"(,\s*)");
  std::string out;
  auto from = text.cbegin();
  for (std::sregex_iterator at(text.begin(), text.end(), list), end; at != end; ++at) {
    out.append(from, text.cbegin() + at->position());
    out += "using " + std::regex_replace((*at)[1].str(), comma, "; using ") + ";";
    from = text.cbegin() + at->position() + at->length();
  }
  return out.append(from, text.cend());
}

// `p.band.f<true>(` of a p whose type depends on the template's arguments: GCC takes `<` for less than.
std::string with_template_keyword(const std::string& text) {
  static const std::regex call(R"(\bp\.band\.(\w+<[\w.]+>\())");
  return std::regex_replace(text, call, "p.band.template $1");
}

}  // namespace

std::string host_source(const std::string& text) {
  std::string kept;
  for (const std::string& definition : definitions(text)) {
    if (!has_instructions(definition)) kept += definition;
  }
  return with_template_keyword(with_single_using(with_shared_variables(kept)));
}

}  // namespace tessera::emulated
