#include "cli/tune_worker.h"

#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <numeric>
#include <optional>
#include <thread>

#include "cases/buffers.h"
#include "contract/arch.h"
#include "cuda/code_arch.h"
#include "cuda/memory.h"
#include "jit/gate.h"
#include "jit/nvrtc.h"
#include "tune/tuned.h"

namespace tessera::cli {
namespace {

using Plan = std::unique_ptr<tessera_plan, decltype(&tessera_plan_destroy)>;

constexpr int kCompileSeconds = 300;
constexpr int kCheckSeconds = 30;  // the first one opens the GPU, too
constexpr int kTimeSeconds = 30;
constexpr int kProblemSeconds = 300;
constexpr int kHelloSeconds = 60;
constexpr double kSampleSeconds = 2e-3;  // at the least, by repeating the call
constexpr int kMostCalls = 100;
constexpr std::size_t kWorkspace = 4096;

bool send_line(int socket, const Json& json) {
  const std::string line = json.dump(-1, ' ', false, Json::error_handler_t::replace) + '\n';
  std::size_t done = 0;
  while (done < line.size()) {
    const ssize_t put = send(socket, line.data() + done, line.size() - done, MSG_NOSIGNAL);
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) return false;
    done += static_cast<std::size_t>(put);
  }
  return true;
}

enum class Got { kLine, kEnd, kTimeout };

Got receive_line(int socket, std::string& unread, std::string& line, int timeout_ms) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
  for (;;) {
    if (const std::size_t end = unread.find('\n'); end != std::string::npos) {
      line = unread.substr(0, end);
      unread.erase(0, end + 1);
      return Got::kLine;
    }
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now()).count();
    if (timeout_ms >= 0 && left <= 0) return Got::kTimeout;
    pollfd wait{socket, POLLIN, 0};
    const int ready = poll(&wait, 1, timeout_ms < 0 ? -1 : static_cast<int>(left));
    if (ready < 0 && errno != EINTR) return Got::kEnd;
    if (ready <= 0) continue;
    char bytes[4096];
    const ssize_t got = read(socket, bytes, sizeof bytes);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return Got::kEnd;
    unread.append(bytes, static_cast<std::size_t>(got));
  }
}

Json failed(const Status& s) {
  // What the driver says once it says again to every later call of the process.
  return {{"error", s.message()}, {"code", s.code()}, {"fatal", s.code() == TESSERA_CUDA_FAILED}};
}

Json hello(const std::string& spelling) {
  const Result<std::unique_ptr<Device>> device = open_device(spelling);
  if (!device.ok()) return failed(device.status());
  if ((*device)->is_cpu()) return failed({TESSERA_INVALID_ARGUMENT, "the CPU has nothing to tune; --device is a GPU"});
  if (const auto compiler = jit::nvrtc_info(); !compiler.ok()) return failed(compiler.status());
  const Result<cuda::DeviceInfo> info = cuda::device((*device)->cuda_index());
  if (!info.ok()) return failed(info.status());
  const select::Device as = (*device)->as_selected();
  return {{"name", (*device)->name()},
          {"gpu", tune::gpu_key(*info)},
          {"driver", info->driver_version},
          {"multiprocessors", info->multiprocessors},
          {"arch", as.name},
          {"compute", as.compute},
          {"specific", as.specific},
          {"shared_memory_per_block", as.shared_memory_per_block}};
}

// The side that has the GPU.
class Server {
 public:
  Server(const std::string& device, const cases::Case& problem, const std::vector<select::ForwardConfig>& space,
         const std::vector<PreparedForward>& checks)
      : spelling_(device), problem_(problem), space_(space), checks_(checks) {}

  Json answer(const Json& request) {
    const std::string what = request.value("do", "");
    if (what == "compile") return compile(request.value("candidates", std::vector<int>()));
    const int candidate = request.value("candidate", 0);
    if (what == "check") return check(candidate);
    if (what == "check_problem") return check_problem(candidate);
    if (what == "time") return time(candidate);
    return {{"error", "unknown request"}};
  }

