// A device for verify and bench: it holds a case's tensors while the case runs.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "engine/device.h"
#include "verify/case.h"

namespace tessera::verify {

class Device {
 public:
  virtual ~Device() = default;

  virtual std::string name() const = 0;  // for people: "cpu (avx512, 2 threads)"
  virtual engine::Device as_selected() const = 0;
  virtual int cuda_index() const { return -1; }
  bool is_cpu() const { return cuda_index() < 0; }

  virtual void* stream() const { return nullptr; }  // of this object's own

  // From now on, memory is kept for later calls instead of given back: allocating takes longer than a small problem.
  virtual void keep_memory() {}

  // Calls that this thread makes from now on run this device's code: several may be open for one GPU, each with the code
  // of another architecture.
  virtual void use() const {}

  // Points the buffers' tensors at memory of the device, with the host's contents.
  virtual Status upload(Call& call) = 0;
  // Fills what the op writes with NaN again, on the device.
  virtual Status poison(Call& call) = 0;
  // Waits for the device and copies back what the op wrote; the tensors stay on the device.
  virtual Status fetch(Call& call) = 0;
  // Waits for the device, copies contents back and points the tensors at host memory again.
  virtual Status download(Call& call) = 0;
  // At least this many bytes, aligned to 256; valid until the next call.
  virtual Result<void*> workspace(std::size_t bytes) = 0;

  // Bytes that time() writes before each call, outside of its time, so that nothing of an earlier one is left in a
  // GPU's L2 cache; 0: none.
  virtual std::size_t flush_bytes() const { return 0; }

  // Seconds of one call, repeated until min_time has passed and there are at least five samples; one call before
  // that is not counted. The call gets the stream to use. On a GPU the launch is hidden behind the flush.
  virtual Result<std::vector<double>> time(double min_time, const std::function<Status(void* stream)>& call) = 0;

  // Seconds of each of `calls` single calls, launch included, nothing flushed: the time of one call, not of many in a
  // row. `then` follows each, outside of its time.
  virtual Result<std::vector<double>> time_single(int calls, const std::function<Status(void* stream)>& call,
                                                  const std::function<Status(int n)>& then) = 0;
  // GPU: seconds that a call occupies the host, and seconds of a call replayed from a graph, nothing flushed; 0 on
  // the CPU.
  struct Overheads {
    double host = 0;
    double graph = 0;
  };
  virtual Result<Overheads> overheads(double /*seconds of a call*/, const std::function<Status(void* stream)>&) {
    return Overheads{};
  }
};

// The architecture that --arch-code selects: if it is empty, that of TESSERA_CODE_ARCH, else native.
std::string arch_code_in_force(const std::string& arch_code);

// "cpu", "cuda", "cuda:N", and on a GPU the architecture whose code it is to run ("native", "sm_75", ...). The thread
// that opens it uses it. TESSERA_INVALID_ARGUMENT for any other text, TESSERA_NO_DEVICE if it is not present.
Result<std::unique_ptr<Device>> open_device(const std::string& spelling, const std::string& arch_code = "");

}  // namespace tessera::verify
