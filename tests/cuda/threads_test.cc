// Many threads on one GPU: plans are shared, each thread has tensors of its own and one of a few streams.
#include <thread>

#include "tests/cuda/helpers.h"
#include "verify/check.h"
#include "verify/family.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 16;
constexpr int kStreams = 8;
constexpr int kRuns = 20;

using Plan = std::unique_ptr<tessera_plan, decltype(&tessera_plan_destroy)>;

std::vector<verify::Bytes> written_bytes(verify::Call& call) {
  std::vector<verify::Bytes> all;
  for (const verify::Buffer* b : call.buffers()) {
    if (b->written) all.push_back(b->storage);
  }
  return all;
}

// A case whose runs must give equal bits, with its tensors on the GPU.
struct Running {
  std::unique_ptr<verify::Device> device;
  std::unique_ptr<verify::Trial> trial;
  std::unique_ptr<verify::Call> call;

  Status open(const verify::Case& c) {
    Result<std::unique_ptr<verify::Device>> opened = verify::open_device("cuda");
    if (!opened.ok()) return opened.status();
    device = std::move(*opened);
    trial = c.trial();
    Result<std::unique_ptr<verify::Call>> made = trial->call(*device, 1);
    if (!made.ok()) return made.status();
    call = std::move(*made);
    return device->upload(*call);
  }
  Status run(const tessera_plan* plan, const Stream& stream) {
    const std::size_t bytes = tessera_plan_workspace(plan);
    const Result<void*> workspace = device->workspace(bytes);
    if (!workspace.ok()) return workspace.status();
    if (Status s = device->poison(*call); !s.ok()) return s;
    if (const tessera_status ran = call->run(plan, *workspace, bytes, stream.get()); ran != TESSERA_OK) {
      return {ran, tessera_last_error()};
    }
    if (Status s = stream.synchronize(); !s.ok()) return s;
    return device->fetch(*call);
  }
};

TEST(Threads, sixteen_on_eight_streams_with_shared_plans_give_the_right_bits) {
  REQUIRE_DEVICE();
  std::vector<Stream> streams;
  for (int n = 0; n < kStreams; ++n) {
    Result<Stream> stream = Stream::make(kDevice);
    ASSERT_TRUE(stream.ok()) << stream.status().message();
    streams.push_back(std::move(*stream));
  }
  std::vector<std::unique_ptr<verify::Case>> chosen;
  std::vector<Plan> plans;
  std::vector<std::vector<verify::Bytes>> expected;
  for (std::unique_ptr<verify::Case>& c : verify::suite("quick")) {
    const bool wanted = c->name.find("fwd/fp16/b2_sq33") == 0 || c->name.find("dec/fp16/b3_sq1_sk100") == 0 ||
                        (c->name.find("bwd/fp16") == 0 && c->name.find("det") != std::string::npos);
    Running one;
    if (chosen.size() == 6 || !wanted) continue;
    ASSERT_OK(one.open(*c));
    if (!c->equal_runs_promised(*one.device) || c->is_invalid(*one.device)) continue;
    tessera_plan* plan = nullptr;
    ASSERT_EQ(one.call->plan(&plan), TESSERA_OK) << c->name << ": " << tessera_last_error();
    plans.emplace_back(plan, &tessera_plan_destroy);
    ASSERT_OK(one.run(plan, streams[0]));
    verify::Judgement judgement;
    one.trial->judge(*one.call, 0, judgement);
    ASSERT_EQ(judgement.failure, "") << c->name;
    expected.push_back(written_bytes(*one.call));
    chosen.push_back(std::move(c));
  }
  ASSERT_GE(chosen.size(), 3U);

  std::vector<std::string> failures(kThreads);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      const std::size_t which = static_cast<std::size_t>(t) % chosen.size();
      Running own;
      Status s = own.open(*chosen[which]);
      for (int n = 0; s.ok() && n < kRuns; ++n) {
        s = own.run(plans[which].get(), streams[static_cast<std::size_t>((t + n) % kStreams)]);
        if (s.ok() && written_bytes(*own.call) != expected[which]) s = {TESSERA_INTERNAL, "other bits than alone"};
      }
      if (!s.ok()) failures[static_cast<std::size_t>(t)] = chosen[which]->name + ": " + s.message();
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& failure : failures) EXPECT_EQ(failure, "");
}

}  // namespace
}  // namespace tessera::cuda
