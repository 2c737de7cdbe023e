#include "emulated.h"

#include <ucontext.h>

#include <algorithm>
#include <array>
#include <deque>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

namespace tessera {

unsigned char memory[1];

namespace emulated {
namespace {

constexpr std::size_t kStack = std::size_t{128} << 10, kShared = 232448;
constexpr int kQueues = 2;

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool done = false;
  unsigned long cluster_arrivals = 0;
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
  std::vector<unsigned char> shared = std::vector<unsigned char>(kShared, 0xff);  // NaN
};

struct Cluster {
  std::vector<Cta> ctas;
  std::vector<std::function<void()>> loads;  // on their way
  ucontext_t scheduler;
  std::mt19937 random;
  unsigned long progress = 0, arrivals = 0;
  const std::function<void()>* kernel = nullptr;
  const char* wrong = nullptr;
};
Cluster* cluster = nullptr;
Cta* cta = nullptr;  // of the fiber that runs

Fiber& fiber() { return *cta->fibers[threadIdx.x]; }
Warp& warp() { return cta->warps[threadIdx.x / 32]; }
bool one_in(unsigned n) { return cluster->random() % n == 0; }

void fiber_main() {
  (*cluster->kernel)();
  for (int queue = 0; queue < kQueues; ++queue) wait(static_cast<Queue>(queue), 0);
  fiber().done = true;
  ++cluster->progress;
}

std::unique_ptr<Fiber> new_fiber() {
  auto f = std::make_unique<Fiber>();
  f->stack = std::make_unique<char[]>(kStack);
  getcontext(&f->context);
  f->context.uc_stack.ss_sp = f->stack.get();
  f->context.uc_stack.ss_size = kStack;
  f->context.uc_link = &cluster->scheduler;
  makecontext(&f->context, fiber_main, 0);
  return f;
}

struct Position {
  Cta* cta;
  unsigned block, thread;
};
Position position() { return {cta, blockIdx.x, threadIdx.x}; }
void move_to(const Position& at) {
  cta = at.cta;
  blockIdx.x = at.block;
  threadIdx.x = at.thread;
}

void complete_if_due(Mbarrier& m) {
  if (m.missing > 0 || m.bytes != 0) return;
  m.missing = m.arrivals;
  ++m.completed;
  ++cluster->progress;
}
void arrive(Mbarrier& m, unsigned expected_bytes) {
  if (m.missing == 0) cluster->wrong = "more arrivals than an mbarrier expects";
  m.bytes += expected_bytes;
  --m.missing;
  complete_if_due(m);
}

// What lies outside is moved to the end, and reported.
unsigned char* shared_of(Cta& of, unsigned address, unsigned bytes) {
  if (address + bytes <= kShared) return of.shared.data() + address;
  cluster->wrong = "an address beyond shared memory";
  return of.shared.data() + kShared - bytes;
}
Mbarrier& mbarrier_of(Cta& of, unsigned address) {
  if (of.mbarriers.count(address) == 0) cluster->wrong = "an mbarrier that was not initialised";
  return of.mbarriers[address];
}

// Byte address of an element of a box: rows of 128 bytes, whose 16-byte chunks are permuted within eight rows.
unsigned in_box(unsigned box, int row, int column) {
  const unsigned plain = box + static_cast<unsigned>(row * 128 + column * 2);
  return plain ^ (plain >> 7 & 7) << 4;
}

template <class Move>
void for_each_of_box(const Tensor& t, Cta& in, unsigned box, int x, int y, int z, const Move& move) {
  for (int row = 0; row < t.box_rows; ++row) {
    for (int column = 0; column < 64; ++column) {
      const bool exists = x + column >= 0 && x + column < t.columns && y + row >= 0 && y + row < t.rows && z < t.layers;
      unsigned short* element = exists ? t.data + z * t.layer_stride + (y + row) * t.row_stride + x + column : nullptr;
      move(shared_of(in, in_box(box, row, column), 2), element);
    }
  }
}

bool is_running() {
  for (const Cta& one : cluster->ctas) {
    for (const auto& f : one.fibers) {
      if (!f->done) return true;
    }
  }
  return false;
}

// Each warp that does not fall behind, once, in random order; then some of the loads.
void run_round(unsigned first_block) {
  const auto warps = static_cast<unsigned>(cluster->ctas[0].warps.size());
  std::vector<unsigned> order(warps * cluster->ctas.size());
  std::iota(order.begin(), order.end(), 0u);
  std::shuffle(order.begin(), order.end(), cluster->random);
  for (const unsigned w : order) {
    if (one_in(3)) continue;
    for (unsigned lane = 0; lane < 32; ++lane) {
      move_to({&cluster->ctas[w / warps], first_block + w / warps, w % warps * 32 + lane});
      if (!fiber().done) swapcontext(&cluster->scheduler, &fiber().context);
    }
  }
  while (!cluster->loads.empty() && one_in(2)) {
    std::swap(cluster->loads[cluster->random() % cluster->loads.size()], cluster->loads.back());
    const auto arrives = std::move(cluster->loads.back());
    cluster->loads.pop_back();
    arrives();
  }
}

const char* run_one(unsigned first_block) {
  int idle = 0;
  while (cluster->wrong == nullptr && is_running()) {
    const unsigned long before = cluster->progress;
    run_round(first_block);
    idle = cluster->progress == before && cluster->loads.empty() ? idle + 1 : 0;
    if (idle > 200) return "threads wait for each other";
  }
  if (cluster->wrong != nullptr) return cluster->wrong;
  return cluster->loads.empty() ? nullptr : "nobody waited for a load";
}

}  // namespace

const char* run(unsigned ctas, int threads, int cluster_size, unsigned seed, const std::function<void()>& kernel) {
  gridDim = {ctas, 1, 1};
  for (unsigned block = 0; block < ctas; block += static_cast<unsigned>(cluster_size)) {
    Cluster own;
    cluster = &own;
    own.kernel = &kernel;
    own.random.seed(seed + block);
    own.ctas.resize(static_cast<std::size_t>(cluster_size));
    for (Cta& one : own.ctas) {
      one.warps.resize(static_cast<std::size_t>(threads / 32));
      for (int thread = 0; thread < threads; ++thread) one.fibers.push_back(new_fiber());
    }
    if (const char* wrong = run_one(block)) return wrong;
  }
  return nullptr;
}

unsigned char* shared(unsigned address, unsigned bytes) { return shared_of(*cta, address, bytes); }
unsigned cluster_rank() { return static_cast<unsigned>(cta - cluster->ctas.data()); }
void cluster_arrive() {
  ++fiber().cluster_arrivals;
  ++cluster->arrivals;
  ++cluster->progress;
}
void cluster_wait() {
  const unsigned long all = fiber().cluster_arrivals * cluster->ctas.size() * cta->fibers.size();
  wait_until([&] { return cluster->arrivals >= all; });
}

void wait_until(const std::function<bool()>& holds) {
  const Position here = position();
  while (!holds()) {
    swapcontext(&fiber().context, &cluster->scheduler);
    move_to(here);
  }
}

void sync_warp() {
  Warp& w = warp();
  const unsigned long now = w.passed;
  if (++w.arrived == 32) {
    w.arrived = 0;
    ++w.passed;
    ++cluster->progress;
  }
  wait_until([&] { return w.passed != now; });
}

void sync_threads() { named_barrier(0, static_cast<int>(cta->fibers.size()), true); }

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
    ++cluster->progress;
  }
  if (waits) wait_until([&] { return b.passed != now; });
}

