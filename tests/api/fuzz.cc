// Random calls, most of them nearly right. Whatever comes in: a status and a sentence, nothing written where it is
// refused, nothing written outside the outputs where it is accepted, no crash, nothing for a sanitizer to report.
//
//   api_fuzz [--seconds N] [--seed N] [--calls N]
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "tessera/attention.h"

namespace {

constexpr std::size_t kArena = 1 << 15;  // bytes behind each tensor
constexpr std::uint8_t kPoison = 0xA5;

class Random {
 public:
  explicit Random(std::uint64_t seed) : engine_(seed) {}
  std::uint64_t below(std::uint64_t n) { return engine_() % n; }
  bool one_in(std::uint64_t n) { return below(n) == 0; }
  template <std::size_t N, class T>
  T pick(const T (&choices)[N]) {
    return choices[below(N)];
  }

 private:
  std::mt19937_64 engine_;
};

struct Buffer {
  std::vector<std::uint8_t> bytes = std::vector<std::uint8_t>(kArena, kPoison);
  std::int64_t shape[4]{};
  std::int64_t strides[4]{};
  tessera_tensor view{};
};

constexpr std::int64_t kOddDims[] = {
    0, 1, 2, 3, 7, 17, -1, std::int64_t{1} << 33, std::numeric_limits<std::int64_t>::max()};
constexpr tessera_dtype kDtypes[] = {{TESSERA_FLOAT, 32, 1}, {TESSERA_FLOAT, 16, 1}, {TESSERA_BFLOAT, 16, 1}};
constexpr tessera_dtype kOddDtypes[] = {{TESSERA_FLOAT, 64, 1}, {TESSERA_INT, 32, 1}, {TESSERA_FLOAT, 16, 2}, {9, 3, 1},
                                        {TESSERA_UINT, 8, 1},   {TESSERA_FLOAT, 0, 1}};

// Fills a tensor's description: right for the shape asked, then, now and then, spoilt.
void describe(Random& random, Buffer& buffer, tessera_dtype dtype, std::vector<std::int64_t> shape) {
  const int rank = static_cast<int>(shape.size());
  std::int64_t stride = 1;
  for (int d = rank - 1; d >= 0; --d) {
    buffer.shape[d] = shape[d];
    buffer.strides[d] = stride;
    stride *= shape[d] > 0 ? shape[d] : 1;
    if (random.one_in(8)) stride += static_cast<std::int64_t>(random.below(9));  // padding
  }
  buffer.view = {buffer.bytes.data(), {TESSERA_CPU, 0}, rank, dtype, buffer.shape, buffer.strides, 0};
  if (random.one_in(10)) buffer.view.strides = nullptr;
  if (!random.one_in(40)) return;
  switch (random.below(9)) {
    case 0:
      buffer.view.data = nullptr;
      break;
    case 1:
      buffer.view.ndim = static_cast<std::int32_t>(random.below(7)) - 1;
      break;
    case 2:
      buffer.view.dtype = random.pick(kOddDtypes);
      break;
    case 3:
      buffer.shape[random.below(4)] = random.pick(kOddDims);
      break;
    case 4:
      buffer.strides[random.below(4)] = random.pick(kOddDims);
      break;
    case 5:
      buffer.view.byte_offset = random.below(16);
      break;
    case 6:
      buffer.view.byte_offset = std::numeric_limits<std::uint64_t>::max() - random.below(64);
      break;
    case 7:
      buffer.view.shape = nullptr;
      break;
    case 8:
      buffer.view.device = {static_cast<std::int32_t>(random.below(4)), static_cast<std::int32_t>(random.below(3)) - 1};
      break;
  }
}

// Bytes the tensor reaches, or more than the arena where that is not to be known.
std::size_t reach(const tessera_tensor& t) {
  std::size_t elements = 1;
  std::int64_t compact = 1;
  for (int d = t.ndim - 1; d >= 0; --d) {
    const std::int64_t stride = t.strides != nullptr ? t.strides[d] : compact;
    if (t.shape[d] == 0) return 0;
    if (t.shape[d] > 1 &&
        (stride > static_cast<std::int64_t>(kArena) || t.shape[d] > static_cast<std::int64_t>(kArena))) {
      return kArena + 1;
    }
    if (t.shape[d] > 1) elements += static_cast<std::size_t>(stride * (t.shape[d] - 1));
    compact *= t.shape[d];
  }
  return elements * (t.dtype.bits / 8) + t.byte_offset;
}

bool has_memory(const tessera_tensor& t) {
  if (t.shape == nullptr || t.ndim < 0 || t.ndim > 4) return true;  // refused before it is read
  if (t.byte_offset > kArena) return false;
  for (int d = 0; d < t.ndim; ++d) {
    if (t.shape[d] < 0 || (t.strides != nullptr && t.strides[d] < 0)) return true;
  }
  return reach(t) <= kArena;
}

struct Fuzzer {
  Random random;
  Buffer q, k, v, out, lse, dout, dlse, dq, dk, dv, alibi, cu_q, cu_k, cache, pages, k_new, v_new, cos, sin, rotary,
      rows_of_cache, leftpad, status;
  std::vector<std::uint8_t> scratch = std::vector<std::uint8_t>(std::size_t{8} << 20);
  std::uint64_t accepted = 0, refused = 0;

