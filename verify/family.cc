#include "verify/family.h"

#include <algorithm>
#include <charconv>
#include <set>

#include "base/arch.h"
#include "base/format.h"

// Every family; verify/<name>/ defines <name>_family(). One line adds a family.
#define TESSERA_FAMILIES(each) each(attention) each(gemm) each(mlp) each(moe) each(norm) each(loss)

namespace tessera::verify {

#define TESSERA_DECLARE(name) const Family& name##_family();
TESSERA_FAMILIES(TESSERA_DECLARE)
#undef TESSERA_DECLARE

namespace {

template <class Number>
Status read(const std::string& flag, const std::string& text, Number& to) {
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, to);
  if (error != std::errc() || stop != end) return invalid(format("{} is '{}', which is no number", flag, text));
  return {};
}

}  // namespace

const std::vector<const Family*>& families() {
#define TESSERA_LIST(name) &name##_family(),
  static const std::vector<const Family*> list = {TESSERA_FAMILIES(TESSERA_LIST)};
#undef TESSERA_LIST
  return list;
}

std::vector<std::string> suite_names() {
  std::vector<std::string> names;
  for (const Family* family : families()) {
    for (const std::string& name : family->suite_names()) {
      if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
    }
  }
  return names;
}

std::vector<std::unique_ptr<Case>> suite(std::string_view name) {
  std::vector<std::unique_ptr<Case>> all;
  for (const Family* family : families()) {
    for (std::unique_ptr<Case>& c : family->suite(name)) all.push_back(std::move(c));
  }
  return all;
}

std::vector<std::string> known_archs() {
  std::vector<std::string> archs = arch_names();
  std::erase(archs, "sm_90");
  return archs;
}

const std::vector<std::string>& gate_archs() {
  static const std::vector<std::string> archs = {"sm_75", "sm_80", "sm_86", "sm_89", "sm_90a"};
  return archs;
}

std::vector<jit::KernelInstance> gate_instances(const std::string& arch) {
  std::vector<jit::KernelInstance> all;
  const auto device = engine::cuda_device(arch);
  if (!device.ok()) return all;
  std::set<std::pair<std::string, std::string>> known;  // families share steps
  for (const Family* family : families()) {
    for (jit::KernelInstance& instance : family->gate(*device)) {
      if (known.emplace(instance.entry, instance.config).second) all.push_back(std::move(instance));
    }
  }
  return all;
}

std::vector<std::string> kernel_headers() {
  std::set<std::string> headers;
  for (const std::string& arch : gate_archs()) {
    for (const jit::KernelInstance& instance : gate_instances(arch)) headers.insert(instance.header);
  }
  return {headers.begin(), headers.end()};
}

Status read_number(const std::string& flag, const std::string& text, std::int64_t& to) { return read(flag, text, to); }
Status read_number(const std::string& flag, const std::string& text, float& to) { return read(flag, text, to); }

Status read_sizes(const FlagValues& values, const std::vector<std::pair<const char*, std::int64_t*>>& sizes,
                  std::int64_t least, int bits) {
  for (const auto& [flag, to] : sizes) {
    const auto given = values.find(flag);
    if (given == values.end()) continue;
    if (Status s = read(flag, given->second.front(), *to); !s.ok()) return s;
    if (*to < least || *to > std::int64_t{1} << bits) {
      return invalid(format("{} is {}; {} to 2^{} is accepted", flag, *to, least, bits));
    }
  }
  return {};
}

tessera_device place_of(tessera_device device, const char* arch) {
  if (arch == nullptr) return device;
  return {std::string_view(arch) == "cpu" ? TESSERA_CPU : TESSERA_CUDA, 0};
}

Result<std::string> text_from(
    const std::function<tessera_status(char* text, std::size_t capacity, std::size_t* needed)>& write) {
  std::size_t needed = 0;
  tessera_status status = write(nullptr, 0, &needed);
  std::string text(needed, '\0');
  if (status == TESSERA_OK) status = write(text.data(), text.size(), &needed);
  if (status != TESSERA_OK) return Status(status, tessera_last_error());
  text.resize(needed - 1);
  return text;
}

}  // namespace tessera::verify
