#include "jit/build_id.h"

#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string_view>

#include "base/format.h"
#include "jit/hash.h"

namespace tessera::jit {
namespace {

struct Search {
  std::uintptr_t address;
  std::string id;
};

// The build ID among the notes of one segment. The bytes may be anything.
std::string id_in_notes(std::string_view notes, std::size_t alignment) {
  const auto padded = [&](std::size_t size) { return (size + alignment - 1) / alignment * alignment; };
  ElfW(Nhdr) header;
  while (notes.size() >= sizeof header) {
    std::memcpy(&header, notes.data(), sizeof header);
    const std::size_t begin = padded(sizeof header + header.n_namesz);
    const std::size_t end = begin + header.n_descsz;
    if (end > notes.size()) break;
    if (header.n_type == NT_GNU_BUILD_ID &&
        notes.substr(sizeof header, header.n_namesz) == std::string_view("GNU", 4)) {
      std::string id;
      for (const char byte : notes.substr(begin, header.n_descsz)) {
        id += format("{:02x}", static_cast<unsigned char>(byte));
      }
      return id;
    }
    notes.remove_prefix(std::min(padded(end), notes.size()));
  }
  return "";
}

int look_at(dl_phdr_info* object, std::size_t /*size*/, void* data) {
  Search& search = *static_cast<Search*>(data);
  const auto segments = [&](auto&& visit) {
    for (int i = 0; i < object->dlpi_phnum; ++i)
      visit(object->dlpi_phdr[i], object->dlpi_addr + object->dlpi_phdr[i].p_vaddr);
  };
  // Is this range of addresses in a loaded segment, and readable?
  const auto loaded = [&](std::uintptr_t begin, std::size_t size) {
    bool inside = false;
    segments([&](const ElfW(Phdr) & segment, std::uintptr_t start) {
      inside |= segment.p_type == PT_LOAD && (segment.p_flags & PF_R) != 0 && begin >= start &&
                begin - start <= segment.p_memsz && size <= segment.p_memsz - (begin - start);
    });
    return inside;
  };
  if (!loaded(search.address, 1)) return 0;
  segments([&](const ElfW(Phdr) & segment, std::uintptr_t start) {
    if (segment.p_type != PT_NOTE || !search.id.empty() || !loaded(start, segment.p_memsz)) return;
    search.id = id_in_notes({reinterpret_cast<const char*>(start), segment.p_memsz}, segment.p_align == 8 ? 8 : 4);
  });
  return 1;
}

}  // namespace

std::string gnu_build_id(const void* address) {
  Search search{reinterpret_cast<std::uintptr_t>(address), ""};
  dl_iterate_phdr(look_at, &search);
  return search.id;
}

std::string sampled_hash(const std::string& path) {
  constexpr off_t kSamples = 64;
  constexpr off_t kBytes = 4096;
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return "";
  struct stat info;
  std::string sampled;
  if (fstat(file, &info) == 0 && S_ISREG(info.st_mode)) {
    sampled = format("{};", info.st_size);
    // The first and the last bytes are among them: headers, and what was added at the end.
    const off_t last = std::max<off_t>(info.st_size - kBytes, 0);
    for (off_t i = 0; i <= kSamples; ++i) {
      char bytes[kBytes];
      const ssize_t got = pread(file, bytes, sizeof bytes, last / kSamples * i + (i == kSamples ? last % kSamples : 0));
      if (got > 0) sampled.append(bytes, static_cast<std::size_t>(got));
    }
  }
  close(file);
  return sampled.empty() ? "" : "file-" + hash_of(sampled).hex();
}

std::string build_id(const void* address) {
  if (std::string id = gnu_build_id(address); !id.empty()) return id;
  Dl_info info = {};
  if (dladdr(address, &info) == 0 || info.dli_fname == nullptr) return "";
  return sampled_hash(info.dli_fname);
}

}  // namespace tessera::jit
