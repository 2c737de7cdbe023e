#include "jit/jit.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>
#include <new>

#include "base/format.h"
#include "jit/nvrtc.h"

namespace tessera::jit {
namespace {

// The fields of the key, each preceded by its length, so that different lists of fields give different texts.
class KeyText {
 public:
  void add(const std::string& field) { text_ += format("{}:{};", field.size(), field); }
  Key key() const { return hash_of(text_); }

 private:
  std::string text_;
};

std::string target_name(const Target& target) {
  return target.ptx && target.arch.rfind("sm_", 0) == 0 ? "compute_" + target.arch.substr(3) : target.arch;
}

std::vector<std::string> all_options(const CompileRequest& request) {
  std::vector<std::string> options = compile_options(request.target);
  options.insert(options.end(), request.extra_options.begin(), request.extra_options.end());
  return options;
}

// The number right before `unit` in the line; -1: there is none.
int number_before(const std::string& line, const std::string& unit) {
  const std::size_t end = line.find(unit);
  if (end == std::string::npos || end == 0) return -1;
  const std::size_t blank = line.find_last_not_of("0123456789", end - 1);
  const std::size_t begin = blank == std::string::npos ? 0 : blank + 1;
  return begin == end ? -1 : std::atoi(line.c_str() + begin);
}

struct Slot {
  std::mutex mutex;  // held while the image is loaded or compiled
  std::shared_ptr<const Image> image;
};

struct MemoryCache {
  std::mutex mutex;
  std::map<Key, std::shared_ptr<Slot>> slots;
};

// Never destroyed: a thread may still use it while the process exits.
MemoryCache& memory_cache() {
  static MemoryCache* cache = new MemoryCache;
  return *cache;
}

}  // namespace

std::string program_text(const KernelInstance& instance) {
  const std::string bounds = instance.min_blocks > 0 ? format("{}, {}", instance.threads, instance.min_blocks)
                                                     : format("{}", instance.threads);
  const std::string cluster = instance.cluster > 1 ? format("__cluster_dims__({}, 1, 1) ", instance.cluster) : "";
  return format(
      "#include \"{}\"\nusing namespace tessera;\n"
      "extern \"C\" __global__ void __launch_bounds__({}) {}{}(const __grid_constant__ {} params) {{ {}<{}>(params); "
      "}}\n",
      instance.header, bounds, cluster, entry_point(instance), instance.params, instance.entry, instance.config);
}

std::vector<std::string> compile_options(const Target& target) {
  // --no-cache: after a hit in NVRTC's own cache, ptxas would print no report.
  return {"--gpu-architecture=" + target_name(target), "--std=c++20", "--device-as-default-execution-space",
          "--ptxas-options=-v", "--no-cache"};
}

Result<Key> key_of(const CompileRequest& request) {
  if (const Status& s = kernel_sources().status; !s.ok()) return s;
  const auto compiler = nvrtc_info(request.target.ptx);
  if (!compiler.ok()) return compiler.status();
  KeyText text;
  text.add(format("format {}", kCacheFormat));
  text.add(format("nvrtc {}.{} {}", compiler->major, compiler->minor, compiler->build));
  text.add(program_text(request.instance));  // header, entry, Config and bounds
  for (const Source* source : reachable(request.instance.header, request.extra_sources)) {
    text.add(source->path);
    text.add(source->text);
  }
  for (const std::string& option : all_options(request)) text.add(option);
  return text.key();
}

Result<std::shared_ptr<const Image>> compile(const CompileRequest& request) {
  if (const Status& s = kernel_sources().status; !s.ok()) return s;
  const KernelInstance& instance = request.instance;
  auto output = nvrtc_compile(instance.name, program_text(instance), reachable(instance.header, request.extra_sources),
                              all_options(request), request.target.ptx);
  if (!output.ok()) return output.status();
  auto image = std::make_shared<Image>();
  image->kernel = instance.name;
  image->target = target_name(request.target);
  image->bytes = std::move(output->image);
  image->is_ptx = request.target.ptx;
  if (!image->is_ptx) image->resources = parse_resources(output->log);
  image->log = std::move(output->log);
  image->compile_seconds = output->seconds;
  return std::shared_ptr<const Image>(std::move(image));
}

Result<Found> get(const CompileRequest& request) try {
  const auto key = key_of(request);
  if (!key.ok()) return key.status();

  std::shared_ptr<Slot> slot;
  {
    const std::lock_guard lock(memory_cache().mutex);
    std::shared_ptr<Slot>& place = memory_cache().slots[*key];
    if (!place) place = std::make_shared<Slot>();
    slot = place;
  }
  const std::lock_guard lock(slot->mutex);
  if (slot->image) return Found{slot->image, Origin::kMemory};

  const DiskCache disk = DiskCache::from_environment();
  if (auto image = disk.load(*key)) {
    slot->image = image;
    return Found{image, Origin::kDisk};
  }
  if (compiling_forbidden()) {
    return Status(TESSERA_COMPILE_FAILED,
                  format("TESSERA_NO_COMPILE forbids compiling, and {} for {} is not in the cache folder {}",
                         request.instance.name, target_name(request.target), disk.directory()));
  }
  auto compiled = compile(request);
  if (!compiled.ok()) return compiled.status();
  // This process uses the image whether or not it could be stored; cache_state() reports why not.
  static_cast<void>(disk.store(*key, **compiled));
  slot->image = *compiled;
  return Found{*compiled, Origin::kCompiled};
} catch (const std::bad_alloc&) {
  return Status(TESSERA_OUT_OF_MEMORY, "out of host memory while compiling a kernel");
}

CacheState cache_state() { return DiskCache::from_environment().state(); }

void clear_memory_cache() {
  const std::lock_guard lock(memory_cache().mutex);
  memory_cache().slots.clear();
}

bool compiling_forbidden() {
  const char* value = std::getenv("TESSERA_NO_COMPILE");
  return value != nullptr && *value != '\0' && std::string(value) != "0";
}

Resources parse_resources(const std::string& log) {
  Resources resources;
  resources.static_smem_bytes = 0;  // not mentioned if there is none
  std::size_t begin = 0;
  while (begin < log.size()) {
    const std::size_t end = std::min(log.find('\n', begin), log.size());
    const std::string line = log.substr(begin, end - begin);
    begin = end + 1;
    if (line.find("wgmma") != std::string::npos && line.find("serialized") != std::string::npos) {
      resources.wgmma_serialized = true;
    }
    const int stack = number_before(line, " bytes stack frame");
    const int stores = number_before(line, " bytes spill stores");
    const int loads = number_before(line, " bytes spill loads");
    if (stack >= 0 && stores >= 0 && loads >= 0) {
      // A function that was not inlined has its own line; the sum counts.
      resources.stack_bytes = std::max(resources.stack_bytes, 0) + stack;
      resources.spill_store_bytes = std::max(resources.spill_store_bytes, 0) + stores;
      resources.spill_load_bytes = std::max(resources.spill_load_bytes, 0) + loads;
    }
    resources.registers = std::max(resources.registers, number_before(line, " registers"));
    resources.static_smem_bytes = std::max(resources.static_smem_bytes, number_before(line, " bytes smem"));
  }
  return resources;
}

}  // namespace tessera::jit
