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

  virtual void* stream() const { return nullptr; }  // of this object's own

  // Points the buffers' tensors at memory of the device, with the host's contents.
  virtual Status upload(cases::Buffers& buffers) = 0;
  // Fills what the op writes with NaN again, where the tensors are.
  virtual Status poison(cases::Buffers& buffers) = 0;
  // Waits for the device and brings back what the op wrote; the tensors stay where they are.
  virtual Status fetch(cases::Buffers& buffers) = 0;
  // Waits for the device, brings contents back and points the tensors at host memory again.
  virtual Status download(cases::Buffers& buffers) = 0;
  // At least this many bytes, aligned to 256; valid until the next call.
  virtual Result<void*> workspace(std::size_t bytes) = 0;

  // Bytes that time() writes before each call, outside of its time, so that nothing of an earlier one is left in a
  // GPU's L2 cache; 0: none are.
  virtual std::size_t flush_bytes() const { return 0; }

  // Seconds of one call, over and over until min_time has passed and there are at least five samples; one call before
  // that is not counted. The call gets the stream to use. On a GPU the launch is hidden behind the flush.
  virtual Result<std::vector<double>> time(double min_time, const std::function<Status(void* stream)>& call) = 0;

  // Seconds of each of so many single calls, launch included, nothing flushed: what one call takes, not what many in a
  // row do.
  virtual Result<std::vector<double>> time_single(int calls, const std::function<Status(void* stream)>& call) = 0;
  // GPU: seconds that a call keeps the host, and seconds of a call replayed from a graph, nothing flushed; nothing on
  // the CPU.
  struct Overheads {
    double host = 0;
    double graph = 0;
  };
  virtual Result<Overheads> overheads(double /*seconds of a call*/, const std::function<Status(void* stream)>&) {
    return Overheads{};
  }
};

// What --arch-code comes to: where it is empty, what TESSERA_CODE_ARCH says, else native.
std::string arch_code_in_force(const std::string& arch_code);

// "cpu", "cuda", "cuda:N", and on a GPU the architecture whose code it is to run ("native", "sm_75", ...), which is set
// for the whole process. TESSERA_INVALID_ARGUMENT for what cannot be, TESSERA_NO_DEVICE where it is not there.
Result<std::unique_ptr<Device>> open_device(const std::string& spelling, const std::string& arch_code = "");

// The exit code for a status that stopped a command.
int exit_code_of(const Status& status);

}  // namespace tessera::cli