 private:
  const select::ForwardConfig& config(int candidate) const { return space_.at(static_cast<std::size_t>(candidate)); }

  // Two devices: what one holds of a case is gone when it is given another.
  Status open() {
    if (timer_ != nullptr) return {};
    Result<std::unique_ptr<Device>> checker = open_device(spelling_);
    if (!checker.ok()) return checker.status();
    checker_ = std::move(*checker);
    Result<std::unique_ptr<Device>> timer = open_device(spelling_);
    if (!timer.ok()) return timer.status();
    timer_ = std::move(*timer);
    return {};
  }

  Json compile(const std::vector<int>& candidates) {
    const Result<std::unique_ptr<Device>> device = open_device(spelling_);
    if (!device.ok()) return failed(device.status());
    const Result<cuda::DeviceInfo> info = cuda::device((*device)->cuda_index());
    if (!info.ok()) return failed(info.status());
    const Result<cuda::CodeArch> code = cuda::code_arch_of(*info);
    if (!code.ok()) return failed(code.status());
    std::vector<jit::CompileRequest> requests;
    for (const int c : candidates) requests.push_back({select::instance_of(config(c)), code->target, {}, {}});
    jit::GateOptions options;
    options.threads = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
    const Result<jit::GateReport> report = jit::run_gate(requests, options);
    if (!report.ok()) return failed(report.status());
    Json reasons = Json::array();
    for (const jit::GateRow& row : report->rows) {
      // A GPU newer than the table of limits: ptxas's word is enough.
      const bool compiled = row.resources.registers >= 0 && row.resources.spill_store_bytes == 0;
      const bool unknown = limits_of(code->compute).arch == 0;
      reasons.push_back(unknown && compiled ? std::string() : row.failure);
    }
    return {{"reasons", reasons}};
  }

  Json check(int candidate) {
    if (Status s = open(); !s.ok()) return failed(s);
    for (const PreparedForward& prepared : checks_) {
      Json answer = check_one(prepared, candidate, 2);
      if (answer.contains("error")) return answer;
    }
    return {{"right", true}};
  }

  Json check_problem(int candidate) {
    constexpr std::int64_t kWhole = 256, kSample = 16;
    if (Status s = open(); !s.ok()) return failed(s);
    cases::Case c = problem_;
    if (c.problem.seq_k > kWhole) c.sample = kSample;
    Json answer = check_one(prepare_forward(c, 0), candidate, 1);
    return answer.contains("error") ? answer : Json{{"right", true}};
  }

  Json check_one(const PreparedForward& prepared, int candidate, int repeat) {
    tune::force(select::TunedForward{config(candidate), 0, 0});
    const Report report = check_prepared(prepared, *checker_, repeat);
    if (report.outcome != Outcome::kPassed) {
      // A wrong result leaves the GPU as it was; that anything else did cannot be known.
      const bool judged = report.runs == repeat && report.worst_ratio > 0;
      return {{"error", fmt::format("{}: {}", prepared.c.name, report.detail)}, {"fatal", !judged}};
    }
    if (report.config != select::instance_of(config(candidate)).config) {
      return {{"error", fmt::format("{}: {} ran instead", prepared.c.name, report.config)}};
    }
    return Json::object();
  }

  // One candidate, ready to be launched again and again: a graph of as many calls as make a sample, so that what a
  // launch costs the host does not count.
  struct Racer {
    Plan plan{nullptr, &tessera_plan_destroy};
    std::optional<cuda::Graph> graph;
    int calls = 1;
  };

