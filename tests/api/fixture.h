// A valid call of each kind, small, with poisoned outputs: tests spoil one thing and see what happens.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "tessera/attention.h"

namespace tessera::test {

constexpr std::uint8_t kPoison = 0xC3;

// Owns a tensor's memory, shape and strides; the C view stays valid while it lives.
class OwnedTensor {
 public:
  OwnedTensor(tessera_dtype dtype, std::vector<std::int64_t> shape) : shape_(std::move(shape)) {
    std::int64_t elements = 1;
    for (const std::int64_t dim : shape_) elements *= dim;
    bytes_.assign(static_cast<std::size_t>(elements) * dtype.bits / 8 + kSlack, kPoison);
    strides_.assign(shape_.size(), 1);
    for (int d = static_cast<int>(shape_.size()) - 2; d >= 0; --d) strides_[d] = strides_[d + 1] * shape_[d + 1];
    view = {bytes_.data(),
            {TESSERA_CPU, 0},
            static_cast<std::int32_t>(shape_.size()),
            dtype,
            shape_.data(),
            strides_.data(),
            0};
  }

  OwnedTensor(const OwnedTensor&) = delete;
  OwnedTensor& operator=(const OwnedTensor&) = delete;

  template <class T>
  T* as() {
    return reinterpret_cast<T*>(bytes_.data());
  }
  std::size_t elements() const { return (bytes_.size() - kSlack) / (view.dtype.bits / 8); }
  std::int64_t& shape(int d) { return shape_[d]; }
  std::int64_t& stride(int d) { return strides_[d]; }
  bool untouched() const {
    for (const std::uint8_t byte : bytes_) {
      if (byte != kPoison) return false;
    }
    return true;
  }

  const std::vector<std::uint8_t>& bytes() const { return bytes_; }

  tessera_tensor view{};

 private:
  static constexpr std::size_t kSlack = 64;  // lets a test move the start without leaving the buffer
  std::vector<std::int64_t> shape_;
  std::vector<std::int64_t> strides_;
  std::vector<std::uint8_t> bytes_;
};

constexpr tessera_dtype kFp32{TESSERA_FLOAT, 32, 1};
constexpr tessera_dtype kFp16{TESSERA_FLOAT, 16, 1};
constexpr tessera_dtype kE4m3{TESSERA_FLOAT8_E4M3FN, 8, 1};
constexpr tessera_dtype kBf16{TESSERA_BFLOAT, 16, 1};
constexpr tessera_dtype kI32{TESSERA_INT, 32, 1};

struct Call {
  tessera_attention_op op = TESSERA_ATTENTION_FORWARD;
  tessera_attention args = TESSERA_ATTENTION_INIT;
  std::map<std::string, OwnedTensor> tensors;
  std::map<std::string, std::vector<std::uint8_t>> kept;

  OwnedTensor& add(const std::string& name, tessera_dtype dtype, std::vector<std::int64_t> shape,
                   const tessera_tensor* tessera_attention::*field) {
    auto [at, inserted] = tensors.try_emplace(name, dtype, std::move(shape));
    args.*field = &at->second.view;
    return at->second;
  }
  OwnedTensor& operator[](const std::string& name) { return tensors.at(name); }

  void fill(const std::string& name, float step = 0.01f) {
    OwnedTensor& t = tensors.at(name);
    for (std::size_t i = 0; i < t.elements(); ++i)
      t.as<float>()[i] = step * static_cast<float>((i * 37 + 11) % 101) - 0.5f;
  }
  void set(const std::string& name, const std::vector<std::int32_t>& values) {
    std::memcpy(tensors.at(name).as<std::int32_t>(), values.data(), values.size() * sizeof(std::int32_t));
  }
  // What is written in part counts as an output: it must be as it is now.
  void keep(const std::string& name) { kept[name] = tensors.at(name).bytes(); }
  bool outputs_untouched() {
    const bool backward = op == TESSERA_ATTENTION_BACKWARD;
    for (auto& [name, tensor] : tensors) {
      const bool output = backward ? (name == "dq" || name == "dk" || name == "dv")
                                   : (name == "out" || name == "lse" || name == "status");
      if (output && !tensor.untouched()) return false;
      if (kept.count(name) > 0 && tensor.bytes() != kept[name]) return false;
    }
    return true;
  }

