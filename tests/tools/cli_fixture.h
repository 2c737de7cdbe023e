// The built program, run as a user runs it: a command, its output, its exit code and the files it writes.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

namespace tessera::test {

using Json = nlohmann::json;

struct Answer {
  int code = -1;
  std::string text;  // stdout and stderr
};

class Cli : public testing::Test {
 protected:
  void SetUp() override {
    std::string path = (std::filesystem::temp_directory_path() / "tessera-cli-XXXXXX").string();
    ASSERT_NE(mkdtemp(path.data()), nullptr);
    folder_ = path;
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  // `environment` goes before the program: NAME=value ...
  Answer run(const std::string& arguments, const std::string& environment = "") const {
    return run_program(TESSERA_PROGRAM, arguments, environment);
  }
  Answer run_program(const std::string& program, const std::string& arguments,
                     const std::string& environment = "") const {
    const std::string command =
        "TESSERA_CACHE_DIR=" + file("cache") + " " + environment + " " + program + " " + arguments + " 2>&1";
    Answer answer;
    FILE* pipe = popen(command.c_str(), "r");
    if (pipe == nullptr) return answer;
    char buffer[4096];
    for (std::size_t n = 0; (n = fread(buffer, 1, sizeof buffer, pipe)) > 0;) answer.text.append(buffer, n);
    const int status = pclose(pipe);
    if (WIFEXITED(status)) answer.code = WEXITSTATUS(status);
    return answer;
  }

  std::string file(const std::string& name) const { return folder_ + "/" + name; }

  std::string text_of(const std::string& name) const {
    std::ifstream in(file(name));
    return {std::istreambuf_iterator<char>(in), {}};
  }

  Json json(const std::string& name) const {
    std::ifstream in(file(name));
    return Json::parse(in, nullptr, false);
  }

  std::string folder_;
};

inline bool holds(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace tessera::test