  Status load_problem() {
    if (buffers_) return {};
    inputs_ = cases::make_shapes(problem_);
    buffers_.emplace(problem_, inputs_, nullptr);
    if (Status s = timer_->upload(*buffers_); !s.ok()) return s;
    args_ = buffers_->args();
    const Result<void*> scratch = timer_->workspace(kWorkspace);
    if (!scratch.ok()) return scratch.status();
    scratch_ = *scratch;
    Result<cuda::Stream> stream = cuda::Stream::make(timer_->cuda_index());
    if (!stream.ok()) return stream.status();
    stream_.emplace(std::move(*stream));
    return {};
  }

  Status make_ready(int candidate, Racer& racer) {
    tune::force(select::TunedForward{config(candidate), 0, 0});
    tessera_plan* made = nullptr;
    const tessera_status planned = tessera_plan_create(buffers_->op(), &args_, &made);
    racer.plan.reset(made);
    if (planned != TESSERA_OK) return {planned, tessera_last_error()};
    const std::string chosen = fmt::format("\nchosen  {} {} ", select::kernel_name(config(candidate)),
                                           select::instance_of(config(candidate)).config);
    if (std::string(tessera_plan_explain(made)).find(chosen) == std::string::npos) {
      return {TESSERA_INTERNAL, "the selector did not take it"};
    }
    if (tessera_plan_workspace(made) > kWorkspace) return {TESSERA_INTERNAL, "it needs more workspace than there is"};
    const auto call = [&](cuda::CUstream stream) -> Status {
      const tessera_status s = tessera_plan_run(racer.plan.get(), &args_, scratch_, kWorkspace, stream);
      return s == TESSERA_OK ? Status() : Status(s, tessera_last_error());
    };
    const Result<double> one = cuda::time_on_stream(*stream_, 1, call);
    if (!one.ok()) return one.status();
    racer.calls = std::clamp(static_cast<int>(kSampleSeconds / std::max(*one, 1e-7)), 1, kMostCalls);
    Result<cuda::Graph> graph = cuda::Graph::capture(*stream_, [&](cuda::CUstream stream) {
      for (int n = 0; n < racer.calls; ++n) {
        if (Status s = call(stream); !s.ok()) return s;
      }
      return Status();
    });
    if (!graph.ok()) return graph.status();
    racer.graph.emplace(std::move(*graph));
    return {};
  }

  Json time(int candidate) {
    if (Status s = open(); !s.ok()) return failed(s);
    if (Status s = load_problem(); !s.ok()) return failed(s);
    Racer& racer = racers_[candidate];
    if (!racer.graph) {
      if (Status s = make_ready(candidate, racer); !s.ok()) return failed(s);
    }
    const Result<double> seconds =
        cuda::time_on_stream(*stream_, 1, [&](cuda::CUstream stream) { return racer.graph->launch(stream); });
    if (!seconds.ok()) return failed(seconds.status());
    return {{"seconds", *seconds / racer.calls}};
  }

  const std::string& spelling_;
  const cases::Case& problem_;
  const std::vector<select::ForwardConfig>& space_;
  const std::vector<PreparedForward>& checks_;
  std::unique_ptr<Device> checker_, timer_;
  oracle::Inputs inputs_;
  std::optional<cases::Buffers> buffers_;
  tessera_attention args_{};
  void* scratch_ = nullptr;
  std::optional<cuda::Stream> stream_;
  std::map<int, Racer> racers_;
};

struct Child {
  pid_t pid = -1;
  int socket = -1;
};

// Forks a process that answers lines until its socket is closed. It must not return into the caller's code, nor flush
// what the caller has yet to print.
template <class Answer>
Result<Child> fork_server(const Answer& make_answer) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
    return Status(TESSERA_INTERNAL, fmt::format("socketpair: {}", std::strerror(errno)));
  }
  std::fflush(nullptr);
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid < 0) {
    const std::string why = std::strerror(errno);
    close(ends[0]);
    close(ends[1]);
    return Status(TESSERA_INTERNAL, fmt::format("fork: {}", why));
  }
  if (pid > 0) {
    close(ends[1]);
    return Child{pid, ends[0]};
  }
  close(ends[0]);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(0);
  try {
    auto answer = make_answer();
    std::string unread, line;
    while (receive_line(ends[1], unread, line, -1) == Got::kLine) {
      if (!send_line(ends[1], answer(Json::parse(line)))) break;
    }
  } catch (const std::exception& e) {
    send_line(ends[1], {{"error", e.what()}, {"fatal", true}});
  }
  _exit(0);
}

