#include "program/tune_worker.h"

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
#include <optional>
#include <thread>

#include "base/arch.h"
#include "base/format.h"
#include "cuda/code_arch.h"
#include "cuda/memory.h"
#include "engine/tuned.h"
#include "jit/gate.h"
#include "jit/nvrtc.h"

namespace tessera::tools {
namespace {

using Plan = std::unique_ptr<tessera_plan, decltype(&tessera_plan_destroy)>;

constexpr int kCompileSeconds = 300;
constexpr int kCheckSeconds = 30;  // the first one also opens the GPU
constexpr int kTimeSeconds = 30;
constexpr int kProblemSeconds = 300;
constexpr int kHelloSeconds = 60;
constexpr double kSampleSeconds = 2e-3;  // at the least, by repeating the call
constexpr int kMostCalls = 100;

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
  // After one failure, the driver returns the same error to every later call of the process.
  return {{"error", s.message()}, {"code", s.code()}, {"fatal", s.code() == TESSERA_CUDA_FAILED}};
}

Json hello(const std::string& spelling) {
  const Result<std::unique_ptr<verify::Device>> device = verify::open_device(spelling);
  if (!device.ok()) return failed(device.status());
  if ((*device)->is_cpu()) return failed({TESSERA_INVALID_ARGUMENT, "the CPU has nothing to tune; --device is a GPU"});
  if (const auto compiler = jit::nvrtc_info(); !compiler.ok()) return failed(compiler.status());
  const Result<cuda::DeviceInfo> info = cuda::device((*device)->cuda_index());
  if (!info.ok()) return failed(info.status());
  const engine::Device as = (*device)->as_selected();
  return {{"name", (*device)->name()},
          {"gpu", engine::gpu_key(*info)},
          {"driver", info->driver_version},
          {"multiprocessors", info->multiprocessors},
          {"arch", as.name},
          {"compute", as.compute},
          {"specific", as.specific},
          {"shared_memory_per_block", as.shared_memory_per_block}};
}

Json space_of(const std::string& spelling, const verify::Case& problem) {
  const Result<std::unique_ptr<verify::Device>> device = verify::open_device(spelling);
  if (!device.ok()) return failed(device.status());
  const engine::SearchSpace space = problem.search_space((*device)->as_selected());
  Json choices = Json::array();
  for (const engine::Choice& choice : space.choices) {
    choices.push_back({{"kernel", choice.kernel}, {"config", engine::text_of(choice.config)}});
  }
  return {{"offered", space.offered}, {"choices", choices}};
}

// The side that has the GPU.
class Server {
 public:
  Server(const std::string& device, const verify::Case& problem, const std::vector<engine::Choice>& space,
         const std::vector<TuningCheck>& checks)
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
  const engine::Choice& choice(int candidate) const { return space_.at(static_cast<std::size_t>(candidate)); }
  void force(int candidate) const {
    engine::force(engine::Tuned{choice(candidate).kernel, choice(candidate).config, 0, 0});
  }

  // Two devices, because a device keeps only the tensors of its latest case.
  Status open() {
    if (timer_ != nullptr) return {};
    Result<std::unique_ptr<verify::Device>> checker = verify::open_device(spelling_);
    if (!checker.ok()) return checker.status();
    checker_ = std::move(*checker);
    Result<std::unique_ptr<verify::Device>> timer = verify::open_device(spelling_);
    if (!timer.ok()) return timer.status();
    timer_ = std::move(*timer);
    return {};
  }

  Json compile(const std::vector<int>& candidates) {
    const Result<std::unique_ptr<verify::Device>> device = verify::open_device(spelling_);
    if (!device.ok()) return failed(device.status());
    const Result<cuda::DeviceInfo> info = cuda::device((*device)->cuda_index());
    if (!info.ok()) return failed(info.status());
    const Result<cuda::CodeArch> code = cuda::code_arch_of(*info);
    if (!code.ok()) return failed(code.status());
    std::vector<jit::CompileRequest> requests;
    std::vector<std::size_t> owners;  // of the requests, among the candidates
    std::vector<std::string> reasons(candidates.size());
    for (std::size_t n = 0; n < candidates.size(); ++n) {
      const engine::Device selected = (*device)->as_selected();
      if (!problem_.fits(choice(candidates[n]), selected)) reasons[n] = "it does not fit the problem";
      for (const jit::KernelInstance& kernel : problem_.kernels_of(choice(candidates[n]), selected)) {
        requests.push_back({kernel, code->target, {}, {}});
        owners.push_back(n);
      }
    }
    if (requests.empty()) return {{"reasons", reasons}};
    jit::GateOptions options;
    options.threads = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
    const Result<jit::GateReport> report = jit::run_gate(requests, options);
    if (!report.ok()) return failed(report.status());
    for (std::size_t n = 0; n < requests.size(); ++n) {
      const jit::GateRow& row = report->rows[n];
      // A GPU newer than the table of limits: that ptxas compiled it is enough.
      const bool compiled = row.resources.registers >= 0 && row.resources.spill_store_bytes == 0;
      const bool unknown = limits_of(code->compute).arch == 0;
      if (!(unknown && compiled) && reasons[owners[n]].empty()) reasons[owners[n]] = row.failure;
    }
    return {{"reasons", reasons}};
  }

