// Device memory, streams and events for code that owns them: one-shot calls, verify, bench and tests. Recipes own none.
#pragma once

#include <cstddef>
#include <functional>
#include <utility>

#include "cuda/device.h"

namespace tessera::cuda {

class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  static Result<DeviceBuffer> make(int device, std::size_t bytes);
  DeviceBuffer(DeviceBuffer&& other) noexcept { swap(other); }
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    swap(other);
    return *this;
  }
  ~DeviceBuffer();

  void* data() const { return reinterpret_cast<void*>(address_); }
  template <class T>
  T* as() const {
    return static_cast<T*>(data());
  }
  std::size_t bytes() const { return bytes_; }
  int device() const { return device_; }

  // On the device's default stream; they return when the work is done. Offsets and sizes are in bytes.
  Status upload(const void* from, std::size_t bytes, std::size_t offset = 0);
  Status download(void* to, std::size_t bytes, std::size_t offset = 0) const;
  Status fill_bytes(unsigned char value);
  Status fill_words16(unsigned short value);
  Status fill_words32(unsigned value);
  // Enqueued on the stream; does not wait.
  Status enqueue_fill(unsigned char value, CUstream stream);

 private:
  void swap(DeviceBuffer& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(address_, other.address_);
    std::swap(bytes_, other.bytes_);
  }
  int device_ = 0;
  CUdeviceptr address_ = 0;
  std::size_t bytes_ = 0;
};

// Scratch memory in the order of a stream: usable by what is enqueued from here to its release. Works in a capture.
class StreamBuffer {
 public:
  static Result<StreamBuffer> make(int device, std::size_t bytes, CUstream stream);
  StreamBuffer(StreamBuffer&& other) noexcept
      : device_(other.device_), stream_(other.stream_), address_(std::exchange(other.address_, 0)) {}
  StreamBuffer& operator=(StreamBuffer&&) = delete;
  ~StreamBuffer() { static_cast<void>(release()); }

  void* data() const { return reinterpret_cast<void*>(address_); }
  // Behind what is on the stream by now. The second time does nothing.
  Status release();

 private:
  StreamBuffer(int device, CUstream stream, CUdeviceptr address)
      : device_(device), stream_(stream), address_(address) {}
  int device_;
  CUstream stream_;
  CUdeviceptr address_;
};

class Stream {
 public:
  static Result<Stream> make(int device);
  Stream(Stream&& other) noexcept : device_(other.device_), stream_(std::exchange(other.stream_, nullptr)) {}
  Stream& operator=(Stream&&) = delete;
  ~Stream();

  CUstream get() const { return stream_; }
  int device() const { return device_; }
  Status synchronize() const;

 private:
  Stream(int device, CUstream stream) : device_(device), stream_(stream) {}
  int device_;
  CUstream stream_;
};

class Event {
 public:
  static Result<Event> make(int device);
  Event(Event&& other) noexcept : device_(other.device_), event_(std::exchange(other.event_, nullptr)) {}
  Event& operator=(Event&&) = delete;
  ~Event();

  Status record(CUstream stream) const;
  Status synchronize() const;
  // Seconds from `start` to this event; both must have completed.
  Result<double> seconds_since(const Event& start) const;

 private:
  Event(int device, CUevent event) : device_(device), event_(event) {}
  int device_;
  CUevent event_;
};

// Seconds per call of `enqueue`, measured by events around `calls` calls on the stream, after one warm-up call.
Result<double> time_on_stream(const Stream& stream, int calls, const std::function<Status(CUstream)>& enqueue);

// Work captured from a stream, to be launched repeatedly.
class Graph {
 public:
  // enqueue must neither wait for the device nor allocate.
  static Result<Graph> capture(const Stream& stream, const std::function<Status(CUstream)>& enqueue);
  Graph(Graph&& other) noexcept
      : device_(other.device_),
        graph_(std::exchange(other.graph_, nullptr)),
        exec_(std::exchange(other.exec_, nullptr)) {}
  Graph& operator=(Graph&&) = delete;
  ~Graph();
  Status launch(CUstream stream) const;

 private:
  explicit Graph(int device) : device_(device) {}
  int device_;
  CUgraph graph_ = nullptr;
  CUgraphExec exec_ = nullptr;
};

// The device memory that is free now, in bytes.
Result<std::size_t> free_memory(int device);

}  // namespace tessera::cuda
