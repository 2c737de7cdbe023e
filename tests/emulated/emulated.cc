#include "emulated.h"

#include <setjmp.h>
#include <signal.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

tessera::emulated::Index3 threadIdx, blockIdx, blockDim, gridDim;

namespace tessera::emulated {
namespace {

constexpr std::size_t kStack = std::size_t{256} << 10;
constexpr unsigned kStaticShared = 64u << 10, kRankShift = 24;
constexpr int kQueues = 3, kMostExchanged = 8;
constexpr int kAllThreads = -1;  // the barrier of __syncthreads

struct Cta;

// To shared memory, by a thread that has not fenced since: the async view lacks it.
struct Written {
  Cta* to;
  unsigned address, bytes;
};

// A thread of a CTA.
struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool done = false;
  bool (*holds)(const void*) = nullptr;  // what it waits for; null: nothing
  const void* of = nullptr;
  unsigned long exchanges = 0;                                   // between the lanes of its warp
  unsigned delays = 0, arrivals = 0;                             // points at which it might have fallen behind
  long arrived_in = -1;                                          // phase of the cluster's barrier
  std::array<std::vector<std::function<void()>>, kQueues> open;  // asynchronous work, not committed yet
  std::array<std::deque<std::vector<std::function<void()>>>, kQueues> groups;  // committed, not done yet
  std::vector<Written> unfenced;
};

struct Warp {
  int arrived = 0;
  unsigned long passed = 0;
  unsigned exchanged[2][32 * kMostExchanged];
};

struct Mbarrier {
  long arrivals;            // that a phase expects
  long missing, bytes;      // of this phase: arrivals and bytes still to come
  unsigned long completed;  // phases
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
  std::vector<unsigned char> shared, async_view;
  std::vector<Written> unfenced;  // by copies whose threads did not wait for them
  std::map<const void*, unsigned> statics;
  unsigned static_bytes = 0;
  Index3 block;
  int running = 0;
};

struct Cluster {
  std::vector<Cta> ctas;
  std::vector<std::function<void()>> loads;  // on their way
  int running = 0, arrived = 0;              // threads
  long phase = 0;
};

}  // namespace

struct Machine {
  Launch launch;
  std::function<void()> kernel;
  unsigned next = 0;  // CTA to start
  bool preceding_has_ended = false;
  std::vector<std::unique_ptr<Cluster>> clusters;  // that run
  ucontext_t scheduler;
  std::mt19937 random;
  unsigned long progress = 0;
  const char* wrong = nullptr;
};