std::string ending_of(int status) {
  if (WIFSIGNALED(status)) return fmt::format("ended by signal {} ({})", WTERMSIG(status), strsignal(WTERMSIG(status)));
  return fmt::format("ended with code {}", WIFEXITED(status) ? WEXITSTATUS(status) : -1);
}

}  // namespace

Result<TuneTarget> ask_target(const std::string& device) {
  const Result<Child> child = fork_server([&] { return [&](const Json&) { return hello(device); }; });
  if (!child.ok()) return child.status();
  std::string unread, line;
  const bool answered = send_line(child->socket, {{"do", "hello"}}) &&
                        receive_line(child->socket, unread, line, kHelloSeconds * 1000) == Got::kLine;
  close(child->socket);
  if (!answered) kill(child->pid, SIGKILL);
  int status = 0;
  waitpid(child->pid, &status, 0);
  if (!answered)
    return Status(TESSERA_CUDA_FAILED, fmt::format("the process that asked the GPU {}", ending_of(status)));
  const Json said = Json::parse(line, nullptr, false);
  if (!said.is_object()) return Status(TESSERA_CUDA_FAILED, "the process that asked the GPU answered nonsense");
  if (said.contains("error")) {
    return Status(static_cast<tessera_status>(said.value("code", static_cast<int>(TESSERA_INTERNAL))),
                  said["error"].get<std::string>());
  }
  TuneTarget target;
  target.name = said["name"];
  target.gpu = said["gpu"];
  target.driver = said["driver"];
  target.multiprocessors = said["multiprocessors"];
  target.device.kind = select::Device::Kind::kCuda;
  target.device.name = said["arch"];
  target.device.compute = said["compute"];
  target.device.specific = said["specific"];
  target.device.multiprocessors = target.multiprocessors;
  target.device.shared_memory_per_block = said["shared_memory_per_block"];
  return target;
}

std::vector<cases::Case> tuning_checks(const cases::Case& problem) {
  constexpr std::int64_t kWindow = 70;  // cuts through tiles of every size
  cases::Case c = problem;
  AttentionProblem& p = c.problem;
  p.with_lse = true;
  p.varlen = false;
  p.total_q = p.total_k = 0;
  p.window_left = std::min(p.window_left, kWindow);
  p.window_right = std::min(p.window_right, kWindow);
  c.lengths_q = c.lengths_k = {};
  c.layout = cases::Layout::kCompact;
  c.distribution = cases::Distribution::kNormal;
  c.sample = 0;

  const auto shaped = [&](const char* name, std::int64_t batch, std::int64_t heads_q, std::int64_t heads_kv,
                          std::int64_t seq_q, std::int64_t seq_k) {
    cases::Case shape = c;
    shape.name = name;
    shape.problem.batch = batch;
    shape.problem.heads_q = heads_q;
    shape.problem.heads_kv = heads_kv;
    shape.problem.seq_q = seq_q;
    shape.problem.seq_k = seq_k;
    return shape;
  };
  const cases::Case ragged = shaped("ragged lengths", 2, 4, 2, 197, 333);
  cases::Case packed = shaped("packed sequences", 5, 4, 2, 211, 300);
  packed.lengths_q = {0, 1, 130, 70, 211};
  packed.lengths_k = {17, 70, 0, 300, 129};
  packed.problem.varlen = true;
  packed.problem.total_q = std::accumulate(packed.lengths_q.begin(), packed.lengths_q.end(), std::int64_t{0});
  packed.problem.total_k = std::accumulate(packed.lengths_k.begin(), packed.lengths_k.end(), std::int64_t{0});
  cases::Case many = shaped("many tiles", 2, 12, 4, 1100, 900);
  many.sample = 12;
  return {ragged, packed, many};
}

