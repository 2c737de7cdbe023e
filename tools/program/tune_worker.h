// Runs the tuner's candidates in another process.
//
// A kernel that has never run may hang or fault, which leaves a process without a usable GPU. So the searching process
// never touches the GPU: it forks a worker that compiles, checks and times, and forks a new one if that is lost. The
// candidate that the worker was lost with is disqualified.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "engine/search.h"
#include "program/console.h"
#include "verify/check.h"

namespace tessera::tools {

struct TuneTarget {
  std::string name;  // for people
  std::string gpu;   // engine::gpu_key
  int driver = 0;
  int multiprocessors = 0;
  engine::Device device;
};

// What the GPU is, asked in a process that ends with the answer. device: "cuda" or "cuda:N".
Result<TuneTarget> ask_target(const std::string& device);

// What may be tried for a problem, asked in such a process, too: libraries that a GPU has name their own algorithms.
Result<engine::SearchSpace> ask_space(const std::string& device, const verify::Case& problem);

// A small problem to check candidates on.
struct TuningCheck {
  std::unique_ptr<verify::Case> c;
  std::unique_ptr<verify::Trial> trial;
};

// One problem on one GPU.
class TuneWorker final : public engine::Measure {
 public:
  // space: whose indices the candidates are. Both outlive this object.
  TuneWorker(std::string device, const verify::Case& problem, const std::vector<engine::Choice>& space, double budget);
  ~TuneWorker() override { stop(); }
  TuneWorker(const TuneWorker&) = delete;
  TuneWorker& operator=(const TuneWorker&) = delete;

  std::vector<std::string> compile(const std::vector<int>& candidates) override;
  std::string check(int candidate) override;
  Result<double> time(int candidate) override;
  bool out_of_time() override { return std::chrono::steady_clock::now() >= deadline_; }

  // The problem itself, some rows of it, against the oracle; empty: right.
  std::string check_problem(int candidate);

  int lost() const { return lost_; }  // processes that ended or hung

 private:
  Result<Json> ask(const Json& request, int timeout_s);
  Status start();
  void stop();
  Status lose(const std::string& how);

  std::string device_;
  const verify::Case& problem_;
  const std::vector<engine::Choice>& space_;
  std::vector<TuningCheck> checks_;
  std::chrono::steady_clock::time_point deadline_;
  pid_t child_ = -1;
  int socket_ = -1;
  std::string unread_;
  int lost_ = 0;
};

}  // namespace tessera::tools