namespace {

Machine* machine = nullptr;
std::vector<std::unique_ptr<char[]>> stacks;  // that no fiber has
Cluster* cluster = nullptr;                   // of the fiber that runs, as the next
Cta* cta = nullptr;
Fiber* fiber = nullptr;
Cta* copies_into = nullptr;  // while copies run that nobody waited for

Warp& warp() { return cta->warps[threadIdx.x / 32]; }
void report(const char* wrong) {
  if (machine->wrong == nullptr) machine->wrong = wrong;
}
bool one_in(unsigned n) { return machine->random() % n == 0; }

void complete_if_due(NamedBarrier& b, int threads) {
  if (b.arrived < threads || b.arrived == 0) return;
  b.arrived = 0;
  ++b.passed;
  ++machine->progress;
}

void complete_if_due(Cluster& c) {
  if (c.arrived < c.running || c.running == 0) return;
  c.arrived = 0;
  ++c.phase;
  ++machine->progress;
}

void fiber_main() {
  machine->kernel();
  for (int queue = 0; queue < kQueues; ++queue) wait(static_cast<Queue>(queue), 0);
  fiber->done = true;
  --cta->running;
  // Neither __syncthreads nor the cluster's barrier waits for threads that have exited.
  complete_if_due(cta->barriers[kAllThreads], cta->running);
  --cluster->running;
  if (fiber->arrived_in == cluster->phase) --cluster->arrived;
  complete_if_due(*cluster);
  ++machine->progress;
}

void start(Fiber& f) {
  getcontext(&f.context);
  f.context.uc_stack.ss_sp = f.stack.get();
  f.context.uc_stack.ss_size = kStack;
  f.context.uc_link = &machine->scheduler;
  makecontext(&f.context, fiber_main, 0);
}

std::unique_ptr<Fiber> new_fiber() {
  auto f = std::make_unique<Fiber>();
  if (stacks.empty()) stacks.emplace_back(new char[kStack]);  // not zeroed: most of it is never touched
  f->stack = std::move(stacks.back());
  stacks.pop_back();
  start(*f);
  return f;
}

void switch_to_scheduler() {
  Fiber* const own = fiber;
  swapcontext(&own->context, &machine->scheduler);
}

void complete_if_due(Mbarrier& m) {
  if (m.missing > 0 || m.bytes != 0) return;
  m.missing = m.arrivals;
  ++m.completed;
  ++machine->progress;
}
void arrive(Mbarrier& m, unsigned expected_bytes) {
  if (m.missing == 0) report("more arrivals than an mbarrier expects");
  m.bytes += expected_bytes;
  --m.missing;
  complete_if_due(m);
}
void complete_bytes(Mbarrier& m, unsigned bytes) {
  m.bytes -= bytes;
  complete_if_due(m);
}

unsigned shared_bytes(const Cta& of) { return machine->launch.shared_bytes + of.static_bytes; }

// An access that lies outside or is not aligned is moved, and reported.
unsigned checked(const Cta& of, unsigned address, unsigned bytes) {
  if (std::size_t{address} + bytes > shared_bytes(of)) {
    report("an address beyond shared memory");
    return 0;
  }
  if (of.running == 0) report("an access to the shared memory of a CTA that has exited");
  const bool is_vector = bytes <= 16 && (bytes & (bytes - 1)) == 0;
  if (is_vector && address % bytes != 0) report("a misaligned address in shared memory");
  return address;
}
unsigned char* shared_of(Cta& of, unsigned address, unsigned bytes) {
  return of.shared.data() + checked(of, address, bytes);
}

// What the async proxy writes, everybody sees.
void write_both(Cta& to, unsigned address, const void* from, unsigned bytes) {
  address = checked(to, address, bytes);
  std::memcpy(to.shared.data() + address, from, bytes);
  std::memcpy(to.async_view.data() + address, from, bytes);
}

void publish(std::vector<Written>& written) {
  for (const Written& w : written) {
    std::memcpy(w.to->async_view.data() + w.address, w.to->shared.data() + w.address, w.bytes);
  }
  written.clear();
}
void write(Cta& to, unsigned address, const void* from, unsigned bytes) {
  constexpr std::size_t kMost = 1 << 14;  // of threads that never fence
  address = checked(to, address, bytes);
  std::memcpy(to.shared.data() + address, from, bytes);
  auto& written = copies_into == nullptr ? fiber->unfenced : copies_into->unfenced;
  if (written.size() == kMost) publish(written);
  written.push_back({&to, address, bytes});
}
Mbarrier& mbarrier_of(Cta& of, unsigned address) {
  if (of.mbarriers.count(address) == 0) report("an mbarrier that was not initialised");
  if (of.running == 0) report("an arrival at a CTA that has exited");
  return of.mbarriers[address];
}
Cta& cta_at(unsigned address) {
  const unsigned rank = address >> kRankShift;
  if (rank > 0 && rank <= cluster->ctas.size()) return cluster->ctas[rank - 1];
  report("an address that is not one of the cluster");
  return *cta;
}
unsigned within_cta(unsigned address) { return address & ((1u << kRankShift) - 1); }

int bytes_of_box(const Tensor& t) { return t.box[0] * t.box[1] * t.box[2] * t.box[3] * 2; }

// Rows of box[0] columns; their 16-byte chunks are permuted by the bits of the address above.
template <class Move>
void for_each_of_box(const Tensor& t, Cta& in, unsigned to, const int (&at)[4], const Move& move) {
  const unsigned mask = static_cast<unsigned>(t.box[0]) / 8 - 1;
  unsigned plain = to;
  int i[4];
  for (i[3] = 0; i[3] < t.box[3]; ++i[3]) {
    for (i[2] = 0; i[2] < t.box[2]; ++i[2]) {
      for (i[1] = 0; i[1] < t.box[1]; ++i[1]) {
        for (i[0] = 0; i[0] < t.box[0]; ++i[0], plain += 2) {
          unsigned short* element = t.data;
          bool exists = true;
          for (int axis = 0; axis < 4; ++axis) {
            const long x = at[axis] + i[axis];
            exists = exists && x >= 0 && x < t.extents[axis];
            element += x * t.strides[axis];
          }
          move(checked(in, plain ^ (plain >> 7 & mask) << 4, 2), exists ? element : nullptr);
        }
      }
    }
  }
}

void start_cluster(unsigned first) {
  const Launch& launch = machine->launch;
  auto own = std::make_unique<Cluster>();
  own->ctas.resize(static_cast<std::size_t>(launch.cluster));
  own->running = launch.cluster * launch.threads;
  for (Cta& one : own->ctas) {
    const Index3& grid = launch.grid;
    one.block = {first % grid.x, first / grid.x % grid.y, first / grid.x / grid.y};
    ++first;
    one.shared.assign(launch.shared_bytes + kStaticShared, 0xff);  // NaN
    one.async_view = one.shared;
    one.warps.resize(static_cast<std::size_t>((launch.threads + 31) / 32));
    one.running = launch.threads;
    for (int thread = 0; thread < launch.threads; ++thread) one.fibers.push_back(new_fiber());
  }
  machine->clusters.push_back(std::move(own));
}

void run_fiber(unsigned thread) {
  fiber = cta->fibers[thread].get();
  if (fiber->done) return;
  threadIdx = {thread, 0, 0};
  blockIdx = cta->block;
  if (fiber->holds != nullptr && !fiber->holds(fiber->of)) return;
  fiber->holds = nullptr;
  swapcontext(&machine->scheduler, &fiber->context);
}

// Each warp that does not fall behind, once, in random order; then some of the loads.
void run_round() {
  const auto warps = static_cast<unsigned>(machine->clusters[0]->ctas[0].warps.size());
  const auto ctas = static_cast<unsigned>(machine->launch.cluster);
  std::vector<unsigned> order(warps * ctas * machine->clusters.size());
  std::iota(order.begin(), order.end(), 0u);
  std::shuffle(order.begin(), order.end(), machine->random);
  for (const unsigned w : order) {
    if (one_in(3)) continue;
    cluster = machine->clusters[w / (warps * ctas)].get();
    cta = &cluster->ctas[w / warps % ctas];
    const unsigned first = w % warps * 32;
    for (unsigned lane = 0; lane < 32 && first + lane < cta->fibers.size(); ++lane) run_fiber(first + lane);
  }
  for (const auto& one : machine->clusters) {
    cluster = one.get();
    while (!cluster->loads.empty() && one_in(2)) {
      std::swap(cluster->loads[machine->random() % cluster->loads.size()], cluster->loads.back());
      const auto arrives = std::move(cluster->loads.back());
      cluster->loads.pop_back();
      arrives();
      ++machine->progress;
    }
  }
}

bool is_running(const Cluster& one) {
  return std::any_of(one.ctas.begin(), one.ctas.end(), [](const Cta& of) { return of.running > 0; });
}

void end_clusters() {
  for (auto& one : machine->clusters) {
    if (is_running(*one)) continue;
    if (!one->loads.empty()) report("nobody waited for a load");
    for (Cta& of : one->ctas) {
      for (auto& f : of.fibers) stacks.push_back(std::move(f->stack));
    }
    one.reset();
  }
  std::erase(machine->clusters, nullptr);
}

const char* deadlock() {
  std::string text = "threads wait for each other";
  for (const auto& one : machine->clusters) {
    for (const Cta& of : one->ctas) {
      text += "; CTA " + std::to_string(of.block.x) + ": " + std::to_string(of.running) + " threads";
      for (const auto& [address, m] : of.mbarriers) {
        if (m.missing == m.arrivals && m.bytes == 0) continue;
        text += ", mbarrier " + std::to_string(address) + " lacks " + std::to_string(m.missing) + " arrivals and " +
                std::to_string(m.bytes) + " bytes";
      }
      for (const auto& [number, b] : of.barriers) {
        if (b.arrived > 0) text += ", barrier " + std::to_string(number) + " has " + std::to_string(b.arrived);
      }
    }
  }
  static std::string kept;
  return (kept = text).c_str();
}

// An access to memory that is not mapped ends the launch, not the process.
sigjmp_buf outside_of_memory;
class CatchesFaults {
 public:
  CatchesFaults() {
    const stack_t own = {.ss_sp = stack_.data(), .ss_flags = 0, .ss_size = stack_.size()};
    sigaltstack(&own, &before_);
    struct sigaction action = {};
    action.sa_handler = [](int) { siglongjmp(outside_of_memory, 1); };
    action.sa_flags = SA_ONSTACK;
    for (std::size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &action, &actions_before_[i]);
  }
  ~CatchesFaults() {
    for (std::size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &actions_before_[i], nullptr);
    sigaltstack(&before_, nullptr);
  }

