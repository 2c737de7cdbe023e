// Argument structs of the C ABI that grow: a caller may know fewer fields than this library, or more.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "base/format.h"
#include "base/status.h"
#include "base/tensor.h"

// For functions that return a Status: returns that of the expression unless it is OK.
#define TESSERA_CHECK(expression)                               \
  do {                                                          \
    if (tessera::Status s_ = (expression); !s_.ok()) return s_; \
  } while (false)

namespace tessera {

// What a check of arguments looks at.
enum class Look : std::uint8_t {
  kEverything,  // pointers too, and on the CPU what lengths and tables hold
  kShapes,      // only descriptions are read: for explain, whose tensors may have no data
};

// Reads the caller's struct, of whatever size it says, into `known`, which holds the defaults. A smaller struct_size
// leaves the defaults of the fields that the caller's header did not have; a larger one is accepted if all bytes that
// this library does not know are zero. least: bytes that every version has; init: the macro that sets struct_size.
template <class Args>
Status read_arguments(const Args* given, std::size_t least, const char* init, Args& known) {
  static_assert(std::is_trivially_copyable_v<Args> && std::is_standard_layout_v<Args>);
  static_assert(offsetof(Args, struct_size) == 0);
  const std::size_t size = given->struct_size;
  // Every version of the struct ends at a multiple of its alignment, so no field is cut in two.
  if (size < least || size % alignof(Args) != 0) {
    return invalid(format("args.struct_size is {}; {} and more, in steps of {}, are accepted (set up with {})", size,
                          least, alignof(Args), init));
  }
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  for (std::size_t at = sizeof(Args); at < size; ++at) {
    if (bytes[at] != 0) {
      return invalid(
          format("args.struct_size is {}; this library knows {} bytes, and byte {} is not zero: it asks for "
                 "something that a newer version added",
                 size, sizeof(Args), at));
    }
  }
  std::memcpy(&known, given, std::min(size, sizeof(Args)));
  known.struct_size = sizeof(Args);
  return {};
}

}  // namespace tessera
