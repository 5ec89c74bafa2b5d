#ifndef CUTLOSS_PYTHON_FFI_HPP_
#define CUTLOSS_PYTHON_FFI_HPP_

namespace cutloss::python {

// Address of the XLA FFI handler, for jax.ffi.register_ffi_target; null in a build without XLA's headers.
void* xla_handler();

}  // namespace cutloss::python

#endif  // CUTLOSS_PYTHON_FFI_HPP_