 private:
  static constexpr std::array<int, 2> kSignals = {SIGSEGV, SIGBUS};
  std::vector<char> stack_ = std::vector<char>(std::size_t{64} << 10);
  stack_t before_ = {};
  std::array<struct sigaction, kSignals.size()> actions_before_ = {};
};

// Until nothing happens for some rounds, or everything has ended, or something is wrong.
void run_clusters(int most_idle) {
  Machine& own = *machine;
  const unsigned blocks = gridDim.x * gridDim.y * gridDim.z;
  for (int idle = 0; idle < most_idle && own.wrong == nullptr && (own.next < blocks || !own.clusters.empty());) {
    for (; own.next < blocks && own.clusters.size() < static_cast<std::size_t>(own.launch.at_once);
         own.next += static_cast<unsigned>(own.launch.cluster)) {
      start_cluster(own.next);
    }
    const unsigned long before = own.progress;
    run_round();
    idle = own.progress == before ? idle + 1 : 0;
    end_clusters();
  }
  if (own.wrong == nullptr && own.preceding_has_ended && !own.clusters.empty()) own.wrong = deadlock();
}

void run_here(Machine& of, int most_idle) {
  machine = &of;
  gridDim = of.launch.grid;
  blockDim = {static_cast<unsigned>(of.launch.threads), 1, 1};
  const CatchesFaults catches;
  if (sigsetjmp(outside_of_memory, 1) != 0) {
    of.wrong = kOutsideOfMemory;
  } else {
    run_clusters(most_idle);
  }
}

}  // namespace

