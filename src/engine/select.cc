#include "engine/select.h"

#include "jit/hash.h"

namespace tessera::engine {

std::vector<int> genes_of(const Choice& choice) {
  // Only equality matters, so a hash of the text is enough.
  const auto number = [](const std::string& text) { return static_cast<int>(jit::hash_of(text).low & 0x7fffffff); };
  std::vector<int> genes = {number(choice.kernel)};
  for (const StepConfig& step : choice.config) {
    for (const Field& field : step.fields) {
      if (const auto* text = std::get_if<std::string>(&field.value)) {
        genes.push_back(number(*text));
      } else if (const auto* integer = std::get_if<std::int64_t>(&field.value)) {
        genes.push_back(static_cast<int>(*integer));
      } else if (const auto* flag = std::get_if<bool>(&field.value)) {
        genes.push_back(*flag ? 1 : 0);
      }
    }
  }
  return genes;
}

}  // namespace tessera::engine
