#include "emulated.h"

#include <ucontext.h>

#include <algorithm>
#include <array>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <utility>
#include <vector>

namespace tessera {

alignas(1024) unsigned char memory[232448];

namespace emulated {
namespace {

constexpr std::size_t kStack = std::size_t{128} << 10;
constexpr int kQueues = 2;

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool done = false;
  std::array<std::vector<std::function<void()>>, kQueues> open;
  std::array<std::deque<std::vector<std::function<void()>>>, kQueues> groups;
};

struct Warp {
  int arrived = 0;
  unsigned long passed = 0;
  float values[32];
  unsigned addresses[32];
};

struct Mbarrier {
  long arrivals, missing, bytes;
  unsigned long completed;
};

struct NamedBarrier {
  int arrived = 0;
  unsigned long passed = 0;
};

struct Cta {
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<Warp> warps;
  std::map<int, NamedBarrier> barriers;
  std::map<unsigned, Mbarrier> mbarriers;
  std::vector<std::function<void()>> loads;  // on their way
  ucontext_t scheduler;
  std::mt19937 random;
  unsigned long progress = 0;
  const std::function<void()>* kernel = nullptr;
  const char* wrong = nullptr;
};
Cta* cta = nullptr;

Fiber& fiber() { return *cta->fibers[threadIdx.x]; }
Warp& warp() { return cta->warps[threadIdx.x / 32]; }
bool one_in(unsigned n) { return cta->random() % n == 0; }

void fiber_main() {
  (*cta->kernel)();
  for (int queue = 0; queue < kQueues; ++queue) wait(static_cast<Queue>(queue), 0);
  fiber().done = true;
  ++cta->progress;
}

std::unique_ptr<Fiber> new_fiber() {
  auto f = std::make_unique<Fiber>();
  f->stack = std::make_unique<char[]>(kStack);
  getcontext(&f->context);
  f->context.uc_stack.ss_sp = f->stack.get();
  f->context.uc_stack.ss_size = kStack;
  f->context.uc_link = &cta->scheduler;
  makecontext(&f->context, fiber_main, 0);
  return f;
}

void resume(unsigned thread) {
  if (cta->fibers[thread]->done) return;
  threadIdx.x = thread;
  swapcontext(&cta->scheduler, &cta->fibers[thread]->context);
}

void complete_if_due(Mbarrier& m) {
  if (m.missing > 0 || m.bytes != 0) return;
  m.missing = m.arrivals;
  ++m.completed;
  ++cta->progress;
}

// Byte address of an element of a box: rows of 128 bytes, whose 16-byte chunks are permuted within eight rows.
unsigned in_box(unsigned box, int row, int column) {
  const unsigned plain = box + static_cast<unsigned>(row * 128 + column * 2);
  return plain ^ (plain >> 7 & 7) << 4;
}

template <class Move>
void for_each_of_box(const Tensor& t, unsigned box, int x, int y, int z, const Move& move) {
  for (int row = 0; row < t.box_rows; ++row) {
    for (int column = 0; column < 64; ++column) {
      const bool exists = x + column >= 0 && x + column < t.columns && y + row >= 0 && y + row < t.rows && z < t.layers;
      unsigned short* element = exists ? t.data + z * t.layer_stride + (y + row) * t.row_stride + x + column : nullptr;
      move(memory + in_box(box, row, column), element);
    }
  }
}

const char* run_one() {
  std::vector<unsigned> order(cta->warps.size());
  for (unsigned w = 0; w < order.size(); ++w) order[w] = w;
  int idle = 0;
  const auto runs = [](const auto& f) { return !f->done; };
  while (cta->wrong == nullptr && std::any_of(cta->fibers.begin(), cta->fibers.end(), runs)) {
    const unsigned long before = cta->progress;
    std::shuffle(order.begin(), order.end(), cta->random);
    for (const unsigned w : order) {
      if (one_in(3)) continue;  // it falls behind
      for (unsigned lane = 0; lane < 32; ++lane) resume(w * 32 + lane);
    }
    while (!cta->loads.empty() && one_in(2)) {
      std::swap(cta->loads[cta->random() % cta->loads.size()], cta->loads.back());
      const auto arrive = std::move(cta->loads.back());
      cta->loads.pop_back();
      arrive();
    }
    idle = cta->progress == before && cta->loads.empty() ? idle + 1 : 0;
    if (idle > 200) return "threads wait for each other";
  }
  if (cta->wrong != nullptr) return cta->wrong;
  return cta->loads.empty() ? nullptr : "nobody waited for a load";
}

}  // namespace

const char* run(unsigned ctas, int threads, unsigned seed, const std::function<void()>& kernel) {
  gridDim = {ctas, 1, 1};
  for (unsigned index = 0; index < ctas; ++index) {
    blockIdx = {index, 0, 0};
    Cta own;
    cta = &own;
    own.kernel = &kernel;
    own.random.seed(seed + index);
    own.warps.resize(static_cast<std::size_t>(threads / 32));
    std::fill(std::begin(memory), std::end(memory), static_cast<unsigned char>(0xff));  // NaN
    for (int thread = 0; thread < threads; ++thread) own.fibers.push_back(new_fiber());
    if (const char* wrong = run_one()) return wrong;
  }
  return nullptr;
}

void wait_until(const std::function<bool()>& holds) {
  const unsigned thread = threadIdx.x;
  while (!holds()) {
    swapcontext(&cta->fibers[thread]->context, &cta->scheduler);
    threadIdx.x = thread;
  }
}

void sync_warp() {
  Warp& w = warp();
  const unsigned long now = w.passed;
  if (++w.arrived == 32) {
    w.arrived = 0;
    ++w.passed;
    ++cta->progress;
  }
  wait_until([&] { return w.passed != now; });
}

float shuffle(float value, int lane) {
  Warp& w = warp();
  w.values[threadIdx.x % 32] = value;
  sync_warp();
  const float other = w.values[lane];
  sync_warp();
  return other;
}

void named_barrier(int barrier, int threads, bool waits) {
  NamedBarrier& b = cta->barriers[barrier];
  const unsigned long now = b.passed;
  if (++b.arrived == threads) {
    b.arrived = 0;
    ++b.passed;
    ++cta->progress;
  }
  if (waits) wait_until([&] { return b.passed != now; });
}

void mbarrier_init(unsigned mbarrier, unsigned arrivals) { cta->mbarriers[mbarrier] = {arrivals, arrivals, 0, 0}; }

void mbarrier_arrive(unsigned mbarrier, unsigned expected_bytes) {
  Mbarrier& m = cta->mbarriers.at(mbarrier);
  if (m.missing == 0) cta->wrong = "more arrivals than an mbarrier expects";
  m.bytes += expected_bytes;
  --m.missing;
  complete_if_due(m);
}

bool mbarrier_has_completed(unsigned mbarrier, unsigned parity) {
  return (cta->mbarriers.at(mbarrier).completed & 1) != parity;
}

void load(const Tensor& from, unsigned to, unsigned mbarrier, int x, int y, int z) {
  const auto arrive = [from, to, mbarrier, x, y, z] {
    for_each_of_box(from, to, x, y, z, [](unsigned char* in_shared, const unsigned short* element) {
      const unsigned short value = element == nullptr ? static_cast<unsigned short>(0) : *element;
      std::memcpy(in_shared, &value, sizeof value);
    });
    Mbarrier& m = cta->mbarriers.at(mbarrier);
    m.bytes -= from.box_rows * 128;
    complete_if_due(m);
  };
  if (one_in(2)) {
    arrive();
  } else {
    cta->loads.push_back(arrive);
  }
}

void store(const Tensor& to, unsigned from, int x, int y, int z) {
  for_each_of_box(to, from, x, y, z, [](const unsigned char* in_shared, unsigned short* element) {
    if (element != nullptr) std::memcpy(element, in_shared, sizeof *element);
  });
}

// Lane 8 i + j has the address of row j of matrix i; lane l gets, or has, elements 2 (l % 4) and the next of row l / 4.
void ldmatrix(unsigned (&r)[4], unsigned address) {
  Warp& w = warp();
  const unsigned lane = threadIdx.x % 32;
  w.addresses[lane] = address;
  sync_warp();
  for (unsigned i = 0; i < 4; ++i) std::memcpy(&r[i], memory + w.addresses[i * 8 + lane / 4] + lane % 4 * 4, 4);
  sync_warp();
}
void stmatrix(unsigned address, const unsigned (&r)[4]) {
  Warp& w = warp();
  const unsigned lane = threadIdx.x % 32;
  w.addresses[lane] = address;
  sync_warp();
  for (unsigned i = 0; i < 4; ++i) std::memcpy(memory + w.addresses[i * 8 + lane / 4] + lane % 4 * 4, &r[i], 4);
  sync_warp();
}

void defer(Queue queue, std::function<void()> work) {
  fiber().open[static_cast<std::size_t>(queue)].push_back(std::move(work));
}
void commit(Queue queue) {
  auto& open = fiber().open[static_cast<std::size_t>(queue)];
  fiber().groups[static_cast<std::size_t>(queue)].push_back(std::move(open));
  open.clear();
}
void wait(Queue queue, int pending) {
  auto& groups = fiber().groups[static_cast<std::size_t>(queue)];
  while (groups.size() > static_cast<std::size_t>(pending)) {
    for (const auto& work : groups.front()) work();
    groups.pop_front();
  }
}

}  // namespace emulated
}  // namespace tessera