  Json check(int candidate) {
    if (Status s = open(); !s.ok()) return failed(s);
    for (const TuningCheck& one : checks_) {
      Json answer = check_one(*one.c, *one.trial, candidate, 2);
      if (answer.contains("error")) return answer;
    }
    return {{"right", true}};
  }

  Json check_problem(int candidate) {
    if (Status s = open(); !s.ok()) return failed(s);
    const std::unique_ptr<verify::Case> c = problem_.quick_check();
    Json answer = check_one(*c, *c->trial(), candidate, 1);
    return answer.contains("error") ? answer : Json{{"right", true}};
  }

  Json check_one(const verify::Case& c, verify::Trial& trial, int candidate, int repeat) {
    force(candidate);
    const verify::Report report = verify::check_trial(c, trial, *checker_, repeat, 0);
    if (report.outcome != verify::Outcome::kPassed) {
      // A wrong result leaves the GPU usable; after any other failure that is not known.
      return {{"error", format("{}: {}", c.name, report.detail)}, {"fatal", !report.judged}};
    }
    if (report.config != engine::text_of(choice(candidate).config)) {
      return {{"error", format("{}: {} ran instead", c.name, report.config)}};
    }
    return Json::object();
  }

  // One candidate, ready to be launched repeatedly: a graph of as many calls as make a sample, so that the host's part
  // of a launch does not count.
  struct Racer {
    Plan plan{nullptr, &tessera_plan_destroy};
    std::optional<cuda::Graph> graph;
    int calls = 1;
  };

  Status load_problem() {
    if (call_) return {};
    auto call = problem_.timed_call(*timer_);
    if (!call.ok()) return call.status();
    if (Status s = timer_->upload(**call); !s.ok()) return s;
    Result<cuda::Stream> stream = cuda::Stream::make(timer_->cuda_index());
    if (!stream.ok()) return stream.status();
    stream_.emplace(std::move(*stream));
    call_ = std::move(*call);
    return {};
  }