  explicit Fuzzer(std::uint64_t seed) : random(seed) {
    for (Buffer* b : {&q, &k, &v, &dout, &dlse, &alibi, &k_new, &v_new, &cos, &sin}) fill(*b);
  }

  [[noreturn]] static void fail(const char* what) {
    std::fprintf(stderr, "api_fuzz: %s (last error: '%s')\n", what, tessera_last_error());
    std::abort();
  }

  // Halves between 0x3800 and 0x3bff are small positive numbers read as fp16, as bf16 and, in pairs, as fp32.
  void fill(Buffer& buffer) {
    for (std::size_t i = 0; i < kArena; i += 2) {
      const auto half = static_cast<std::uint16_t>(0x3800 + random.below(0x400));
      std::memcpy(buffer.bytes.data() + i, &half, 2);
    }
  }

  void lengths(Buffer& buffer, std::int64_t count, std::int64_t total) {
    auto* values = reinterpret_cast<std::int32_t*>(buffer.bytes.data());
    std::int64_t at = 0;
    for (std::int64_t b = 0; b < count; ++b) {
      values[b] = static_cast<std::int32_t>(at);
      at += static_cast<std::int64_t>(random.below(static_cast<std::uint64_t>(total - at) + 1));
      if (random.one_in(100)) values[b] = static_cast<std::int32_t>(random.below(1000)) - 500;
    }
  }

