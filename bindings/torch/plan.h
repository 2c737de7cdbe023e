// Runs ops by plans that are kept from call to call.
#pragma once

#include "tensor.h"

namespace tessera::python {

// Runs the op on the tensors' device: on the CPU at once, on a GPU on PyTorch's current stream, with scratch from
// PyTorch's allocator. q: args.q. False with an exception set where it fails.
bool run(tessera_attention_op op, const tessera_attention& args, const View& q);

// Raises tessera.Error with the library's sentence unless status is TESSERA_OK.
bool succeeded(tessera_status status);

}  // namespace tessera::python
