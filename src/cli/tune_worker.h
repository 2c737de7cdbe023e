// Candidates of the tuner, run in a process of their own.
//
// A kernel that has never run may hang, or fault, which leaves a process without a usable GPU. So the one that searches
// never touches the GPU: it forks another that compiles, checks and times, and forks a new one where that was lost. The
// candidate that it was lost with is disqualified.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <string>
#include <vector>

#include "cli/check_case.h"
#include "cli/console.h"
#include "select/search_space.h"
#include "tune/search.h"

namespace tessera::cli {

struct TuneTarget {
  std::string name;  // for people
  std::string gpu;   // tune::gpu_key
  int driver = 0;
  int multiprocessors = 0;
  select::Device device;
};

// What the GPU is, asked in a process that ends with the answer. device: "cuda" or "cuda:N".
Result<TuneTarget> ask_target(const std::string& device);

// One problem on one GPU.
class TuneWorker final : public tune::Measure {
 public:
  // space: whose indices the candidates are; outlives this object.
  TuneWorker(std::string device, cases::Case problem, const std::vector<select::ForwardConfig>& space, double budget);
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
  cases::Case problem_;
  const std::vector<select::ForwardConfig>& space_;
  std::vector<PreparedForward> checks_;
  std::chrono::steady_clock::time_point deadline_;
  pid_t child_ = -1;
  int socket_ = -1;
  std::string unread_;
  int lost_ = 0;
};

}  // namespace tessera::cli