void mbarrier_init(unsigned mbarrier, unsigned arrivals) { cta->mbarriers[mbarrier] = {arrivals, arrivals, 0, 0}; }

void mbarrier_arrive(unsigned mbarrier, unsigned expected_bytes) {
  arrive(mbarrier_of(*cta, mbarrier), expected_bytes);
}
void mbarrier_arrive_at(unsigned mbarrier, unsigned rank) { arrive(mbarrier_of(cluster->ctas[rank], mbarrier), 0); }

bool mbarrier_has_completed(unsigned mbarrier, unsigned parity) {
  return (mbarrier_of(*cta, mbarrier).completed & 1) != parity;
}

void load(const Tensor& from, unsigned to, unsigned mbarrier, unsigned ctas, int x, int y, int z) {
  for (unsigned rank = 0; rank < cluster->ctas.size(); ++rank) {
    if ((ctas >> rank & 1) == 0) continue;
    Cta& into = cluster->ctas[rank];
    const auto arrives = [from, to, mbarrier, &into, x, y, z] {
      for_each_of_box(from, into, to, x, y, z, [](unsigned char* in_shared, const unsigned short* element) {
        const unsigned short value = element == nullptr ? static_cast<unsigned short>(0) : *element;
        std::memcpy(in_shared, &value, sizeof value);
      });
      Mbarrier& m = mbarrier_of(into, mbarrier);
      m.bytes -= from.box_rows * 128;
      complete_if_due(m);
    };
    if (one_in(2)) {
      arrives();
    } else {
      cluster->loads.push_back(arrives);
    }
  }
}

void store(const Tensor& to, unsigned from, int x, int y, int z) {
  for_each_of_box(to, *cta, from, x, y, z, [](const unsigned char* in_shared, unsigned short* element) {
    if (element != nullptr) std::memcpy(element, in_shared, sizeof *element);
  });
}

// Lane 8 i + j has the address of row j of matrix i; lane l gets, or has, elements 2 (l % 4) and the next of row l / 4.
void ldmatrix(unsigned (&r)[4], unsigned address) {
  Warp& w = warp();
  const unsigned lane = threadIdx.x % 32;
  w.addresses[lane] = address;
  sync_warp();
  for (unsigned i = 0; i < 4; ++i) std::memcpy(&r[i], shared(w.addresses[i * 8 + lane / 4] + lane % 4 * 4, 4), 4);
  sync_warp();
}
void stmatrix(unsigned address, const unsigned (&r)[4]) {
  Warp& w = warp();
  const unsigned lane = threadIdx.x % 32;
  w.addresses[lane] = address;
  sync_warp();
  for (unsigned i = 0; i < 4; ++i) std::memcpy(shared(w.addresses[i * 8 + lane / 4] + lane % 4 * 4, 4), &r[i], 4);
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
