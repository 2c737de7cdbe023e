// Runs ops through plans that are kept from call to call.
#pragma once

#include "tensor.h"

namespace tessera::python {

// Runs the op on the tensors' device: on the CPU synchronously, on a GPU on PyTorch's current stream, with a workspace
// from PyTorch's allocator. q: args.q. Returns false, with an exception set, if it fails.
bool run(tessera_attention_op op, const tessera_attention& args, const View& q);

// Raises tessera.Error with the library's error message unless status is TESSERA_OK.
bool succeeded(tessera_status status);

}  // namespace tessera::python