Grid::Grid(const Launch& launch, std::function<void()> kernel) : machine_(std::make_unique<Machine>()) {
  machine_->launch = launch;
  machine_->kernel = std::move(kernel);
  machine_->random.seed(launch.seed);
}
Grid::~Grid() = default;
void Grid::start_early() {
  constexpr int kMostIdle = 30;
  run_here(*machine_, kMostIdle);
}
const char* Grid::run() {
  constexpr int kMostIdle = 5000;  // a thread of quantize_fp8 asks 2000 times for CTAs that may not fit beside its own
  machine_->preceding_has_ended = true;
  run_here(*machine_, kMostIdle);
  return machine_->wrong;
}

// Other warps may overtake this one. In half of the launches the lanes of a warp that have come to as many points fall behind
// together; in the others each does so alone, which a GPU may do, too.
void fall_behind_at(unsigned point) {
  const unsigned seed = machine->launch.seed * 0x9e3779b9u;
  const bool alone = (seed >> 31) != 0;
  unsigned hash = seed + point * 0x85ebca6bu + (alone ? threadIdx.x : threadIdx.x / 32) * 0xc2b2ae35u;
  hash = (hash ^ hash >> 15) * 0x2c1b3c6du;
  if ((hash >> 12) % 4 == 0) switch_to_scheduler();
}
void fall_behind() { fall_behind_at(++fiber->delays); }
void fall_behind_after_arrival() {
  fall_behind_at(~++fiber->arrivals);
}  // often one lane's, so not counted with the others

