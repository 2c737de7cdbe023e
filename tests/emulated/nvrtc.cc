// An NVRTC that compiles kernels for the CPU with the machine's C++ compiler. Its cubin is a shared library that exports
// emulated_kernel(params) and what a launch must know; the emulated driver (driver.cc) loads and runs it.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

#include "sources.h"

namespace {

namespace fs = std::filesystem;

struct Program {
  std::string text, log, image;
  std::vector<std::pair<std::string, std::string>> headers;  // path, text
};

std::string read(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}
void write(const fs::path& path, const std::string& text) {
  fs::create_directories(path.parent_path());
  std::ofstream(path, std::ios::binary) << text;
}

// The entry point takes its parameters by reference, so that they have one address in all threads.
std::string entry_point(const std::string& text) {
  static const std::regex entry(R"(void (?:__\w+\([^)]*\) )+(\w+)\(const __grid_constant__ ([^{]+) params\))");
  static const std::regex cluster(R"(__cluster_dims__\((\d+))");
  std::smatch found, clustered;
  if (!std::regex_search(text, found, entry)) return "#error no entry point\n";
  const bool has_cluster = std::regex_search(text, clustered, cluster);
  const std::string name = found[1], params = found[2];
  return "#include \"device.h\"\n" + std::regex_replace(text, entry, "void $1(const $2& params)") +
         "#pragma GCC visibility push(default)\n" + "extern \"C\" void emulated_kernel(const void* params) { " + name +
         "(*static_cast<const " + params + "*>(params)); }\n" +
         "extern \"C\" const int emulated_cluster = " + (has_cluster ? clustered[1].str() : "1") +
         ";\nextern \"C\" const unsigned emulated_params_bytes = sizeof(" + params + ");\n";
}

std::string quoted(const std::string& text) { return "'" + text + "'"; }

// Part of this library's build, which is part of the keys of caches.
[[gnu::used]] const char headers_hash[] = EMULATED_HEADERS_HASH;

int compile(Program& program, const std::string& arch) {
  char name[] = "/tmp/tessera_emulated_XXXXXX";
  if (mkdtemp(name) == nullptr) return 1;
  const fs::path folder = name;
  for (const auto& [path, text] : program.headers) {
    if (!path.starts_with("ptx/")) write(folder / path, tessera::emulated::host_source(text));
  }
  write(folder / "program.cc", entry_point(program.text));
  const std::string command =
      std::string("g++ -std=c++20 -O2 -march=native -shared -fPIC -fvisibility=hidden -w -fmax-errors=5") +
      " -D__CUDA_ARCH__=" + arch + "0 -I" + quoted(EMULATED_HEADERS) + " -I" + quoted(folder) + " " +
      quoted(folder / "program.cc") + " " + quoted(EMULATED_DRIVER) + " -o " + quoted(folder / "kernel.so") + " > " +
      quoted(folder / "log") + " 2>&1";
  const bool compiled = std::system(command.c_str()) == 0;
  program.log = read(folder / "log");
  program.image = compiled ? read(folder / "kernel.so") : "";
  if (compiled) program.log += "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\nUsed 32 registers\n";
  std::error_code ignored;
  if (compiled || std::getenv("EMULATED_KEEP") == nullptr) fs::remove_all(folder, ignored);
  return compiled ? 0 : 6;
}

int give(const std::string& from, char* to) {
  std::memcpy(to, from.data(), from.size());
  return 0;
}

}  // namespace

#define EMULATED extern "C" __attribute__((visibility("default")))

EMULATED int nvrtcVersion(int* major, int* minor) {
  *major = 13;
  *minor = 0;
  return 0;
}
EMULATED const char* nvrtcGetErrorString(int error) { return error == 0 ? "no error" : "the C++ compiler failed"; }
EMULATED int nvrtcCreateProgram(Program** program, const char* text, const char*, int count, const char* const* texts,
                                const char* const* paths) {
  *program = new Program{text, {}, {}, {}};
  for (int i = 0; i < count; ++i) (*program)->headers.emplace_back(paths[i], texts[i]);
  return 0;
}
EMULATED int nvrtcDestroyProgram(Program** program) {
  delete *program;
  *program = nullptr;
  return 0;
}
EMULATED int nvrtcCompileProgram(Program* program, int count, const char* const* options) {
  static const std::regex digits(R"((\d+))");
  std::cmatch found;
  for (int i = 0; i < count; ++i) {
    if (std::strstr(options[i], "--gpu-architecture") != nullptr && std::regex_search(options[i], found, digits)) {
      return compile(*program, found[1]);
    }
  }
  return 5;
}
EMULATED int nvrtcGetProgramLogSize(Program* program, std::size_t* bytes) {
  *bytes = program->log.size();
  return 0;
}
EMULATED int nvrtcGetProgramLog(Program* program, char* log) { return give(program->log, log); }
EMULATED int nvrtcGetCUBINSize(Program* program, std::size_t* bytes) {
  *bytes = program->image.size();
  return 0;
}
EMULATED int nvrtcGetCUBIN(Program* program, char* cubin) { return give(program->image, cubin); }
EMULATED int nvrtcGetPTXSize(Program* program, std::size_t* bytes) { return nvrtcGetCUBINSize(program, bytes); }
EMULATED int nvrtcGetPTX(Program* program, char* ptx) { return give(program->image, ptx); }
