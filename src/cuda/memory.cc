#include "cuda/memory.h"

#include "base/format.h"

namespace tessera::cuda {
namespace {

// Runs `call` with the device's context current.
template <class Call>
Status with_context(int device, const std::string& what, Call&& call) {
  const auto scope = ContextScope::enter(device);
  if (!scope.ok()) return scope.status();
  const Driver& d = **driver();
  return status_of(d, call(d), what);
}

template <class Call>
Status and_wait(int device, const std::string& what, Call&& call) {
  return with_context(device, what, [&](const Driver& d) {
    const CUresult result = call(d);
    return result == kCudaSuccess ? d.stream_synchronize(nullptr) : result;
  });
}

}  // namespace

Result<DeviceBuffer> DeviceBuffer::make(int device, std::size_t bytes) {
  DeviceBuffer buffer;
  buffer.device_ = device;
  buffer.bytes_ = bytes;
  // The driver refuses to allocate 0 bytes, but an empty tensor still needs an address.
  const Status s = with_context(device, format("allocating {} bytes on device {}", bytes, device),
                                [&](const Driver& d) { return d.allocate(&buffer.address_, bytes > 0 ? bytes : 1); });
  if (!s.ok()) return s;
  return buffer;
}

DeviceBuffer::~DeviceBuffer() {
  if (address_ == 0) return;
  static_cast<void>(with_context(device_, "cuMemFree", [&](const Driver& d) { return d.free(address_); }));
}

Status DeviceBuffer::upload(const void* from, std::size_t bytes, std::size_t offset) {
  return and_wait(device_, format("copying {} bytes to device {}", bytes, device_), [&](const Driver& d) {
    return bytes == 0 ? kCudaSuccess : d.copy_to_device(address_ + offset, from, bytes, nullptr);
  });
}

Status DeviceBuffer::download(void* to, std::size_t bytes, std::size_t offset) const {
  return and_wait(device_, format("copying {} bytes from device {}", bytes, device_), [&](const Driver& d) {
    return bytes == 0 ? kCudaSuccess : d.copy_to_host(to, address_ + offset, bytes, nullptr);
  });
}

Status DeviceBuffer::fill_bytes(unsigned char value) {
  return and_wait(device_, "cuMemsetD8",
                  [&](const Driver& d) { return d.set_bytes(address_, value, bytes_, nullptr); });
}

Status DeviceBuffer::fill_words16(unsigned short value) {
  return and_wait(device_, "cuMemsetD16",
                  [&](const Driver& d) { return d.set_words16(address_, value, bytes_ / 2, nullptr); });
}

Status DeviceBuffer::fill_words32(unsigned value) {
  return and_wait(device_, "cuMemsetD32",
                  [&](const Driver& d) { return d.set_words32(address_, value, bytes_ / 4, nullptr); });
}

Status DeviceBuffer::enqueue_fill(unsigned char value, CUstream stream) {
  return with_context(device_, "cuMemsetD8",
                      [&](const Driver& d) { return d.set_bytes(address_, value, bytes_, stream); });
}

Result<StreamBuffer> StreamBuffer::make(int device, std::size_t bytes, CUstream stream) {
  CUdeviceptr address = 0;
  const Status s = with_context(device, format("allocating {} bytes of workspace on device {}", bytes, device),
                                [&](const Driver& d) { return d.allocate_on_stream(&address, bytes, stream); });
  if (!s.ok()) return s;
  return StreamBuffer(device, stream, address);
}

Status StreamBuffer::release() {
  const CUdeviceptr address = std::exchange(address_, 0);
  if (address == 0) return {};
  return with_context(device_, "cuMemFreeAsync", [&](const Driver& d) { return d.free_on_stream(address, stream_); });
}

Result<Stream> Stream::make(int device) {
  constexpr unsigned kNonBlocking = 1;  // does not synchronise with the default stream
  CUstream stream = nullptr;
  const Status s =
      with_context(device, "cuStreamCreate", [&](const Driver& d) { return d.stream_create(&stream, kNonBlocking); });
  if (!s.ok()) return s;
  return Stream(device, stream);
}

Stream::~Stream() {
  if (stream_ == nullptr) return;
  static_cast<void>(
      with_context(device_, "cuStreamDestroy", [&](const Driver& d) { return d.stream_destroy(stream_); }));
}

Status Stream::synchronize() const {
  return with_context(device_, "cuStreamSynchronize", [&](const Driver& d) { return d.stream_synchronize(stream_); });
}

Result<Event> Event::make(int device) {
  CUevent event = nullptr;
  const Status s = with_context(device, "cuEventCreate", [&](const Driver& d) { return d.event_create(&event, 0); });
  if (!s.ok()) return s;
  return Event(device, event);
}

Event::~Event() {
  if (event_ == nullptr) return;
  static_cast<void>(with_context(device_, "cuEventDestroy", [&](const Driver& d) { return d.event_destroy(event_); }));
}

Status Event::record(CUstream stream) const {
  return with_context(device_, "cuEventRecord", [&](const Driver& d) { return d.event_record(event_, stream); });
}

Status Event::synchronize() const {
  return with_context(device_, "cuEventSynchronize", [&](const Driver& d) { return d.event_synchronize(event_); });
}

Result<double> Event::seconds_since(const Event& start) const {
  float milliseconds = 0;
  const Status s = with_context(device_, "cuEventElapsedTime",
                                [&](const Driver& d) { return d.event_elapsed(&milliseconds, start.event_, event_); });
  if (!s.ok()) return s;
  return static_cast<double>(milliseconds) * 1e-3;
}

Result<double> time_on_stream(const Stream& stream, int calls, const std::function<Status(CUstream)>& enqueue) {
  const auto start = Event::make(stream.device());
  if (!start.ok()) return start.status();
  const auto end = Event::make(stream.device());
  if (!end.ok()) return end.status();
  if (Status s = enqueue(stream.get()); !s.ok()) return s;
  if (Status s = start->record(stream.get()); !s.ok()) return s;
  for (int i = 0; i < calls; ++i) {
    if (Status s = enqueue(stream.get()); !s.ok()) return s;
  }
  if (Status s = end->record(stream.get()); !s.ok()) return s;
  if (Status s = end->synchronize(); !s.ok()) return s;
  auto seconds = end->seconds_since(*start);
  if (!seconds.ok()) return seconds.status();
  return *seconds / calls;
}

Result<Graph> Graph::capture(const Stream& stream, const std::function<Status(CUstream)>& enqueue) {
  constexpr int kThreadLocal = 1;  // other threads may make any call meanwhile
  Graph made(stream.device());
  Status s = with_context(made.device_, "cuStreamBeginCapture",
                          [&](const Driver& d) { return d.capture_begin(stream.get(), kThreadLocal); });
  if (!s.ok()) return s;
  const Status enqueued = enqueue(stream.get());
  s = with_context(made.device_, "cuStreamEndCapture",
                   [&](const Driver& d) { return d.capture_end(stream.get(), &made.graph_); });
  if (!enqueued.ok()) return enqueued;
  if (!s.ok()) return s;
  s = with_context(made.device_, "cuGraphInstantiate",
                   [&](const Driver& d) { return d.graph_instantiate(&made.exec_, made.graph_, 0); });
  if (!s.ok()) return s;
  return made;
}

Graph::~Graph() {
  if (graph_ == nullptr) return;
  static_cast<void>(with_context(device_, "cuGraphDestroy", [&](const Driver& d) {
    if (exec_ != nullptr) d.graph_exec_destroy(exec_);
    return d.graph_destroy(graph_);
  }));
}

Status Graph::launch(CUstream stream) const {
  return with_context(device_, "cuGraphLaunch", [&](const Driver& d) { return d.graph_launch(exec_, stream); });
}

Result<std::size_t> free_memory(int device) {
  std::size_t available = 0, total = 0;
  const Status s =
      with_context(device, "cuMemGetInfo", [&](const Driver& d) { return d.memory_info(&available, &total); });
  if (!s.ok()) return s;
  return available;
}

}  // namespace tessera::cuda