  tessera_status run() {
    // Scratch for the largest problem these tests pose; a test that is about the workspace asks for its size itself.
    static std::vector<std::uint8_t> scratch(64u << 20);
    return tessera_attention_run(op, &args, scratch.data(), scratch.size(), nullptr);
  }
};

inline constexpr std::int64_t kB = 2, kSq = 5, kSk = 5, kHq = 4, kHkv = 2, kD = 8, kDv = 16;

inline Call forward_call(std::int64_t seq_q = kSq, std::int64_t seq_k = kSk) {
  Call call;
  call.add("q", kFp32, {kB, seq_q, kHq, kD}, &tessera_attention::q);
  call.add("k", kFp32, {kB, seq_k, kHkv, kD}, &tessera_attention::k);
  call.add("v", kFp32, {kB, seq_k, kHkv, kDv}, &tessera_attention::v);
  call.add("out", kFp32, {kB, seq_q, kHq, kDv}, &tessera_attention::out);
  call.add("lse", kFp32, {kB, kHq, seq_q}, &tessera_attention::lse);
  for (const char* name : {"q", "k", "v"}) call.fill(name);
  return call;
}

inline Call backward_call() {
  Call call = forward_call();
  EXPECT_EQ(call.run(), TESSERA_OK) << tessera_last_error();
  call.op = TESSERA_ATTENTION_BACKWARD;
  call.add("dout", kFp32, {kB, kSq, kHq, kDv}, &tessera_attention::dout);
  call.add("dq", kFp32, {kB, kSq, kHq, kD}, &tessera_attention::dq);
  call.add("dk", kFp32, {kB, kSk, kHkv, kD}, &tessera_attention::dk);
  call.add("dv", kFp32, {kB, kSk, kHkv, kDv}, &tessera_attention::dv);
  call.fill("dout");
  return call;
}

inline Call varlen_call() {
  Call call;
  call.add("q", kFp32, {7, kHq, kD}, &tessera_attention::q);
  call.add("k", kFp32, {9, kHkv, kD}, &tessera_attention::k);
  call.add("v", kFp32, {9, kHkv, kDv}, &tessera_attention::v);
  call.add("out", kFp32, {7, kHq, kDv}, &tessera_attention::out);
  call.add("lse", kFp32, {kHq, 7}, &tessera_attention::lse);
  call.add("cu_seqlens_q", kI32, {4}, &tessera_attention::cu_seqlens_q);
  call.add("cu_seqlens_k", kI32, {4}, &tessera_attention::cu_seqlens_k);
  call.set("cu_seqlens_q", {0, 3, 3, 7});
  call.set("cu_seqlens_k", {0, 4, 6, 9});
  for (const char* name : {"q", "k", "v"}) call.fill(name);
  return call;
}

inline Call decode_call() {
  Call call;
  call.op = TESSERA_ATTENTION_DECODE;
  call.add("q", kFp32, {kB, 1, kHq, kD}, &tessera_attention::q);
  call.add("k", kFp32, {kB, 12, kHkv, kD}, &tessera_attention::k);
  call.add("v", kFp32, {kB, 12, kHkv, kDv}, &tessera_attention::v);
  call.add("out", kFp32, {kB, 1, kHq, kDv}, &tessera_attention::out);
  call.add("cache_seqlens", kI32, {kB}, &tessera_attention::cache_seqlens);
  call.set("cache_seqlens", {12, 7});
  for (const char* name : {"q", "k", "v"}) call.fill(name);
  return call;
}

inline Call paged_call() {
  Call call;
  call.op = TESSERA_ATTENTION_DECODE;
  call.add("q", kFp32, {kB, 1, kHq, kD}, &tessera_attention::q);
  call.add("k", kFp32, {6, 4, kHkv, kD}, &tessera_attention::k);
  call.add("v", kFp32, {6, 4, kHkv, kDv}, &tessera_attention::v);
  call.add("out", kFp32, {kB, 1, kHq, kDv}, &tessera_attention::out);
  call.add("cache_seqlens", kI32, {kB}, &tessera_attention::cache_seqlens);
  call.add("page_table", kI32, {kB, 3}, &tessera_attention::page_table);
  call.set("cache_seqlens", {11, 4});
  call.set("page_table", {5, 0, 3, 1, -7, 99});  // the second row uses one page only
  for (const char* name : {"q", "k", "v"}) call.fill(name);
  return call;
}

// A cache of e4m3, whose scales are one for each head.
inline Call e4m3_cache_call() {
  Call call = decode_call();
  for (const char* name : {"k", "v"}) call[name].view.dtype = kE4m3;
  call.add("k_scale", kFp32, {1, kHkv, 1}, &tessera_attention::k_scale);
  call.add("v_scale", kFp32, {1, kHkv, 1}, &tessera_attention::v_scale);
  for (const char* name : {"k_scale", "v_scale"}) std::fill_n(call[name].as<float>(), kHkv, 0.5f);
  return call;
}

// The same with scales beside the keys. Those of keys that are not in use are no numbers.
inline Call token_scale_call() {
  Call call = decode_call();
  call.args.flags |= TESSERA_SCALE_PER_TOKEN;
  const std::int64_t rows = call["k"].shape(0), keys = call["k"].shape(1);
  for (const char* name : {"k", "v"}) call[name].view.dtype = kE4m3;
  call.add("k_scale", kFp32, {rows, kHkv, keys}, &tessera_attention::k_scale);
  call.add("v_scale", kFp32, {rows, kHkv, keys}, &tessera_attention::v_scale);
  const auto* lengths = call["cache_seqlens"].as<std::int32_t>();
  for (const char* name : {"k_scale", "v_scale"}) {
    for (std::int64_t n = 0; n < rows * kHkv * keys; ++n) {
      call[name].as<float>()[n] = n % keys < lengths[n / keys / kHkv] ? 0.5f : NAN;
    }
  }
  return call;
}

inline Call page_scale_call() {
  Call call = paged_call();
  call.args.flags |= TESSERA_SCALE_PER_PAGE;
  const std::int64_t pages = call["k"].shape(0);
  for (const char* name : {"k", "v"}) call[name].view.dtype = kE4m3;
  call.add("k_scale", kFp32, {pages, kHkv, 1}, &tessera_attention::k_scale);
  call.add("v_scale", kFp32, {pages, kHkv, 1}, &tessera_attention::v_scale);
  for (const char* name : {"k_scale", "v_scale"}) std::fill_n(call[name].as<float>(), pages * kHkv, 0.5f);
  return call;
}

// Two new keys of two sequences, rotated, in two of three rows of a cache.
inline Call append_call() {
  Call call;
  call.op = TESSERA_ATTENTION_DECODE;
  call.add("q", kFp32, {kB, 2, kHq, kD}, &tessera_attention::q);
  call.add("k", kFp32, {3, 12, kHkv, kD}, &tessera_attention::k);
  call.add("v", kFp32, {3, 12, kHkv, kDv}, &tessera_attention::v);
  call.add("out", kFp32, {kB, 2, kHq, kDv}, &tessera_attention::out);
  call.add("lse", kFp32, {kB, kHq, 2}, &tessera_attention::lse);
  call.add("k_new", kFp32, {kB, 2, kHkv, kD}, &tessera_attention::k_new);
  call.add("v_new", kFp32, {kB, 2, kHkv, kDv}, &tessera_attention::v_new);
  call.add("rotary_cos", kFp32, {20, 3}, &tessera_attention::rotary_cos);
  call.add("rotary_sin", kFp32, {20, 3}, &tessera_attention::rotary_sin);
  call.add("rotary_seqlens", kI32, {kB}, &tessera_attention::rotary_seqlens);
  call.add("cache_seqlens", kI32, {kB}, &tessera_attention::cache_seqlens);
  call.add("cache_batch_idx", kI32, {kB}, &tessera_attention::cache_batch_idx);
  call.add("leftpad_k", kI32, {kB}, &tessera_attention::leftpad_k);
  call.add("status", kI32, {kB}, &tessera_attention::status);
  call.set("cache_seqlens", {10, 0});
  call.set("cache_batch_idx", {2, 0});
  call.set("leftpad_k", {3, 0});
  call.set("rotary_seqlens", {18, 0});
  call.args.flags = TESSERA_CAUSAL;
  for (const char* name : {"q", "k", "v", "k_new", "v_new", "rotary_cos", "rotary_sin"}) call.fill(name);
  call.keep("k");
  call.keep("v");
  return call;
}

// New keys that go to a page of their own.
inline Call paged_append_call() {
  Call call = paged_call();
  call.add("k_new", kFp32, {kB, 1, kHkv, kD}, &tessera_attention::k_new);
  call.add("v_new", kFp32, {kB, 1, kHkv, kDv}, &tessera_attention::v_new);
  call.set("page_table", {5, 0, 3, 1, 2, 99});
  for (const char* name : {"k_new", "v_new"}) call.fill(name);
  call.keep("k");
  call.keep("v");
  return call;
}

}  // namespace tessera::test
