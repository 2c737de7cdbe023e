// Which kernel serves a problem, which others could, and why the rest cannot: as data. Text and JSON are made from it.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "engine/config.h"

namespace tessera::engine {

struct Refusal {
  std::string kernel;
  std::string reason;
};

struct Explanation {
  struct Option {
    std::string kernel;
    Config config;
    std::size_t workspace = 0;  // bytes
    double microseconds = 0;    // predicted
    std::string why;
    bool tuned = false;  // found by the tuner on this GPU; then microseconds are measured
  };

  std::string family;   // "attention"
  std::string op;       // "attention_forward"
  std::string problem;  // for people, on one line
  Fields fields;        // of the problem
  std::string device;
  std::vector<Option> options;  // best first: the first is chosen; empty: no kernel serves the problem
  std::vector<Refusal> refusals;
};

// For people; the first line is the problem.
std::string text_of(const Explanation& explanation);
// One object with the fields of Explanation: "chosen" (an option or null), "offered" (the other options), "refused".
std::string json_text_of(const Explanation& explanation);

}  // namespace tessera::engine