  Status make_ready(int candidate, Racer& racer) {
    force(candidate);
    tessera_plan* made = nullptr;
    const tessera_status planned = call_->plan(&made);
    racer.plan.reset(made);
    if (planned != TESSERA_OK) return {planned, tessera_last_error()};
    const Json chosen = Json::parse(tessera_plan_explain(made, TESSERA_EXPLAIN_JSON))["chosen"];
    if (chosen.value("kernel", "") != choice(candidate).kernel || !chosen.value("tuned", false)) {
      return {TESSERA_INTERNAL, "the selector did not take it"};
    }
    const std::size_t bytes = tessera_plan_workspace(made);
    // Graphs keep the address of the workspace they were captured with.
    if (workspaces_.empty() || workspaces_.back().bytes() < bytes) {
      Result<cuda::DeviceBuffer> larger = cuda::DeviceBuffer::make(timer_->cuda_index(), bytes);
      if (!larger.ok()) return larger.status();
      workspaces_.push_back(std::move(*larger));
    }
    void* const workspace = workspaces_.back().data();
    const auto run = [&](cuda::CUstream stream) -> Status {
      const tessera_status s = call_->run(racer.plan.get(), workspace, bytes, stream);
      return s == TESSERA_OK ? Status() : Status(s, tessera_last_error());
    };
    const Result<double> one = cuda::time_on_stream(*stream_, 1, run);
    if (!one.ok()) return one.status();
    racer.calls = std::clamp(static_cast<int>(kSampleSeconds / std::max(*one, 1e-7)), 1, kMostCalls);
    Result<cuda::Graph> graph = cuda::Graph::capture(*stream_, [&](cuda::CUstream stream) {
      for (int n = 0; n < racer.calls; ++n) {
        if (Status s = run(stream); !s.ok()) return s;
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
  const verify::Case& problem_;
  const std::vector<engine::Choice>& space_;
  const std::vector<TuningCheck>& checks_;
  std::unique_ptr<verify::Device> checker_, timer_;
  std::unique_ptr<verify::Call> call_;
  std::optional<cuda::Stream> stream_;
  std::vector<cuda::DeviceBuffer> workspaces_;  // each larger than the one before
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
    return Status(TESSERA_INTERNAL, format("socketpair: {}", std::strerror(errno)));
  }
  std::fflush(nullptr);
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid < 0) {
    const std::string why = std::strerror(errno);
    close(ends[0]);
    close(ends[1]);
    return Status(TESSERA_INTERNAL, format("fork: {}", why));
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
  if (WIFSIGNALED(status)) return format("ended by signal {} ({})", WTERMSIG(status), strsignal(WTERMSIG(status)));
  return format("ended with code {}", WIFEXITED(status) ? WEXITSTATUS(status) : -1);
}

// One answer, of a process that ends with it.
template <class Answer>
Result<Json> ask_once(const Answer& answer) {
  const Result<Child> child = fork_server([&] { return [&](const Json&) { return answer(); }; });
  if (!child.ok()) return child.status();
  std::string unread, line;
  const bool answered = send_line(child->socket, {{"do", "hello"}}) &&
                        receive_line(child->socket, unread, line, kHelloSeconds * 1000) == Got::kLine;
  close(child->socket);
  if (!answered) kill(child->pid, SIGKILL);
  int status = 0;
  waitpid(child->pid, &status, 0);
  if (!answered) return Status(TESSERA_CUDA_FAILED, format("the process that asked the GPU {}", ending_of(status)));
  const Json said = Json::parse(line, nullptr, false);
  if (!said.is_object()) return Status(TESSERA_CUDA_FAILED, "the process that asked the GPU answered nonsense");
  if (said.contains("error")) {
    return Status(static_cast<tessera_status>(said.value("code", static_cast<int>(TESSERA_INTERNAL))),
                  said["error"].get<std::string>());
  }
  return said;
}

}  // namespace

Result<engine::SearchSpace> ask_space(const std::string& device, const verify::Case& problem) {
  const Result<Json> said = ask_once([&] { return space_of(device, problem); });
  if (!said.ok()) return said.status();
  engine::SearchSpace space;
  space.offered = (*said)["offered"];
  for (const Json& choice : (*said)["choices"]) {
    const auto config = engine::config_from_text(choice["config"].get<std::string>());
    if (!config) return Status(TESSERA_INTERNAL, "the process that asked the GPU named an unreadable Config");
    space.choices.push_back({choice["kernel"], *config});
  }
  return space;
}

Result<TuneTarget> ask_target(const std::string& device) {
  const Result<Json> answer = ask_once([&] { return hello(device); });
  if (!answer.ok()) return answer.status();
  const Json& said = *answer;
  TuneTarget target;
  target.name = said["name"];
  target.gpu = said["gpu"];
  target.driver = said["driver"];
  target.multiprocessors = said["multiprocessors"];
  target.device.kind = engine::Device::Kind::kCuda;
  target.device.name = said["arch"];
  target.device.compute = said["compute"];
  target.device.specific = said["specific"];
  target.device.multiprocessors = target.multiprocessors;
  target.device.shared_memory_per_block = said["shared_memory_per_block"];
  return target;
}

TuneWorker::TuneWorker(std::string device, const verify::Case& problem, const std::vector<engine::Choice>& space,
                       double budget)
    : device_(std::move(device)), problem_(problem), space_(space) {
  // Done here and not in the worker, which may be forked many times.
  for (auto& c : problem_.tuning_checks()) {
    auto trial = c->trial();
    trial->expect(0);
    checks_.push_back({std::move(c), std::move(trial)});
  }
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
  // It has nothing to finish, and if a kernel hangs it would never end by itself.
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
    return lose(format("no answer in {} s: it hangs", timeout_s));
  }
  if (got == Got::kEnd) {
    int status = 0;
    close(socket_);
    waitpid(child_, &status, 0);
    child_ = socket_ = -1;
    return lose(format("the process that ran it {}", ending_of(status)));
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
  // One of them crashed the compiler: compile each by itself.
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

}  // namespace tessera::tools
