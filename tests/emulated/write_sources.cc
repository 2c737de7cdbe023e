// emulated_sources FROM TO: the headers of FROM, as host_source() has them, below TO.
#include <filesystem>
#include <fstream>
#include <sstream>

#include "sources.h"

int main(int, char** arguments) {
  namespace fs = std::filesystem;
  const fs::path from = arguments[1], to = arguments[2];
  for (const auto& file : fs::recursive_directory_iterator(from)) {
    const fs::path relative = file.path().lexically_relative(from);
    if (!file.is_regular_file() || *relative.begin() == "ptx") continue;
    std::ostringstream text;
    text << std::ifstream(file.path()).rdbuf();
    fs::create_directories((to / relative).parent_path());
    std::ofstream(to / relative) << tessera::emulated::host_source(text.str());
  }
}