  void one_call() {
    const auto op = static_cast<tessera_attention_op>(random.one_in(200) ? 7 : random.below(3));
    const bool decode = op == TESSERA_ATTENTION_DECODE;
    const bool backward = op == TESSERA_ATTENTION_BACKWARD;
    const bool varlen = random.one_in(3);
    const bool paged = decode && random.one_in(2);
    const tessera_dtype dtype = random.pick(kDtypes);
    const auto small = [&](int most) { return static_cast<std::int64_t>(random.below(most + 1)); };
    const std::int64_t batch = small(3), hkv = 1 + small(2), hq = hkv * (1 + small(2)), d = 1 + small(11),
                       d_v = 1 + small(11);
    const std::int64_t sq = small(decode ? 2 : 9), sk = random.one_in(3) ? sq : small(11);
    const tessera_dtype fp32{TESSERA_FLOAT, 32, 1};
    const tessera_dtype i32{TESSERA_INT, 32, 1};

    const auto shape = [&](std::int64_t s, std::int64_t h, std::int64_t dim) {
      return varlen ? std::vector<std::int64_t>{s, h, dim} : std::vector<std::int64_t>{batch, s, h, dim};
    };
    const std::int64_t num_pages = 1 + small(4), page_size = 1 + small(4), table = small(3);
    const std::int64_t cache_rows = decode && !paged && random.one_in(3) ? batch + small(2) : -1;
    const auto cache_shape = [&](std::int64_t dim) {
      if (paged) return std::vector<std::int64_t>{num_pages, page_size, hkv, dim};
      if (cache_rows >= 0) return std::vector<std::int64_t>{cache_rows, sk, hkv, dim};
      return decode ? std::vector<std::int64_t>{batch, sk, hkv, dim} : shape(sk, hkv, dim);
    };
    const auto rows = varlen ? std::vector<std::int64_t>{hq, sq} : std::vector<std::int64_t>{batch, hq, sq};

    struct {  // as a caller with a newer header would have it
      tessera_attention known = TESSERA_ATTENTION_INIT;
      std::uint8_t newer[256] = {};
    } given;
    tessera_attention& args = given.known;
    const auto give = [&](const tessera_tensor* tessera_attention::*field, Buffer& buffer, tessera_dtype type,
                          const std::vector<std::int64_t>& dims) {
      describe(random, buffer, type, dims);
      // The check itself reads lengths and tables, so what they claim to be must be there.
      while (type.code == TESSERA_INT && !has_memory(buffer.view)) describe(random, buffer, type, dims);
      args.*field = random.one_in(300) ? nullptr : &buffer.view;
    };
    give(&tessera_attention::q, q, dtype, shape(sq, hq, d));
    give(&tessera_attention::k, k, dtype, cache_shape(d));
    give(&tessera_attention::v, v, dtype, cache_shape(d_v));
    give(&tessera_attention::out, out, dtype, shape(sq, hq, d_v));
    if (backward || random.one_in(2)) give(&tessera_attention::lse, lse, fp32, rows);
    if (backward || random.one_in(200)) {
      give(&tessera_attention::dout, dout, dtype, shape(sq, hq, d_v));
      if (random.one_in(2)) give(&tessera_attention::dlse, dlse, fp32, rows);
      give(&tessera_attention::dq, dq, dtype, shape(sq, hq, d));
      give(&tessera_attention::dk, dk, dtype, shape(sk, hkv, d));
      give(&tessera_attention::dv, dv, dtype, shape(sk, hkv, d_v));
    }
    if (random.one_in(4)) {
      give(&tessera_attention::alibi_slopes, alibi, fp32,
           random.one_in(2) ? std::vector<std::int64_t>{hq} : std::vector<std::int64_t>{batch, hq});
    }
    if (varlen) {
      give(&tessera_attention::cu_seqlens_q, cu_q, i32, {batch + 1});
      lengths(cu_q, batch + 1, sq);
    }
    if (varlen && (!decode || random.one_in(100))) {
      give(&tessera_attention::cu_seqlens_k, cu_k, i32, {batch + 1});
      lengths(cu_k, batch + 1, sk);
    }
    const std::int64_t capacity = paged ? table * page_size : sk;
    const bool appends = decode && (varlen ? random.one_in(50) : random.one_in(2));
    const std::int64_t sn = appends ? small(static_cast<int>(std::min<std::int64_t>(capacity, 4))) : 0;
    if (decode && (appends || random.one_in(2))) {
      give(&tessera_attention::cache_seqlens, cache, i32, {batch});
      lengths(cache, batch, capacity - sn);
    }
    if (appends) {
      give(&tessera_attention::k_new, k_new, dtype, {batch, sn, hkv, d});
      give(&tessera_attention::v_new, v_new, dtype, {batch, sn, hkv, d_v});
    }
    if (appends && random.one_in(2)) {
      const std::int64_t half = small(static_cast<int>(d / 2)), positions = capacity + sq + small(2);
      give(&tessera_attention::rotary_cos, cos, dtype, {positions, half});
      give(&tessera_attention::rotary_sin, sin, dtype, {positions, half});
      if (random.one_in(2)) args.flags |= TESSERA_ROTARY_INTERLEAVED;
      if (random.one_in(3)) {
        give(&tessera_attention::rotary_seqlens, rotary, i32, {batch});
        lengths(rotary, batch, capacity - sn);
      }
    }
    if (cache_rows >= 0) {
      give(&tessera_attention::cache_batch_idx, rows_of_cache, i32, {batch});
      auto* row = reinterpret_cast<std::int32_t*>(rows_of_cache.bytes.data());
      for (std::int64_t b = 0; b < batch; ++b) {
        row[b] = static_cast<std::int32_t>(b + cache_rows - batch);
        if (random.one_in(100)) row[b] = static_cast<std::int32_t>(random.below(20)) - 10;
      }
    }
    if (decode && random.one_in(4)) {
      give(&tessera_attention::leftpad_k, leftpad, i32, {batch});
      lengths(leftpad, batch, 2 * capacity);
    }
    if (decode ? random.one_in(3) : random.one_in(300)) give(&tessera_attention::status, status, i32, {batch});
    if (decode ? random.one_in(4) : random.one_in(300)) args.flags |= TESSERA_BATCH_INVARIANT;
    if (paged) {
      give(&tessera_attention::page_table, pages, i32, {batch, table});
      auto* page = reinterpret_cast<std::int32_t*>(pages.bytes.data());
      for (std::size_t i = 0; i < 64; ++i) {
        page[i] = static_cast<std::int32_t>(random.below(static_cast<std::uint64_t>(num_pages)));
        if (random.one_in(200)) page[i] = static_cast<std::int32_t>(random.below(100)) - 50;
      }
    }
    if (random.one_in(2)) args.flags |= TESSERA_CAUSAL;
    if (random.one_in(50)) args.flags |= static_cast<std::uint32_t>(1u << random.below(32));
    args.alignment = static_cast<tessera_alignment>(random.one_in(100) ? 3
                                                    : decode           ? 2 * random.below(2)
                                                                       : random.below(3));
    if (random.one_in(3)) args.window_left = small(8) - (random.one_in(50) ? 4 : 0);
    if (random.one_in(3)) args.window_right = random.one_in(20) ? std::numeric_limits<std::int64_t>::max() : small(8);
    if (random.one_in(6))
      args.attention_chunk =
          random.one_in(20) ? std::numeric_limits<std::int64_t>::max() : small(12) - (random.one_in(50) ? 4 : 0);
    constexpr float kScales[] = {0.0f, 0.5f, -1.0f, 1e4f, NAN, INFINITY};
    if (random.one_in(5)) args.scale = random.pick(kScales);
    if (random.one_in(5)) args.softcap = random.one_in(20) ? -1.0f : 2.0f;
    if (random.one_in(50)) args.max_seqlen_q = small(20) - 5;
    if (random.one_in(300)) args.struct_size = random.below(sizeof given);
    if (random.one_in(300)) args.struct_size = sizeof args + 8 * random.below(32);
    if (random.one_in(600)) given.newer[random.below(sizeof given.newer)] = 1;

    judge(op, args, backward);
  }