TuneWorker::TuneWorker(std::string device, cases::Case problem, const std::vector<select::ForwardConfig>& space,
                       double budget)
    : device_(std::move(device)), problem_(std::move(problem)), space_(space) {
  // Here and not in the other process: it may be forked many times.
  for (const cases::Case& c : tuning_checks(problem_)) checks_.push_back(prepare_forward(c, 0));
  deadline_ = std::chrono::steady_clock::now() +
              std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(budget));
}

Status TuneWorker::start() {
  if (child_ > 0) return {};
  const Result<Child> child = fork_server([this] {
    return [server = std::make_shared<Server>(device_, problem_, space_, checks_)](const Json& request) {
      return server->answer(request);
    };
  });
  if (!child.ok()) return child.status();
  child_ = child->pid;
  socket_ = child->socket;
  unread_.clear();
  return {};
}

void TuneWorker::stop() {
  if (child_ <= 0) return;
  close(socket_);
  // It has nothing to finish, and where a kernel hangs it would never end by itself.
  kill(child_, SIGKILL);
  waitpid(child_, nullptr, 0);
  child_ = socket_ = -1;
}

Status TuneWorker::lose(const std::string& how) {
  ++lost_;
  return {TESSERA_CUDA_FAILED, how};
}

Result<Json> TuneWorker::ask(const Json& request, int timeout_s) {
  if (Status s = start(); !s.ok()) return s;
  std::string line;
  const Got got = send_line(socket_, request) ? receive_line(socket_, unread_, line, timeout_s * 1000) : Got::kEnd;
  if (got == Got::kTimeout) {
    stop();
    return lose(fmt::format("no answer in {} s: it hangs", timeout_s));
  }
  if (got == Got::kEnd) {
    int status = 0;
    close(socket_);
    waitpid(child_, &status, 0);
    child_ = socket_ = -1;
    return lose(fmt::format("the process that ran it {}", ending_of(status)));
  }
  Json answer = Json::parse(line, nullptr, false);
  if (!answer.is_object()) {
    stop();
    return lose("the process that ran it answered nonsense");
  }
  if (answer.value("fatal", false)) {
    stop();
    ++lost_;
  }
  return answer;
}

std::vector<std::string> TuneWorker::compile(const std::vector<int>& candidates) {
  const Result<Json> answer = ask({{"do", "compile"}, {"candidates", candidates}}, kCompileSeconds);
  if (answer.ok() && answer->contains("reasons")) return (*answer)["reasons"].get<std::vector<std::string>>();
  const std::string why = answer.ok() ? answer->value("error", "no answer") : answer.status().message();
  if (candidates.size() == 1) return {why};
  // One of them broke the compiler: each by itself.
  std::vector<std::string> reasons;
  for (const int c : candidates) reasons.push_back(compile({c}).front());
  return reasons;
}

std::string TuneWorker::check(int candidate) {
  const Result<Json> answer = ask({{"do", "check"}, {"candidate", candidate}}, kCheckSeconds);
  return answer.ok() ? answer->value("error", "") : answer.status().message();
}

std::string TuneWorker::check_problem(int candidate) {
  const Result<Json> answer = ask({{"do", "check_problem"}, {"candidate", candidate}}, kProblemSeconds);
  return answer.ok() ? answer->value("error", "") : answer.status().message();
}

Result<double> TuneWorker::time(int candidate) {
  const Result<Json> answer = ask({{"do", "time"}, {"candidate", candidate}}, kTimeSeconds);
  if (!answer.ok()) return answer.status();
  if (!answer->contains("seconds")) return Status(TESSERA_CUDA_FAILED, answer->value("error", "no time"));
  return (*answer)["seconds"].get<double>();
}

}  // namespace tessera::cli
