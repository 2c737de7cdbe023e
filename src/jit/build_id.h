// What tells two builds of a shared library apart, if the version that it reports does not.
#pragma once

#include <string>

namespace tessera::jit {

// The GNU build ID, in hex, of the loaded library that contains this address. If it has none, "file-" and a hash of the
// file's size and samples of its content: tools that edit ELF files, as those that make Python wheels do, may leave the
// program header of the note pointing elsewhere. Empty: neither could be read.
std::string build_id(const void* address);

// The same in two steps.
std::string gnu_build_id(const void* address);      // empty: none
std::string sampled_hash(const std::string& path);  // empty: the file cannot be read

}  // namespace tessera::jit
