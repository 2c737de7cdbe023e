// A device for verify and bench: where a case's tensors live while it is asked for.
#pragma once

#include <memory>
#include <string>

#include "cases/buffers.h"
#include "ops/status.h"

namespace tessera::cli {

class Device {
 public:
  virtual ~Device() = default;

  virtual std::string name() const = 0;  // for people: "cpu (avx512, 2 threads)"
  virtual bool is_cpu() const = 0;

  // Points the buffers' tensors at memory of the device, with the host's contents.
  virtual Status upload(cases::Buffers& buffers) = 0;
  // Brings contents back and points the tensors at host memory again. upload may be called again afterwards.
  virtual Status download(cases::Buffers& buffers) = 0;
  // At least this many bytes, aligned to 256; valid until the next call.
  virtual Result<void*> workspace(std::size_t bytes) = 0;
  virtual Status synchronize() = 0;
};

// "cpu", "cuda", "cuda:N". TESSERA_INVALID_ARGUMENT for another spelling, TESSERA_NO_DEVICE where it is not there.
Result<std::unique_ptr<Device>> open_device(const std::string& spelling);

// The exit code for a status that stopped a command.
int exit_code_of(const Status& status);

}  // namespace tessera::cli