  // Runs it, and checks that an accepted call stays within its outputs and a refused one writes nothing.
  void judge(tessera_attention_op op, const tessera_attention& args, bool backward) {
    Buffer* outputs[] = {&out, &lse, &dq, &dk, &dv, &status};
    for (Buffer* b : outputs) std::memset(b->bytes.data(), kPoison, kArena);
    const std::vector<std::uint8_t> k_before = k.bytes, v_before = v.bytes;
    if (backward) {
      fill(out);
      fill(lse);
    }

    std::size_t bytes = 0;
    tessera_status status = tessera_attention_workspace(op, &args, &bytes);
    if (status == TESSERA_OK) {
      for (const tessera_tensor* t : {args.q,
                                      args.k,
                                      args.v,
                                      args.out,
                                      args.lse,
                                      args.dout,
                                      args.dlse,
                                      args.dq,
                                      args.dk,
                                      args.dv,
                                      args.alibi_slopes,
                                      args.cu_seqlens_q,
                                      args.cu_seqlens_k,
                                      args.cache_seqlens,
                                      args.page_table,
                                      args.k_new,
                                      args.v_new,
                                      args.rotary_cos,
                                      args.rotary_sin,
                                      args.rotary_seqlens,
                                      args.cache_batch_idx,
                                      args.leftpad_k,
                                      args.status}) {
        if (t != nullptr && reach(*t) > kArena) return;  // accepted, but this program has no such memory
      }
      if (bytes > scratch.size()) fail("a small problem asks for a large workspace");
      status = tessera_attention_run(op, &args, scratch.data(), bytes, nullptr);
      if (status != TESSERA_OK) fail("the workspace call accepted what the run refuses");
      ++accepted;
      check_canaries(args, backward);
      expect_cache(args, args.k, k, k_before);
      expect_cache(args, args.v, v, v_before);
      return;
    }
    if (k.bytes != k_before || v.bytes != v_before) fail("a refused call wrote to k or v");
    ++refused;
    if (tessera_attention_run(op, &args, scratch.data(), scratch.size(), nullptr) != status) fail("two answers");
    if (tessera_last_error()[0] == '\0') fail("a refusal without a message");
    if (status == TESSERA_INTERNAL) fail("an internal error");
    for (Buffer* b : outputs) {
      if (backward && (b == &out || b == &lse)) continue;
      expect_poison(*b, 0);
    }
  }