void wait_for_preceding_grid() {
  wait_until([] { return machine->preceding_has_ended; });
}

Window shared_memory() { return {cta->shared.data(), shared_bytes(*cta)}; }
Window async_view() { return {cta->async_view.data(), shared_bytes(*cta)}; }
void load_shared(void* value, unsigned address, unsigned bytes) {
  std::memcpy(value, shared_of(*cta, address, bytes), bytes);
}
void store_shared(unsigned address, const void* value, unsigned bytes) {
  write(copies_into == nullptr ? *cta : *copies_into, address, value, bytes);
}
void fence_async() {
  publish(fiber->unfenced);
  publish(cta->unfenced);
}
void require(bool holds, const char* otherwise) {
  if (!holds) report(otherwise);
}
void* static_shared(const void* site, unsigned bytes) {
  const auto [at, is_new] = cta->statics.emplace(site, cta->static_bytes);
  if (is_new) cta->static_bytes += (bytes + 15) / 16 * 16;
  if (cta->static_bytes > kStaticShared) report("more than 64 KB of static shared memory");
  return shared_of(*cta, machine->launch.shared_bytes + at->second, bytes);
}

void wait(bool (*holds)(const void*), const void* of) {
  fiber->holds = holds;
  fiber->of = of;
  switch_to_scheduler();
}
void yield() { switch_to_scheduler(); }
void progress() { ++machine->progress; }

void sync_warp() {
  Warp& w = warp();
  const unsigned long now = w.passed;
  if (++w.arrived == 32) {
    w.arrived = 0;
    ++w.passed;
    ++machine->progress;
  }
  wait_until([&] { return w.passed != now; });
}

// Two places in turn: who comes to the next but one has seen all lanes come to the next.
void exchange(const unsigned* own, int words, unsigned* all) {
  unsigned* const place = warp().exchanged[fiber->exchanges++ % 2];
  std::copy_n(own, words, place + threadIdx.x % 32 * static_cast<unsigned>(words));
  sync_warp();
  std::copy_n(place, 32 * words, all);
}

void named_barrier(int barrier, int threads, bool waits) {
  NamedBarrier& b = cta->barriers[barrier];
  const unsigned long now = b.passed;
  ++b.arrived;
  complete_if_due(b, threads);
  if (waits) wait_until([&] { return b.passed != now; });
  fall_behind();
}
void sync_threads() { named_barrier(kAllThreads, cta->running, true); }

unsigned cluster_rank() { return static_cast<unsigned>(cta - cluster->ctas.data()); }
void cluster_arrive() {
  fiber->arrived_in = cluster->phase;
  ++cluster->arrived;
  complete_if_due(*cluster);
}
void cluster_wait() {
  wait_until([&] { return cluster->phase > fiber->arrived_in; });
}

void mbarrier_init(unsigned mbarrier, unsigned arrivals) { cta->mbarriers[mbarrier] = {arrivals, arrivals, 0, 0}; }
void mbarrier_arrive(unsigned mbarrier, unsigned expected_bytes) {
  arrive(mbarrier_of(*cta, mbarrier), expected_bytes);
  fall_behind_after_arrival();
}
void mbarrier_arrive_at(unsigned mbarrier, unsigned rank) {
  arrive(mbarrier_of(cluster->ctas[rank], mbarrier), 0);
  fall_behind_after_arrival();
}
bool mbarrier_has_completed(unsigned mbarrier, unsigned parity) {
  return (mbarrier_of(*cta, mbarrier).completed & 1) != parity;
}

