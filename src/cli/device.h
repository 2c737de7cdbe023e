// A device for verify and bench: where a case's tensors live while it is asked for.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cases/buffers.h"
#include "ops/status.h"
#include "select/device.h"

namespace tessera::cli {

class Device {
 public:
  virtual ~Device() = default;

  virtual std::string name() const = 0;  // for people: "cpu (avx512, 2 threads)"
  virtual select::Device as_selected() const = 0;
  virtual int cuda_index() const { return -1; }
  bool is_cpu() const { return cuda_index() < 0; }

  // Points the buffers' tensors at memory of the device, with the host's contents.
  virtual Status upload(cases::Buffers& buffers) = 0;
  // Waits for the device, brings contents back and points the tensors at host memory again.
  virtual Status download(cases::Buffers& buffers) = 0;
  // At least this many bytes, aligned to 256; valid until the next call.
  virtual Result<void*> workspace(std::size_t bytes) = 0;

  // Seconds of one call, over and over until min_time has passed and there are at least five samples; one call before
  // that is not counted. The call gets the stream to use.
  virtual Result<std::vector<double>> time(double min_time, const std::function<Status(void* stream)>& call) = 0;
};

// "cpu", "cuda", "cuda:N". TESSERA_INVALID_ARGUMENT for another spelling, TESSERA_NO_DEVICE where it is not there.
Result<std::unique_ptr<Device>> open_device(const std::string& spelling);

// The exit code for a status that stopped a command.
int exit_code_of(const Status& status);

}  // namespace tessera::cli