  // What lies beyond a tensor's last element must be as it was.
  void check_canaries(const tessera_attention& args, bool backward) {
    const auto beyond = [&](const tessera_tensor* t, Buffer& buffer) {
      if (t != nullptr) expect_poison(buffer, reach(*t));
    };
    if (!backward) {
      beyond(args.out, out);
      beyond(args.lse, lse);
      beyond(args.status, status);
      return;
    }
    beyond(args.dq, dq);
    beyond(args.dk, dk);
    beyond(args.dv, dv);
  }

  // k and v are as they were, or, if keys were appended, as they were behind their last element.
  static void expect_cache(const tessera_attention& args, const tessera_tensor* t, const Buffer& buffer,
                           const std::vector<std::uint8_t>& before) {
    const std::size_t from = args.k_new != nullptr ? reach(*t) : 0;
    if (std::memcmp(buffer.bytes.data() + from, before.data() + from, kArena - from) != 0) {
      fail("a call wrote to k or v where nothing is appended");
    }
  }

  void expect_poison(const Buffer& buffer, std::size_t from) {
    for (std::size_t i = from; i < kArena; ++i) {
      if (buffer.bytes[i] != kPoison) fail(from == 0 ? "a refused call wrote" : "a call wrote past its output");
    }
  }
};

}  // namespace

int main(int argc, char** argv) {
  double seconds = 5;
  std::uint64_t seed = 1;
  std::uint64_t calls = std::numeric_limits<std::uint64_t>::max();
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string option = argv[i];
    if (option == "--seconds") seconds = std::atof(argv[i + 1]);
    if (option == "--seed") seed = std::strtoull(argv[i + 1], nullptr, 10);
    if (option == "--calls") calls = std::strtoull(argv[i + 1], nullptr, 10);
  }
  tessera_set_num_threads(1);
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  Fuzzer fuzzer(seed);
  std::uint64_t done = 0;
  for (; done < calls && std::chrono::steady_clock::now() < end; ++done) fuzzer.one_call();
  std::printf("api_fuzz: %llu calls from seed %llu: %llu accepted and run, %llu refused\n",
              static_cast<unsigned long long>(done), static_cast<unsigned long long>(seed),
              static_cast<unsigned long long>(fuzzer.accepted), static_cast<unsigned long long>(fuzzer.refused));
  // A fuzz run in which everything is refused, or nothing, tests nothing.
  return fuzzer.accepted * 20 > done && fuzzer.refused * 20 > done ? 0 : 1;
}