void load(const Tensor& from, unsigned to, unsigned mbarrier, unsigned ctas, const int (&at)[4]) {
  for (unsigned rank = 0; rank < cluster->ctas.size(); ++rank) {
    if ((ctas >> rank & 1) == 0) continue;
    Cta& into = cluster->ctas[rank];
    const std::array<int, 4> begin = {at[0], at[1], at[2], at[3]};
    const auto arrives = [from, to, mbarrier, &into, begin] {
      const int at_begin[4] = {begin[0], begin[1], begin[2], begin[3]};
      for_each_of_box(from, into, to, at_begin, [&](unsigned address, const unsigned short* element) {
        const unsigned short value = element == nullptr ? static_cast<unsigned short>(0) : *element;
        write_both(into, address, &value, sizeof value);
      });
      complete_bytes(mbarrier_of(into, mbarrier), static_cast<unsigned>(bytes_of_box(from)));
    };
    if (one_in(2)) {
      arrives();
    } else {
      cluster->loads.push_back(arrives);
    }
  }
}

void store(const Tensor& to, unsigned from, const int (&at)[4]) {
  for_each_of_box(to, *cta, from, at, [](unsigned address, unsigned short* element) {
    if (element != nullptr) std::memcpy(element, cta->async_view.data() + address, sizeof *element);
  });
}

unsigned cluster_address(unsigned address, unsigned rank) { return address | (rank + 1) << kRankShift; }
void store_cluster(unsigned address, const void* value, unsigned bytes) {
  write(cta_at(address), within_cta(address), value, bytes);
}
void copy_to_cluster(unsigned to, unsigned from, unsigned bytes, unsigned mbarrier) {
  Cta &source = *cta, &into = cta_at(to);
  if (&into != &cta_at(mbarrier)) report("a copy that completes at another CTA's mbarrier");
  cluster->loads.push_back([&source, &into, to, from, bytes, mbarrier] {
    write_both(into, within_cta(to), source.async_view.data() + checked(source, from, bytes), bytes);
    complete_bytes(mbarrier_of(into, within_cta(mbarrier)), bytes);
  });
}

void defer(Queue queue, std::function<void()> work) {
  fiber->open[static_cast<std::size_t>(queue)].push_back(std::move(work));
}
void commit(Queue queue) {
  auto& open = fiber->open[static_cast<std::size_t>(queue)];
  fiber->groups[static_cast<std::size_t>(queue)].push_back(std::move(open));
  open.clear();
  if (one_in(2)) wait(queue, 0);
  fall_behind();
}
void wait(Queue queue, int pending) {
  auto& groups = fiber->groups[static_cast<std::size_t>(queue)];
  while (groups.size() > static_cast<std::size_t>(pending)) {
    for (const auto& work : groups.front()) work();
    groups.pop_front();
  }
}
void mbarrier_arrive_after_copies(unsigned mbarrier) {
  std::vector<std::function<void()>> copies;
  auto& groups = fiber->groups[static_cast<std::size_t>(Queue::kCopies)];
  for (auto& group : groups) std::move(group.begin(), group.end(), std::back_inserter(copies));
  groups.clear();
  auto& open = fiber->open[static_cast<std::size_t>(Queue::kCopies)];
  std::move(open.begin(), open.end(), std::back_inserter(copies));
  open.clear();
  cluster->loads.push_back([copies = std::move(copies), &of = *cta, mbarrier] {
    copies_into = &of;
    for (const auto& copy : copies) copy();
    copies_into = nullptr;
    arrive(mbarrier_of(of, mbarrier), 0);
  });
}

}  // namespace tessera::emulated
