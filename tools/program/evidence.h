// Whether each of many calls gave a right result: the first is judged by the oracle, all others are compared with it on the
// device where they ran.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "cuda/kernel.h"
#include "cuda/memory.h"
#include "verify/case.h"
#include "verify/device.h"

namespace tessera::tools {

class Evidence {
 public:
  // `call` has run on the device, and `spare` (verify::Judgement) is what the oracle allows its outputs to differ from
  // those of now; nothing, if the case promises equal runs. They are NaN afterwards.
  static Result<Evidence> begin(verify::Call& call, verify::Device& device, const std::map<std::string, double>& spare,
                                bool equal_runs_promised, int calls);

  // Behind the n-th call, on the device's stream: compares, and fills the outputs with NaN again.
  Status compare(int n);
  // Waits for the device.
  Status finish();

  int equal() const;  // calls that gave the same bits
  // Of the others, the largest difference, divided by what it may be.
  double largest() const { return largest_; }
  // What the first call with a wrong result is off by; empty: there is none.
  const std::string& wrong() const { return wrong_; }

 private:
  struct Output {
    verify::Buffer* buffer;
    double spare;
    verify::Bytes first;           // CPU
    cuda::DeviceBuffer on_device;  // GPU: the same
    const cuda::Kernel* kernel = nullptr;
  };

  Evidence(verify::Device& device, bool equal_runs_promised, int calls)
      : device_(&device), equal_runs_promised_(equal_runs_promised), calls_(calls) {}
  void judge(int n, const Output& output, std::uint64_t differing, double difference);

  verify::Device* device_;
  bool equal_runs_promised_;
  int calls_;
  std::vector<Output> outputs_;
  cuda::DeviceBuffer tallies_;  // GPU: CompareTally by call and output
  std::vector<bool> differs_;   // by call
  double largest_ = 0;
  std::string wrong_;
};

}  // namespace tessera::tools
